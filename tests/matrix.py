"""The matrix of routes x forms x dtypes: what is expected of each case, and what came."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from problems import (
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
from routes import ALL, ROUTES, THREEFOLD
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


# ---- which kernels a route meets -----------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The library's operators that are called inside, with their arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "detlogp":
            self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
