"""torch.compile and torch.export equal eager to the bit; what cannot be compiled raises."""

from collections.abc import Callable, Iterator

import pytest
import torch
from calls import random_problem
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.func import grad, jvp, vmap

import detlogp
from detlogp.testing import assert_same_bits

pytestmark = [
    # Of torch's own compiler, about its own code.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]
BACKENDS = ["eager", "aot_eager", "inductor"]
V = 300


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _step(x: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Both results, and a loss of both."""
    result = detlogp.logp(x, ids, rows=mask, return_lse=True)
    lse = torch.where(result.lse.isinf(), 0.0, result.lse)
    return result.logp, result.lse, result.logp.sum() + 2.0 * lse.sum()


def _run(
    step: Callable[..., tuple[Tensor, Tensor, Tensor]],
    x: Tensor,
    ids: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    logp, lse, loss = step(leaf, ids, mask)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return logp.detach(), lse.detach(), gradient


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_step(backend: str, device: str, generator: torch.Generator) -> None:
    """Case 19: value, lse and gradient, with -100 among the ids, dense, masked and by number."""
    compiled = torch.compile(_step, fullgraph=True, backend=backend)
    mask = torch.tensor([True, False, True, True, True], device=device)
    numbers = torch.tensor([4, 0, 0, 7], device=device)
    for dtype in (torch.bfloat16, torch.float32):
        x, ids, *_ = random_problem(5, V, dtype, device, generator)
        ids[2] = -100
        for rows in (None, mask, numbers):
            actual, expected = (_run(step, x, ids, rows) for step in (compiled, _step))
            for one, other in zip(actual, expected, strict=True):
                assert_same_bits(one, other)
            assert not actual[2][2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_alone(backend: str, device: str, generator: torch.Generator) -> None:
    """Without a derivative: the plain operator."""
    x, ids, *_ = random_problem(5, V, torch.float16, device, generator)
    ids[0] = V

    def score(x: Tensor, ids: Tensor) -> Tensor:
        return detlogp.logp(x, ids, dtype=torch.float16)

    compiled = torch.compile(score, fullgraph=True, backend=backend)
    assert_same_bits(compiled(x, ids), score(x, ids))
    with torch.no_grad():
        assert_same_bits(compiled(x.clone().requires_grad_(), ids), score(x, ids))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_numbers_of_rows_do_not_recompile(
    requires_grad: bool, device: str, generator: torch.Generator
) -> None:
    """One compilation with dynamic=True; by default the second number of rows makes the last."""
    for dynamic, compilations in ((True, 1), (None, 2)):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(_step, fullgraph=True, backend=counter, dynamic=dynamic)
        for rows in (3, 5, 9, 64):
            x, ids, *_ = random_problem(rows, V, torch.float32, device, generator)
            logp, lse, _ = compiled(x.requires_grad_(requires_grad), ids, None)
            expected = detlogp.logp(x, ids, return_lse=True)
            assert_same_bits(logp.detach(), expected.logp.detach())
            assert_same_bits(lse.detach(), expected.lse.detach())
        assert counter.frame_count == compilations


def test_inductor_with_dynamic_rows(device: str, generator: torch.Generator) -> None:
    compiled = torch.compile(_step, fullgraph=True, backend="inductor", dynamic=True)
    for rows in (3, 8):
        x, ids, *_ = random_problem(rows, V, torch.bfloat16, device, generator)
        for one, other in zip(_run(compiled, x, ids, None), _run(_step, x, ids, None), strict=True):
            assert_same_bits(one, other)


class _Module(torch.nn.Module):
    def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        result = detlogp.logp(x, ids, rows=mask, return_lse=True)
        return result.logp, result.lse


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic: bool, device: str, generator: torch.Generator) -> None:
    """The exported program calls one operator, which is opaque: no [N, V] intermediate."""
    mask = torch.tensor([True, False, True, True, True], device=device)
    x, ids, *_ = random_problem(5, V, torch.bfloat16, device, generator)
    ids[2] = -100
    rows = {0: torch.export.Dim("rows")} if dynamic else None
    program = torch.export.export(_Module(), (x, ids, mask), dynamic_shapes=(rows,) * 3)
    targets = [str(node.target) for node in program.graph.nodes]
    assert [t for t in targets if t.startswith("detlogp")] == ["detlogp.logp_with_stats.default"]
    expected = _Module()(x, ids, mask)
    for one, other in zip(program.module()(x, ids, mask), expected, strict=True):
        assert_same_bits(one, other)


def _transforms(function: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Callable[..., Tensor]]:
    def tangent(x: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = jvp(lambda y: function(y, ids), (x,), (x,))[1]
        return result

    def gradient(x: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = grad(lambda y: function(y, ids).sum())(x)
        return result

    def hessian_vector(x: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = jvp(lambda y: gradient(y, ids), (x,), (x,))[1]
        return result

    return {
        "grad": gradient,
        "jvp": tangent,
        "vmap": vmap(function),
        "vmap of grad": vmap(grad(function)),
        "jvp of grad": hessian_vector,
    }


TRANSFORMS = list(_transforms(detlogp.logp))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_inside(
    transform: str, backend: str, device: str, generator: torch.Generator
) -> None:
    """An error that says what to do, never zeros; where the graph may break, eager is right."""
    x, ids, *_ = random_problem(4, V, torch.float32, device, generator)
    function = _transforms(detlogp.logp)[transform]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"transform of detlogp\.logp inside"):
        torch.compile(function, fullgraph=True, backend=backend)(x, ids)
    torch._dynamo.reset()
    try:
        actual = torch.compile(function, backend=backend)(x, ids)
    except (RuntimeError, NotImplementedError):
        return
    assert_same_bits(actual, function(x, ids))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_outside(
    transform: str, fullgraph: bool, backend: str, device: str, generator: torch.Generator
) -> None:
    """A transform of a compiled function: right, or an error."""
    x, ids, *_ = random_problem(4, V, torch.float32, device, generator)

    def score(x: Tensor, ids: Tensor) -> Tensor:
        return detlogp.logp(x, ids)

    compiled = torch.compile(score, fullgraph=fullgraph, backend=backend)
    compiled(x, ids)  # what was compiled outside must not serve inside
    try:
        actual = _transforms(compiled)[transform](x, ids)
    except (RuntimeError, NotImplementedError):
        return
    assert_same_bits(actual, _transforms(score)[transform](x, ids))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_second_derivative_of_compiled_raises(
    backend: str, device: str, generator: torch.Generator
) -> None:
    """PyTorch refuses double backward through a compiled region. (Its debugging backend "eager"
    drops the second order of every Function there; nothing of ours runs that could object.)"""
    x, ids, *_ = random_problem(4, V, torch.float32, device, generator)
    leaf = x.detach().requires_grad_()
    compiled = torch.compile(_step, fullgraph=True, backend=backend)
    loss = compiled(leaf, ids, None)[0].square().sum()

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaf)[0]

    with pytest.raises(RuntimeError, match="double backward"):
        penalty()


def test_exact_contract(generator: torch.Generator) -> None:
    problem = random_problem(4, 60, torch.float32, "cpu", generator)
    x, ids = problem[:2]
    compiled = torch.compile(
        lambda t: detlogp.logp(t, ids, contract="exact"), fullgraph=True, backend="aot_eager"
    )
    grads = []
    for function in (compiled, lambda t: detlogp.logp(t, ids, contract="exact")):
        leaf = x.clone().requires_grad_()
        function(leaf).sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert_same_bits(*grads)
