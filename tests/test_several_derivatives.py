"""Several token ids a row: transforms, both modes, every order, compiled functions."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import (
    all_of,
    assert_finite_differences,
    both_contracts,
    nested_derivatives,
    skip_double,
    with_tangents,
)
from several import composed, make_problem, temperatures
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import detlogp
from detlogp.evidence.kernels import Recorder
from detlogp.testing import assert_same_bits

Parts = tuple[Tensor, Tensor, Tensor]
NAMES = ["logp", "lse", "entropy"]


def parts_of(x: Tensor, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Parts:
    """With an lse of 0 where a row is not selected, as `composed` has it."""
    found = all_of(x, ids, rows=mask, **options)
    selected = True if mask is None else mask
    lse = torch.where(torch.as_tensor(selected, device=x.device), found.lse, 0.0)
    return found.logp, lse, found.entropy


def small_problem(device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and a mask."""
    x, ids, *_ = make_problem(12, torch.float32, device, generator, rows=6, count=4)
    return x, ids, torch.arange(6, device=device) != 4


# ---- against torch in float64 --------------------------------------------------------------------


@both_contracts
@temperatures
@pytest.mark.parametrize("which", range(3), ids=NAMES)
def test_both_modes(
    which: int, temperature: float, contract: str, device: str, generator: torch.Generator
) -> None:
    """Orders 1 to 3, jvp, jvp of jvp, vjp of jvp; exactly 0 in a row that is not selected."""
    x, ids, mask = small_problem(device, generator)
    u, w = torch.randn(2, *x.shape, generator=generator).to(device)
    options: dict[str, Any] = {"temperature": temperature, "contract": contract}
    scale = torch.randn(composed(x, ids, mask, 1.0)[which].shape, generator=generator).to(device)

    def ours(logits: Tensor) -> Tensor:
        return parts_of(logits, ids, mask, **options)[which]

    def exact(logits: Tensor) -> Tensor:
        return composed(logits, ids, mask, temperature)[which]

    found = nested_derivatives(ours, x, u, w, scale)
    expected = nested_derivatives(exact, x.double(), u.double(), w.double(), scale.double())
    for route, value in expected.items():
        error = (found[route].double() - value).abs().max()
        assert error <= 1e-5 * value.abs().max() + 1e-6, (route, error)
        assert_same_bits(found[route][4].abs(), torch.zeros_like(found[route][4]))


@both_contracts
def test_orders_to_four(contract: str, device: str, generator: torch.Generator) -> None:
    """Reverse mode, of all three results together."""
    x, ids, mask = small_problem(device, generator)
    u = torch.randn(x.shape, generator=generator).to(device)
    weights = torch.randn(ids.shape, generator=generator).to(device)

    def descend(parts: Parts | list[Tensor], leaf: Tensor) -> list[Tensor]:
        gradients = []
        value = (parts[0] * weights.to(leaf.dtype)).sum() + parts[1].sum() - parts[2].sum()
        for _ in range(4):
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            gradients.append(gradient.detach())
            value = (gradient * u.to(leaf.dtype)).sum()
        return gradients

    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    ours = descend(parts_of(leaf, ids, mask, contract=contract, temperature=0.9), leaf)
    exact = descend(composed(wide, ids, mask, 0.9), wide)
    for one, other in zip(ours, exact, strict=True):
        assert (one.double() - other).abs().max() <= 3e-5 * other.abs().max()


@temperatures
@pytest.mark.parametrize("fast", [False, True])
def test_finite_differences(
    fast: bool, temperature: float, device: str, generator: torch.Generator
) -> None:
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    ids = torch.tensor([[1, 1, 3], [-100, 0, 0], [4, 2, 1], [5, 7, -1]], device=device)
    mask = torch.tensor([True, True, False, True], device=device)

    def function(logits: Tensor) -> Parts:
        return parts_of(logits, ids, mask, temperature=temperature)

    assert_finite_differences(function, (x,), fast)


