"""Every route to a derivative in every precision, against float64."""

from collections.abc import Iterator
from functools import partial

import torch

from detlogp.evidence import matrix
from detlogp.evidence.problems import Form
from detlogp.evidence.routes import ALL, FORWARD, KEPT, REVERSE
from detlogp.evidence.sections._check import DTYPES, Check, Options, Result, dtype_text

_OUTCOMES = {"right": "pass", "raised": "pass", "wrong": "fail", "skipped": "skip"}


def orders(options: Options) -> Iterator[Check]:
    """Reverse and forward mode to the highest order."""
    return _checks(options, {**REVERSE, **FORWARD, **KEPT}.keys())


def transforms(options: Options) -> Iterator[Check]:
    """torch.func transforms and their nestings, duals, and what else there is."""
    return _checks(options, ALL.keys() - {**REVERSE, **FORWARD, **KEPT}.keys())


def method(route: str) -> str:
    """The family of a route: a row of the coverage matrix."""
    if route in KEPT:
        return "reverse, graph kept"
    if route in REVERSE:
        return "reverse"
    if route in FORWARD:
        return "forward (jvp of jvp ...)"
    if "dual" in route:
        return "forward_ad duals"
    depth = route.count(" of ") + 1
    names = {1: "one transform", 2: "two transforms", 3: "three transforms"}
    return names[depth] if route.split(" ")[0] in _FUNC else "other autograd routes"


_FUNC = {"grad", "vjp", "jvp", "vmap", "jacrev", "jacfwd", "hessian", "linearize"}


def _checks(options: Options, names: object) -> Iterator[Check]:
    most = min(options.max_order, 2) if options.quick else options.max_order
    dtypes = DTYPES[:2] if options.quick else DTYPES
    for name, form in matrix.cases():
        if name not in names or ALL[name].order > most:  # type: ignore[operator]
            continue
        for dtype in dtypes:
            run = partial(_judge, name, form, dtype, options.device)
            case = f"{name}, {form.name}"
            yield Check(case, dtype_text(dtype), run, ALL[name].order, method(name))


def _judge(name: str, form: Form, dtype: torch.dtype, device: str) -> Result:
    found = matrix.judge(name, form, dtype, device)
    outcome = _OUTCOMES[found.outcome]
    if found.outcome == "right":
        reason = f"{found.error:.1e} from float64, {found.tolerance:.1e} allowed"
        return Result(outcome, reason, found.error, found.tolerance)
    if found.outcome == "skipped":
        return Result(outcome, found.reason)
    if found.outcome == "raised":
        return Result(outcome, f"raises, as it must: {found.reason}")
    raised = found.reason.startswith(("detlogp:", "PyTorch:"))
    numbers = (None, None) if raised else (found.error, found.tolerance)
    return Result(outcome, found.reason, *numbers)
