"""temperature and return_entropy: values, bits, gradients, derivatives of every order."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from calls import (
    all_of,
    assert_finite_differences,
    both_contracts,
    nested_derivatives,
    random_problem,
    skip_double,
)
from torch import Tensor

import detlogp
from detlogp.evidence.layouts import LAYOUTS
from detlogp.functional import LogpEntropyResult, LogpLseEntropyResult
from detlogp.testing import (
    CUDA_LAYOUTS,
    assert_same_bits,
    available_cpu_paths,
    cpu_path,
    cuda_layout,
    entropy_error_bound,
)

INF, NAN = torch.inf, torch.nan
HALVES = [torch.float16, torch.bfloat16]
VOCABS = [1, 2, 31, 129, 4097, 10241, 50257]


def exact_entropy(x: Tensor) -> Tensor:
    """[...], of finite logits or -inf, computed in the x87's 64 bits."""
    wide = x.double().cpu().numpy().astype(np.longdouble)
    distance = wide.max(-1, keepdims=True) - wide
    e = np.exp(-distance)
    weighted = e * np.where(np.isinf(distance), 0, distance)
    entropy = np.log(e.sum(-1)) + weighted.sum(-1) / e.sum(-1)
    return torch.from_numpy(entropy.astype(np.float64)).to(x.device)


# ---- values --------------------------------------------------------------------------------------


