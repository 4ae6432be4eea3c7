"""Runs routes to a derivative under PyTorch's profiler, and says whose kernels really ran."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import detlogp
from detlogp.evidence.problems import FORMS, Form, detlogp_function, make_problem
from detlogp.evidence.routes import ALL, ROUTES, THREEFOLD

TRAINING = "training"
_CPU, _CUDA = torch._C._autograd.DeviceType.CPU, torch._C._autograd.DeviceType.CUDA
_FUSED = {"detlogp::logp_with_stats", "detlogp::logp_backward"}
_RECURSIVE = {
    f"detlogp::{name}" for name in ("logp_second_order", "logp_tangent", "probability", "row_sum")
}
_DERIVATIVE = {"detlogp::logp_backward", *_RECURSIVE}
# What a formula of PyTorch's own operators would run in the library's place.
_FOREIGN = ("softmax", "logsumexp", "nll_loss", "cross_entropy")


class Ran(NamedTuple):
    """How often each operator and each kernel ran in one route, the library's own apart."""

    route: str
    kind: str  # "training", or the number of derivatives
    own_operators: dict[str, int]
    aten_operators: dict[str, int]
    own_kernels: dict[str, int]  # empty on the CPU, where an operator is its kernel
    other_kernels: dict[str, int]
    complaint: str  # empty where it is as it should be


TRAINING_FORMS = (*FORMS, Form("out", False))


def probe(device: str, quick: bool) -> Iterator[Ran]:
    """Ordinary training in every form, then every route that PyTorch itself can do."""
    for form in TRAINING_FORMS:
        yield probe_training(form, device)
    for name in routes(quick):
        yield probe_route(name, device)


def count(quick: bool) -> int:
    return len(TRAINING_FORMS) + len(routes(quick))


def probe_training(form: Form, device: str) -> Ran:
    return _judge(f"{TRAINING}, {form.name}", TRAINING, _training(form, device), device)


def probe_route(name: str, device: str) -> Ran:
    return _judge(name, str(ALL[name].order), _route(name, device), device)


def routes(quick: bool) -> list[str]:
    right = [name for name, route in ALL.items() if route.expected == "right"]
    return (
        [name for name in right if name in ROUTES and ROUTES[name].order <= 2] if quick else right
    )


def _training(form: Form, device: str) -> Callable[[], object]:
    problem = make_problem(4, 5, device, seed=3).to(torch.float32)
    leaf = problem.logits.requires_grad_()
    if form.indexed == "out":
        out = torch.empty(4, device=device)
        return lambda: detlogp.logp(leaf, problem.token_ids, out=out.detach()).sum().backward()
    function = detlogp_function(form, problem.token_ids)

    def step() -> None:
        function(leaf).sum().backward()

    return step


def _route(name: str, device: str) -> Callable[[], Tensor]:
    route = ALL[name]
    dtype = torch.float64 if route.float64_only else torch.float32
    size = (3, 2) if name in THREEFOLD else (4, 5)
    problem = make_problem(*size, device, seed=3).to(dtype)
    function = detlogp_function(FORMS[0], problem.token_ids)
    return lambda: route.run(function, problem.logits, problem.directions)


def _judge(name: str, kind: str, run: Callable[[], object], device: str) -> Ran:
    run()  # what only the first call does is not recorded
    activities = [ProfilerActivity.CPU]
    on_cuda = device.startswith("cuda")
    if on_cuda:
        torch.cuda.synchronize()
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)
    with _quiet_stderr(), warnings.catch_warnings():
        # That events of earlier cycles are cleared: there is one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        profiler.start()
    run()
    if on_cuda:
        torch.cuda.synchronize()
    with _quiet_stderr(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        profiler.stop()
    # The raw events: making a tree of them, as profiler.events() does, takes ten times as long.
    raw: Any = profiler.profiler
    events = raw.kineto_results.events()
    operators = Counter(e.name() for e in events if e.device_type() == _CPU)
    kernels = Counter(_short(e.name()) for e in events if e.device_type() == _CUDA)
    own = {operator: n for operator, n in operators.items() if operator.startswith("detlogp::")}
    aten = {operator: n for operator, n in operators.items() if operator.startswith("aten::")}
    own_kernels = {kernel: n for kernel, n in kernels.items() if kernel.startswith("detlogp::")}
    others = {kernel: n for kernel, n in kernels.items() if kernel not in own_kernels}
    complaint = _complaint(kind, own, aten)
    missing = {_kernel_of(operator) for operator in own} - set(own_kernels)
    if not complaint and on_cuda and missing:
        complaint = f"operators ran without {', '.join(sorted(missing))}"
    return Ran(name, kind, own, aten, own_kernels, others, complaint)


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler announces each start and stop on standard error, from C++."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)


def _kernel_of(operator: str) -> str:
    """The kernel that an operator of the library launches on CUDA."""
    name = operator.removeprefix("detlogp::")
    family = "forward" if name in ("logp", "logp_with_stats", "logp_out") else name
    return f"detlogp::cuda::{family.removeprefix('logp_')}_kernel"


def _short(kernel: str) -> str:
    """A kernel's name without its return type, template and call arguments."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.partition("(")[0].partition("<")[0][:120]


def _complaint(kind: str, own: dict[str, int], aten: dict[str, int]) -> str:
    if kind == TRAINING:
        if set(own) == _FUSED and set(own.values()) == {1}:
            return ""
        return f"training ran {', '.join(sorted(own)) or 'nothing of the library'}"
    foreign = [name for name in aten if any(word in name for word in _FOREIGN)]
    if foreign:
        return f"PyTorch's own {', '.join(sorted(foreign))} ran"
    if kind == "0":
        return "" if own else "no kernel of the library ran"
    needed = _DERIVATIVE if kind == "1" else _RECURSIVE
    return "" if needed & set(own) else "no derivative kernel of the library ran"