@both_contracts
def test_routes_agree(
    contract: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Jacobians by every route, and a Hessian, in each dtype."""
    skip_double(contract, dtype)
    x, ids, mask = small_problem(device, generator)
    x = x.to(dtype)

    def ours(logits: Tensor) -> Tensor:
        found: Tensor = detlogp.logp(logits, ids, rows=mask, contract=contract, temperature=0.7)
        return found

    def exact(logits: Tensor) -> Tensor:
        return composed(logits, ids, mask, 0.7)[0]

    expected = jacrev(exact)(x.double())
    leaf = x.clone().requires_grad_()
    value = ours(leaf)
    basis = torch.eye(ids.numel(), dtype=value.dtype, device=device).view(-1, *ids.shape)
    (batched,) = torch.autograd.grad(value, leaf, basis, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(value, leaf, b, retain_graph=True)[0] for b in basis]
    eps = max(torch.finfo(dtype).eps, torch.finfo(value.dtype).eps)
    for jacobian in (
        batched.view(expected.shape),
        torch.stack(loop).view(expected.shape),
        jacrev(ours)(x),
        jacfwd(ours)(x),
    ):
        assert (jacobian.double() - expected).abs().max() <= 16 * eps

    def loss(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda logits: function(logits).sin().sum()

    twice = hessian(loss(exact))(x.double())
    bound = 100 * eps * (1.0 + twice.abs().max())
    assert (hessian(loss(ours))(x).double() - twice).abs().max() <= bound


# ---- bits under transforms -----------------------------------------------------------------------


@both_contracts
@temperatures
def test_transforms_have_the_plain_bits(
    temperature: float,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    skip_double(contract, dtype)
    x, ids, *_ = make_problem(300, dtype, device, generator)
    mask = torch.arange(7, device=device) != 4
    for asked in (None, torch.bfloat16):
        options = {"contract": contract, "temperature": temperature, "dtype": asked}
        expected = all_of(x, ids, rows=mask, on_invalid="nan", **options)

        def score(x: Tensor, ids: Tensor, mask: Tensor, options: Any = options) -> Any:
            return tuple(all_of(x, ids, rows=mask, on_invalid="nan", **options))

        mapped = vmap(score)(x, ids, mask)
        pulled, *_ = vjp(lambda y: score(y, ids, mask), x)
        pushed, *_ = jvp(lambda y: score(y, ids, mask), (x,), (x,))
        with forward_ad.dual_level():
            dual = score(forward_ad.make_dual(x, x), ids, mask)
            primals = [forward_ad.unpack_dual(part).primal for part in dual]
        for found in (mapped, pulled, pushed, primals):
            for one, other in zip(found, expected, strict=True):
                assert_same_bits(one, other)


B, N, V, K = 3, 4, 300, 5


def _value(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    found: Tensor = detlogp.logp(x, ids, rows=mask)
    return found


def _gradient(x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    result: Tensor = grad(lambda y: _value(y, ids, mask).sin().sum())(x)
    return result


FUNCTIONS = with_tangents(_value, _gradient)
IN_DIMS = [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (1, 1, 1), (-1, -1, -1)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
def test_vmap_equals_the_loop(
    in_dims: tuple[int | None, ...],
    function: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """To the bit, with as many calls of operators as one sample."""
    chosen = FUNCTIONS[function]
    x, ids, *_ = make_problem(V, dtype, device, generator, rows=B * N, count=K)
    mask = torch.arange(B * N, device=device) % 3 != 1
    whole = (x.view(B, N, V), ids.view(B, N, K), mask.view(B, N))
    operands = [
        part[0] if dim is None else part.movedim(0, dim)
        for part, dim in zip(whole, in_dims, strict=True)
    ]
    with Recorder() as recorder:
        mapped = vmap(chosen, in_dims=in_dims)(*operands)
    samples = [
        [
            part if dim is None else part.select(dim, b)
            for part, dim in zip(operands, in_dims, strict=True)
        ]
        for b in range(B)
    ]
    assert_same_bits(mapped, torch.stack([chosen(*sample) for sample in samples]))
    with Recorder() as one:
        chosen(*samples[0])
    assert len(recorder.calls) == len(one.calls)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_samples_no_rows_no_ids(function: str, device: str) -> None:
    for samples, rows, count in ((0, N, K), (B, 0, K), (B, N, 0)):
        x = torch.zeros(samples, rows, V, device=device)
        ids = torch.zeros(samples, rows, count, dtype=torch.int64, device=device)
        mask = torch.ones(samples, rows, dtype=torch.bool, device=device)
        result = vmap(FUNCTIONS[function])(x, ids, mask)
        operands = (x.new_zeros(rows, V), ids.new_zeros(rows, count), mask.new_ones(rows))
        one = FUNCTIONS[function](*operands)
        assert result.shape == (samples, *one.shape)


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@both_contracts
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_equals_eager(
    backend: str, contract: str, device: str, generator: torch.Generator
) -> None:
    """Value alone, and training with every result; other numbers of rows."""

    def plain(logits: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = detlogp.logp(logits, ids, contract=contract)
        return found

    def train(logits: Tensor, ids: Tensor) -> Parts:
        mask = torch.arange(len(ids), device=ids.device) != 4
        return parts_of(logits, ids, mask, contract=contract, temperature=0.7)

    for function in (plain, train):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for rows in (6, 9):
            x, ids, *_ = make_problem(300, torch.bfloat16, device, generator, rows=rows)
            answers = []
            for chosen in (function, compiled):
                leaf = x.clone().requires_grad_()
                found = chosen(leaf, ids)
                found = found if isinstance(found, tuple) else (found,)
                grads = [torch.linspace(-1, 1, f.numel(), device=device).view_as(f) for f in found]
                gradient = torch.autograd.grad(found, leaf, grads)
                values = chosen(x, ids)
                values = values if isinstance(values, tuple) else (values,)
                answers.append([*found, *values, *gradient])
            for one, other in zip(*answers, strict=True):
                assert_same_bits(one.detach(), other.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_export(device: str, generator: torch.Generator) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            found: Tensor = detlogp.logp(x, ids)
            return found

    x, ids, *_ = make_problem(300, torch.bfloat16, device, generator)
    program = torch.export.export(Module(), (x, ids))
    assert_same_bits(program.module()(x, ids), detlogp.logp(x, ids))