@both_contracts
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_entropy(
    vocab: int,
    temperature: float,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """Within its bound, of random rows, of rows that are almost certain, and of equal logits."""
    skip_double(contract, dtype)
    x = random_problem(40, vocab, dtype, device, generator).logits
    x[10:20, 0] += 20
    x[20:25] = x[20:25, :1]
    x[25:30, vocab // 2 + 1 :] = -INF
    ids = torch.zeros(40, dtype=torch.int64, device=device)
    found = all_of(x, ids, temperature=temperature, contract=contract)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    quotients = x.to(wide) / torch.tensor(temperature, dtype=wide, device=device)
    error = (found.entropy.double() - exact_entropy(quotients)).abs()
    bound = entropy_error_bound(quotients, wide, contract)
    assert (error <= bound).all(), (error / bound).max()
    assert found.entropy.dtype == wide


@both_contracts
def test_results_are_those_that_were_asked_for(contract: str, device: str) -> None:
    x, ids = torch.zeros(2, 4, device=device), torch.tensor([1, 2], device=device)
    pair = detlogp.logp(x, ids, return_entropy=True, contract=contract)
    assert isinstance(pair, LogpEntropyResult)
    assert pair._fields == ("logp", "entropy")
    assert all_of(x, ids, contract=contract)._fields == ("logp", "lse", "entropy")
    assert isinstance(detlogp.logp(x, ids, temperature=2.0), Tensor)
    half = all_of(x, ids, dtype=torch.bfloat16, contract=contract)
    assert {part.dtype for part in half} == {torch.bfloat16}
    assert half.entropy.tolist() == [1.3828125] * 2


SPECIAL: list[tuple[list[float], int, float]] = [
    ([0.0, -INF], 0, 0.0),
    ([0.0, -INF], 1, 0.0),
    ([5.0], 0, 0.0),
    ([-INF, 0.0, 0.0], 0, math.log(2)),
    ([0.0, -3e38], 0, 0.0),
    ([-3e38, -3e38], 0, math.log(2)),
    ([3e38, 0.0], 0, 0.0),
    ([NAN, 1.0], 1, NAN),
    ([INF, 1.0], 1, NAN),
    ([INF, INF], 1, NAN),
    ([-INF, -INF], 1, NAN),
    ([0.0, 0.0], -100, 0.0),
    ([NAN, 0.0], 2, 0.0),
]


@both_contracts
@pytest.mark.parametrize(("row", "token_id", "entropy"), SPECIAL)
def test_special_rows(
    row: list[float], token_id: int, entropy: float, contract: str, device: str
) -> None:
    """With a gradient that is NaN where the entropy is, and finite elsewhere."""
    x = torch.tensor([row], device=device, requires_grad=True)
    found = all_of(x, torch.tensor([token_id], device=device), contract=contract)
    assert found.entropy.item() == pytest.approx(entropy, nan_ok=True, abs=1e-6)
    (gradient,) = torch.autograd.grad(found.entropy.sum(), x)
    assert bool(gradient.isnan().all()) == math.isnan(entropy)
    assert bool(gradient.isfinite().all()) != math.isnan(entropy)


@both_contracts
def test_rows_and_out(contract: str, device: str, generator: torch.Generator) -> None:
    x, ids, *_ = random_problem(6, 300, torch.float32, device, generator)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    options: dict[str, Any] = {"contract": contract, "temperature": 0.6}
    whole = all_of(x, ids, **options)
    some = all_of(x, ids, rows=mask, **options)
    assert_same_bits(some.entropy, torch.where(mask, whole.entropy, 0.0))
    assert_same_bits(some.logp, torch.where(mask, whole.logp, 0.0))
    for requires_grad in (False, True):
        out = torch.full((6,), 7.0, dtype=torch.bfloat16, device=device)
        leaf = x.clone().requires_grad_(requires_grad)
        found = all_of(leaf, ids, rows=mask, out=out, **options)
        assert found.logp is out
        assert_same_bits(out.detach(), torch.where(mask, whole.logp.bfloat16(), 7.0))
        assert_same_bits(found.entropy.detach(), some.entropy)


# ---- bits ----------------------------------------------------------------------------------------


@both_contracts
@pytest.mark.parametrize("vocab", VOCABS)
def test_nothing_else_changes(
    vocab: int, contract: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """logp and lse beside the entropy; and at a temperature, those of the quotients."""
    skip_double(contract, dtype)
    x, ids, *_ = random_problem(9, vocab, dtype, device, generator)
    x[1, 0], x[2, -1], x[3] = NAN, INF, -INF
    x[4, vocab // 2 :] = -INF
    plain = detlogp.logp(x, ids, return_lse=True, contract=contract)
    found = all_of(x, ids, contract=contract)
    assert_same_bits(found.logp, plain.logp)
    assert_same_bits(found.lse, plain.lse)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for temperature in (0.3, 0.7, 1.7, 1e6):
        quotients = x.to(wide) / torch.tensor(temperature, dtype=wide, device=device)
        expected = all_of(quotients, ids, contract=contract)
        found = all_of(x, ids, temperature=temperature, contract=contract)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
        alone = detlogp.logp(x, ids, temperature=temperature, contract=contract)
        assert_same_bits(alone, expected.logp)


@both_contracts
@pytest.mark.parametrize("vocab", [129, 10241])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(
    layout: str,
    vocab: int,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """A row's entropy and gradient do not depend on the rows around it, strides or alignment."""
    skip_double(contract, dtype)
    problem = random_problem(13, vocab, dtype, device, generator)

    def solve(x: Tensor, ids: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        found = all_of(leaf, ids, contract=contract, temperature=0.8)
        (gradient,) = torch.autograd.grad((found.logp, found.entropy), leaf, (a, b))
        return [found.entropy.detach(), gradient]

    expected = solve(*problem)
    for other in LAYOUTS[layout](problem, generator):
        for one, whole in zip(solve(*other.parts), expected, strict=True):
            assert_same_bits(one[other.take], whole[other.rows])


@both_contracts
@pytest.mark.parametrize("path", available_cpu_paths())
@pytest.mark.parametrize("vocab", VOCABS)
def test_cpu_paths(
    vocab: int, path: str, contract: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    skip_double(contract, dtype)
    problem = random_problem(4, vocab, dtype, "cpu", generator)

    def solve() -> list[Tensor]:
        leaf = problem.logits.clone().requires_grad_()
        found = all_of(leaf, problem.token_ids, contract=contract, temperature=1.3)
        gradients = torch.autograd.grad([part.sum() for part in found], leaf)
        return [*(part.detach() for part in found), *gradients]

    with cpu_path("portable"):
        expected = solve()
    with cpu_path(path):
        for one, other in zip(solve(), expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("vocab", [7, 4097])
def test_the_exact_entropy_has_no_order(
    vocab: int, device: str, generator: torch.Generator
) -> None:
    x, ids, *_ = random_problem(9, vocab, torch.float32, device, generator)
    x[1, vocab // 2 :] = -INF
    order = torch.randperm(vocab, generator=generator).to(device)
    expected = all_of(x, ids, contract="exact").entropy
    assert_same_bits(all_of(x[:, order], ids, contract="exact").entropy, expected)


def _gradient_of_entropy(x: Tensor, ids: Tensor, contract: str) -> Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(all_of(leaf, ids, contract=contract).entropy.sum(), leaf)
    return gradient


@both_contracts
@pytest.mark.parametrize("vocab", VOCABS)
def test_the_sign_of_a_zero(
    vocab: int, contract: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Of rows of 0 and -0 the gradient is 0; whether a max is 0 or -0 must not show in its sign."""
    skip_double(contract, dtype)
    signs = torch.randn(5, vocab, generator=generator)
    x = torch.zeros(5, vocab).copysign(signs).to(device, dtype)
    ids = torch.randint(vocab, (5,), generator=generator).to(device)
    expected = _gradient_of_entropy(x, ids, contract)
    assert not expected.any()
    for row in range(5):
        alone = _gradient_of_entropy(x[row], ids[row], contract)
        assert_same_bits(alone, expected[row])
    strided = _gradient_of_entropy(x.t().contiguous().t(), ids, contract)
    assert_same_bits(strided, expected)
    ways = (
        [cuda_layout(name) for name in CUDA_LAYOUTS]
        if device == "cuda"
        else [cpu_path(name) for name in available_cpu_paths()]
    )
    for way in ways:
        with way:
            assert_same_bits(_gradient_of_entropy(x, ids, contract), expected)
    if contract == "exact":
        order = torch.randperm(vocab, generator=generator).to(device)
        place = order.argsort()
        shuffled = _gradient_of_entropy(x[:, order], place[ids], contract)
        assert_same_bits(shuffled[:, place], expected)
        assert_same_bits(_gradient_of_entropy(x.cpu(), ids.cpu(), contract), expected.cpu())


def assert_layouts_agree(
    layouts: Sequence[str], x: Tensor, ids: Tensor, **options: Any
) -> LogpLseEntropyResult:
    """That they have the bits of "rows", which it returns."""
    with cuda_layout("rows"):
        expected = all_of(x, ids, **options)
    for layout in layouts:
        with cuda_layout(layout):
            for one, other in zip(all_of(x, ids, **options), expected, strict=True):
                assert_same_bits(one, other)
    return expected


@pytest.mark.cuda
@both_contracts
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("vocab", [*VOCABS, 32000, 151936])
def test_cuda_layouts(
    vocab: int,
    dtype: torch.dtype,
    temperature: float,
    contract: str,
    generator: torch.Generator,
) -> None:
    """Every layout has the bits of "rows"; in the exact contract, those of the CPU."""
    problem = random_problem(70 if vocab > 20000 else 300, vocab, dtype, "cuda", generator)
    x, ids = problem.logits, problem.token_ids
    x[1::7] += 300
    x[2, 0], x[3, -1], x[4] = NAN, INF, -INF
    x[5, vocab // 3 :] = -INF
    ids[6] = -100
    options: dict[str, Any] = {"contract": contract, "temperature": temperature}
    layouts = ("auto", "ring1", "ring2", "ring4", "ring8")
    expected = assert_layouts_agree(layouts, x, ids, **options)
    on_cpu = all_of(x.cpu(), ids.cpu(), **options)
    if contract == "exact":
        for one, other in zip(expected, on_cpu, strict=True):
            assert_same_bits(one.cpu(), other)
    else:
        torch.testing.assert_close(expected.entropy.cpu(), on_cpu.entropy, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 37.5, 1e6, 1e30, 3e38])
@pytest.mark.parametrize("dtype", HALVES)
def test_cuda_layouts_with_any_temperature(
    dtype: torch.dtype, temperature: float, generator: torch.Generator
) -> None:
    """A temperature moves the bound below which exponentials are subnormal."""
    problem = random_problem(9, 32000, dtype, "cuda", generator)
    x, ids = problem.logits, problem.token_ids
    for row in range(6):
        x[row].uniform_(-2, 0).mul_(87 * min(temperature, 600) / 10**row)
    x[7] = -INF
    x[7, 5] = 1
    assert_layouts_agree(("ring1", "ring2", "ring4", "ring8"), x, ids, temperature=temperature)


@pytest.mark.cuda
@both_contracts
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_every_slot_of_a_ring_comes_round(
    dtype: torch.dtype, temperature: float, contract: str, generator: torch.Generator
) -> None:
    problem = random_problem(1200, 25600, dtype, "cuda", generator)
    x, ids = problem.logits, problem.token_ids
    ids[::9] = -100
    assert_layouts_agree(("ring1", "ring2"), x, ids, contract=contract, temperature=temperature)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_exact_gradient_on_cuda_is_the_cpus(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    for vocab in (7, 4097, 50257):
        problem = random_problem(20, vocab, dtype, "cuda", generator)
        gradients: list[Tensor] = []
        for device in ("cuda", "cpu"):
            x, ids, a, b = (part.to(device) for part in problem)
            leaf = x.requires_grad_()
            found = all_of(leaf, ids, contract="exact", temperature=0.9)
            gradients += torch.autograd.grad(found, leaf, (a, b, a + b))
        assert_same_bits(gradients[0].cpu(), gradients[1])


# ---- gradients -----------------------------------------------------------------------------------


def _exact_gradient(
    x: Tensor, ids: Tensor, grads: tuple[Tensor, ...], temperature: float
) -> Tensor:
    leaf = x.double().requires_grad_()
    scaled = leaf / temperature
    log_p = scaled.log_softmax(-1)
    logp = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    results = (logp, scaled.logsumexp(-1), entropy)
    (gradient,) = torch.autograd.grad(results, leaf, tuple(g.double() for g in grads))
    return gradient


@both_contracts
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("vocab", [1, 31, 4097, 20000])
def test_gradient(
    vocab: int,
    temperature: float,
    inplace: bool,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    skip_double(contract, dtype)
    x, ids, a, b = random_problem(7, vocab, dtype, device, generator)
    ids[3] = -100
    grads = (a, b, torch.linspace(-2, 2, 7, device=device, dtype=a.dtype))
    leaf = x.clone().requires_grad_()
    logits = leaf * 1 if inplace else leaf
    found = all_of(
        logits, ids, temperature=temperature, contract=contract, inplace_backward=inplace
    )
    (gradient,) = torch.autograd.grad(found, leaf, grads)
    kept = torch.arange(7, device=device) != 3
    exact = _exact_gradient(x[kept], ids[kept], tuple(g[kept] for g in grads), temperature)
    unit = torch.finfo(a.dtype).eps
    size = torch.stack([g[kept].double().abs() for g in grads]).sum(0).unsqueeze(-1) / temperature
    half = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    error = (gradient[kept].double() - exact).abs()
    assert (error <= (60 + vocab / 128) * unit * size + half).all()
    assert not gradient[3].any()
    assert gradient.dtype == dtype


# ---- other derivatives ---------------------------------------------------------------------------


@both_contracts
@pytest.mark.parametrize("name", ["logp", "lse", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_derivatives(
    temperature: float, name: str, contract: str, device: str, generator: torch.Generator
) -> None:
    """Orders 1 to 3, in both modes, against torch's own in float64."""
    x, ids, scale, _ = random_problem(6, 40, torch.float32, device, generator)
    u, w = torch.randn(2, 6, 40, generator=generator).to(device)

    def ours(logits: Tensor) -> Tensor:
        found = all_of(logits, ids, temperature=temperature, contract=contract)
        part: Tensor = getattr(found, name)
        return part

    def exact(logits: Tensor) -> Tensor:
        scaled = logits / temperature
        lse = scaled.exp().sum(-1).log()
        if name == "lse":
            return lse
        if name == "logp":
            return scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - lse
        log_p = scaled - lse.unsqueeze(-1)
        return -(log_p.exp() * log_p).sum(-1)

    found = nested_derivatives(ours, x, u, w, scale)
    expected = nested_derivatives(exact, x.double(), u.double(), w.double(), scale.double())
    for route, value in expected.items():
        error = (found[route].double() - value).abs().max()
        assert error <= 1e-5 * value.abs().max() + 1e-6, (route, error)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("fast", [False, True])
def test_finite_differences(
    fast: bool, temperature: float, device: str, generator: torch.Generator
) -> None:
    x = torch.randn(3, 5, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    ids = torch.tensor([1, -100, 4], device=device)

    def function(logits: Tensor) -> tuple[Tensor, Tensor]:
        found = detlogp.logp(logits, ids, temperature=temperature, return_entropy=True)
        return found.logp, found.entropy

    assert_finite_differences(function, (x,), fast)


@both_contracts
def test_orders_to_six(contract: str, device: str, generator: torch.Generator) -> None:
    """Reverse mode, against torch in float64."""
    x, ids, scale, _ = random_problem(3, 12, torch.float32, device, generator)
    u = torch.randn(3, 12, generator=generator).to(device)

    def descend(value: Tensor, leaf: Tensor, u: Tensor) -> list[Tensor]:
        gradients = []
        for _ in range(6):
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            gradients.append(gradient.detach())
            value = (gradient * u).sum()
        return gradients

    leaf = x.clone().requires_grad_()
    found = all_of(leaf, ids, contract=contract, temperature=0.9)
    ours = descend((found.entropy * scale).sum(), leaf, u)
    wide = x.double().requires_grad_()
    log_p = (wide / 0.9).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    for one, other in zip(
        ours, descend((entropy * scale.double()).sum(), wide, u.double()), strict=True
    ):
        assert (one.double() - other).abs().max() <= 3e-5 * other.abs().max()


@both_contracts
def test_transforms_have_the_plain_bits(
    contract: str, device: str, generator: torch.Generator
) -> None:
    x, ids, *_ = random_problem(5, 300, torch.bfloat16, device, generator)
    expected = all_of(x, ids, contract=contract, temperature=0.7)

    def score(logits: Tensor, token_id: Tensor) -> tuple[Tensor, ...]:
        return tuple(all_of(logits, token_id, contract=contract, temperature=0.7))

    for one, other in zip(torch.func.vmap(score)(x, ids), expected, strict=True):
        assert_same_bits(one, other)
    values, _, *_ = torch.func.vjp(lambda logits: score(logits, ids), x)
    for one, other in zip(values, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled(device: str, generator: torch.Generator) -> None:
    x, ids, a, b = random_problem(5, 300, torch.float32, device, generator)

    def function(logits: Tensor) -> LogpLseEntropyResult:
        return all_of(logits, ids, temperature=0.7)

    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        found = f(leaf)
        results.append([*found, *torch.autograd.grad(found, leaf, (a, b, a))])
    for one, other in zip(*results, strict=True):
        assert_same_bits(one.detach(), other.detach())


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -1.0, INF, NAN, 1e-50, 1e50])
def test_temperature_must_be_positive(temperature: float, device: str) -> None:
    x, ids = torch.zeros(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="temperature must be between"):
        detlogp.logp(x, ids, temperature=temperature)


@pytest.mark.parametrize("temperature", ["1", None, torch.tensor(2.0), True])
def test_temperature_must_be_a_float(temperature: Any, device: str) -> None:
    x, ids = torch.zeros(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match="temperature must be a float"):
        detlogp.logp(x, ids, temperature=temperature, return_entropy=True)


def test_double_arithmetic_takes_its_own_range(device: str) -> None:
    x = torch.zeros(2, 3, device=device, dtype=torch.float64)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    found = detlogp.logp(x, ids, temperature=1e50)
    assert found.tolist() == pytest.approx([-math.log(3)] * 2, abs=1e-15)
