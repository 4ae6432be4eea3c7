"""The matrix of routes x forms x dtypes: what is expected of each case, and what came."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from detlogp.evidence.peers import one_line
from detlogp.evidence.problems import (
    FORMS,
    Form,
    Function,
    Problem,
    Runner,
    detlogp_function,
    make_problem,
    reference_function,
    tolerance,
)
from detlogp.evidence.routes import ALL, ROUTES, THREEFOLD


class Outcome(NamedTuple):
    error: float
    tolerance: float
    outcome: str  # "right", "wrong", "raised" (where PyTorch itself refuses) or "skipped"
    reason: str


@cache
def problem_of(route: str, device: str) -> Problem:
    rows, vocab = (3, 2) if route in THREEFOLD else (4, 5)
    return make_problem(rows, vocab, device, seed=3)


@cache
def expected(route: str, form: Form, device: str) -> Tensor | str:
    """The reference's result, or what it raised."""
    chosen = ALL[route]
    run = chosen.reference or chosen.run
    return attempt(run, reference_function, form, problem_of(route, device))


def attempt(
    run: Runner, make: Callable[[Form, Tensor], Function], form: Form, problem: Problem
) -> Tensor | str:
    try:
        result = run(make(form, problem.token_ids), problem.logits, problem.directions)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return result.detach()


def cases() -> Iterator[tuple[str, Form]]:
    for name, route in ROUTES.items():
        for form in FORMS[:1] if route.one_form else FORMS:
            yield name, form
    for name in THREEFOLD:
        yield name, Form("mask", True)


def judge(name: str, form: Form, dtype: torch.dtype, device: str) -> Outcome:
    route = ALL[name]
    if route.expected == "skipped":
        return Outcome(0.0, 0.0, "skipped", "PyTorch's linearize refuses it or is zero")
    if dtype != torch.float64 and route.float64_only:
        return Outcome(0.0, 0.0, "skipped", "float64 only: order above 8")
    problem = problem_of(name, device)
    reference = expected(name, form, device)
    actual = attempt(route.run, detlogp_function, form, problem.to(dtype))
    if isinstance(reference, str) or isinstance(actual, str):
        both = isinstance(reference, str) and isinstance(actual, str)
        refused = both and route.expected == "raised"
        reason = f"PyTorch: {reference}" if isinstance(reference, str) else f"detlogp: {actual}"
        return Outcome(0.0, 0.0, "raised" if refused else "wrong", reason)
    bound = tolerance(reference, route.order, dtype, problem.logits.shape[-1])
    error = float((actual.double() - reference).abs().max())
    right = actual.shape == reference.shape and error <= bound and route.expected == "right"
    return Outcome(error, bound, "right" if right else "wrong", "" if right else "error too large")


# ---- another implementation, by the same routes --------------------------------------------------


def audited_routes() -> list[str]:
    """Routes up to order 4 that PyTorch itself can do, on rows whose ids are all good."""
    return [
        name
        for name, route in ROUTES.items()
        if route.expected == "right" and route.order <= 4 and "linearize" not in name
    ]


def judge_implementation(
    implementation: Callable[[Tensor, Tensor], Tensor], route: str, device: str
) -> tuple[str, str]:
    """ "held", "refused" (it raised) or "broken" (silently wrong), and why; in float32.

    What counts as wrong is a missing term, not a rounding: an error above 1e-3 of the derivative.
    """
    exact = make_problem(4, 8, device, seed=3)
    ids = exact.token_ids.remainder(8)
    chosen = ROUTES[route]
    form = FORMS[0]
    expected = chosen.run(reference_function(form, ids), exact.logits, exact.directions).detach()
    low = exact.to(torch.float32)
    try:
        actual = chosen.run(
            lambda x: implementation(x, ids).sin(), low.logits.clone(), low.directions
        ).detach()
    except Exception as error:
        return "refused", one_line(error)
    if actual.shape != expected.shape:
        return "broken", f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error_size = float((actual.double() - expected).abs().nan_to_num(nan=torch.inf).max())
    allowed = 1e-3 * max(1.0, float(expected.abs().max()))
    detail = f"error {error_size:.2e}, allowed {allowed:.2e}"
    return ("held" if error_size <= allowed else "broken"), detail
