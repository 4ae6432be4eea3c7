"""Several token ids a row: values, semantics, bits, gradients of training."""

from typing import Any

import pytest
import torch
from calls import (
    all_of,
    both_contracts,
    skip_double,
)
from several import composed, make_problem, temperatures
from torch import Tensor

import detlogp
from detlogp.evidence.kernels import Recorder
from detlogp.evidence.layouts import LAYOUTS
from detlogp.testing import assert_same_bits

INF, NAN = torch.inf, torch.nan
HALVES = (torch.float16, torch.bfloat16)
vocabs = pytest.mark.parametrize("vocab", [1, 31, 4097, 10241])


# ---- values --------------------------------------------------------------------------------------


@both_contracts
@temperatures
@vocabs
def test_bits_are_those_of_one_id(
    vocab: int,
    temperature: float,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """In every result dtype, in a buffer, with rows that are not finite."""
    skip_double(contract, dtype)
    x, ids, *_ = make_problem(vocab, dtype, device, generator, rows=9)
    x[4, 0], x[5, -1], x[6] = NAN, INF, -INF
    x[7, vocab // 2 :] = -INF
    x[8], x[8, -1] = -INF, -0.0
    ids[8, 0] = vocab - 1
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options: dict[str, Any] = {"temperature": temperature, "contract": contract}
    for asked in (None, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        if asked == torch.float64 and contract == "exact":
            continue
        found = all_of(x, ids, dtype=asked, **options)
        for k in range(ids.shape[1]):
            one = all_of(x, ids[:, k], dtype=asked, **options)
            assert_same_bits(found.logp[:, k], one.logp)
        whole = all_of(x, torch.zeros_like(ids[:, 0]), dtype=asked, **options)
        assert_same_bits(found.lse, whole.lse)
        assert_same_bits(found.entropy, whole.entropy)
        assert found.logp.dtype == (asked or wide)
    for asked in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out = torch.empty(ids.shape, dtype=asked, device=device)
        one_out = torch.empty(ids.shape[:1], dtype=asked, device=device)
        assert detlogp.logp(x, ids, out=out, **options) is out
        for k in range(ids.shape[1]):
            detlogp.logp(x, ids[:, k], out=one_out, **options)
            assert_same_bits(out[:, k], one_out)


def test_one_rounding(device: str) -> None:
    """Of float64 to a half: e^-20 beyond a tie, which float32 does not hold."""
    for dtype, tie, expected in (
        (torch.float16, 20 + 2**-7, -20 - 2**-6),
        (torch.bfloat16, 20 + 2**-4, -20 - 2**-3),
    ):
        x = torch.tensor([[0.0, -tie]], dtype=torch.float64, device=device)
        ids = torch.tensor([[1, -1]], device=device)
        out = torch.empty(1, 2, dtype=dtype, device=device)
        assert detlogp.logp(x, ids, out=out).tolist() == [[expected, 0.0]]


@both_contracts
def test_one_read(contract: str, device: str, generator: torch.Generator) -> None:
    """One forward and one backward over the rows, however many ids."""
    x, ids, a, *_ = make_problem(4097, torch.bfloat16, device, generator)
    leaf = x.requires_grad_()
    with Recorder() as recorder:
        (gradient,) = torch.autograd.grad(detlogp.logp(leaf, ids, contract=contract), leaf, a)
    assert recorder.names() == ["logp_with_stats", "targets", "targets_backward"]
    assert gradient.shape == x.shape


@both_contracts
def test_special_values(contract: str, device: str) -> None:
    x = torch.tensor([[0.0, 0.0, -INF], [NAN, 0.0, 0.0], [INF, 0.0, 0.0], [0.0, 0.0, 0.0]])
    x = x.to(device).requires_grad_()
    ids = torch.tensor([[0, 2, -100, 1], [0, 1, 3, 1], [1, -1, 0, 2], [0, 1, 2, 3]], device=device)
    mask = torch.tensor([True, True, True, False], device=device)
    half = -0.6931471824645996
    good = {0: [half, -INF, 0.0, half], 3: [0.0] * 4}
    for on_invalid, bad in (("zero", 0.0), ("nan", NAN)):
        options: dict[str, Any] = {"rows": mask, "on_invalid": on_invalid, "contract": contract}
        found = all_of(x, ids, **options)
        assert_same_bits(
            found.logp.detach().cpu(),
            torch.tensor(
                [
                    [*good[0][:2], bad, good[0][3]],
                    [NAN, NAN, bad, NAN],
                    [NAN, bad, NAN, NAN],
                    good[3],
                ]
            ),
        )
        assert found.lse.tolist() == pytest.approx([-half, NAN, NAN, -INF], nan_ok=True)
        assert found.entropy.tolist() == pytest.approx([-half, NAN, NAN, 0.0], nan_ok=True)
        (gradient,) = torch.autograd.grad(found.logp[:, 2:].sum(), x)
        assert gradient[0].tolist() == [-0.5, 0.5, 0.0]
        assert gradient[1:3].isnan().all()
        assert_same_bits(gradient[3], torch.zeros_like(gradient[3]))


def test_on_invalid_raise(device: str) -> None:
    x = torch.zeros(3, 5, device=device)
    ids = torch.tensor([[0, 1], [2, 7], [1, 1]], device=device)
    out = torch.full((3, 2), 7.0, device=device)
    with pytest.raises(ValueError, match=r"in \[0, 5\), got 7 in row 1, place 1"):
        detlogp.logp(x, ids, out=out, on_invalid="raise")
    assert (out == 7.0).all(), "nothing is written before the error"
    rows = torch.tensor([0, 2], device=device)
    found: Tensor = detlogp.logp(x, ids, rows=rows, on_invalid="raise")
    assert found[:, 0].tolist() == pytest.approx([-1.609438, 0.0, -1.609438])


@both_contracts
@pytest.mark.parametrize("requires_grad", [False, True])
def test_rows_and_out(
    requires_grad: bool, contract: str, device: str, generator: torch.Generator
) -> None:
    """A row that is not selected keeps what the buffer holds, and may hold anything itself."""
    x, ids, a, *_ = make_problem(300, torch.float32, device, generator)
    mask = torch.tensor([True, False, True, True, False, True, False], device=device)
    options: dict[str, Any] = {"contract": contract, "temperature": 0.8}
    expected = detlogp.logp(x, ids, **options)
    x[~mask] = NAN
    for rows in (mask, mask.nonzero().squeeze(-1)):
        leaf = x.clone().requires_grad_(requires_grad)
        found: Tensor = detlogp.logp(leaf, ids, rows=rows, **options)
        assert_same_bits(found.detach(), torch.where(mask.unsqueeze(-1), expected, 0.0))
        out = torch.full((5, 7), 7.0, dtype=torch.bfloat16, device=device).t()
        assert detlogp.logp(leaf, ids, rows=rows, out=out, **options) is out
        kept = torch.where(mask.unsqueeze(-1), expected.bfloat16(), 7.0)
        assert_same_bits(out.detach(), kept.bfloat16())
        if requires_grad:
            (of_out,) = torch.autograd.grad(out, leaf, a.bfloat16())
            (of_found,) = torch.autograd.grad(found, leaf, a.bfloat16().float())
            assert_same_bits(of_out, of_found)
            assert_same_bits(of_out[~mask], torch.zeros_like(of_out[~mask]))
            assert of_out.isfinite().all()


@pytest.mark.parametrize("shape", [(), (2, 3), (0,)])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_shapes(
    count: int, shape: tuple[int, ...], device: str, generator: torch.Generator
) -> None:
    """Also no id at all: then lse and entropy are what is left."""
    x = torch.randn(*shape, 50, generator=generator).to(device).requires_grad_()
    ids = torch.randint(50, (*shape, count), generator=generator).to(device, torch.int16)
    found = all_of(x, ids, temperature=0.9)
    assert found.logp.shape == ids.shape
    assert found.lse.shape == found.entropy.shape == shape
    for k in range(count):
        assert_same_bits(found.logp[..., k], all_of(x, ids[..., k], temperature=0.9).logp)
    total = found.logp.sum() + found.lse.sum() + found.entropy.sum()
    (fused,) = torch.autograd.grad(total, x, retain_graph=True)
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    (again,) = torch.autograd.grad(gradient.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    parts = composed(wide, ids.long(), None, 0.9)
    value = parts[0].sum() + parts[1].sum() + parts[2].sum()
    (expected,) = torch.autograd.grad(value, wide, create_graph=True)
    (second,) = torch.autograd.grad(expected.square().sum(), wide)
    torch.testing.assert_close(fused.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.double(), second, atol=1e-5, rtol=1e-5)
    assert detlogp.logp(x, ids, out=torch.empty(ids.shape, device=device)).shape == ids.shape


# ---- bits ----------------------------------------------------------------------------------------


@both_contracts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(
    layout: str, contract: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """A row's values and gradient depend on nothing but the row."""
    skip_double(contract, dtype)
    problem = make_problem(4097, dtype, device, generator, rows=13)

    def solve(x: Tensor, ids: Tensor, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        found = all_of(leaf, ids, contract=contract, temperature=0.8)
        (gradient,) = torch.autograd.grad(found, leaf, (a, b, c))
        return [*(part.detach() for part in found), gradient]

    expected = solve(*problem)
    for other in LAYOUTS[layout](problem, generator):
        for one, whole in zip(solve(*other.parts), expected, strict=True):
            assert_same_bits(one[other.take], whole[other.rows])


@both_contracts
@temperatures
@vocabs
def test_one_id_has_the_gradient_of_one_id(
    vocab: int,
    temperature: float,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """To the bit, but for the sign of zero."""
    skip_double(contract, dtype)
    x, ids, a, *_ = make_problem(vocab, dtype, device, generator, count=1)
    leaf = x.requires_grad_()
    options: dict[str, Any] = {"contract": contract, "temperature": temperature}
    (several,) = torch.autograd.grad(detlogp.logp(leaf, ids, **options), leaf, a)
    (one,) = torch.autograd.grad(detlogp.logp(leaf, ids[:, 0], **options), leaf, a[:, 0])
    assert torch.equal(several, one)


@both_contracts
def test_a_bad_id_changes_nothing_else(
    contract: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Nor does a row of bad ids alone change what the lse and the entropy give."""
    skip_double(contract, dtype)
    x, ids, *grads = make_problem(300, dtype, device, generator)
    bad = torch.tensor([-1, 300, -(2**63)], device=device).expand(len(ids), 3)
    of_bad = grads[0].new_full((len(ids), 3), NAN)
    leaf = x.requires_grad_()
    options: dict[str, Any] = {"contract": contract, "temperature": 0.7}
    without = all_of(leaf, ids, **options)
    found = all_of(leaf, torch.cat([ids, bad], 1), **options)
    assert_same_bits(found.logp[:, :5], without.logp)
    assert not found.logp[:, 5:].any()
    (expected,) = torch.autograd.grad(without, leaf, grads)
    (gradient,) = torch.autograd.grad(found, leaf, (torch.cat([grads[0], of_bad], 1), *grads[1:]))
    assert_same_bits(gradient, expected)
    nothing = all_of(leaf, bad, **options)
    (gradient,) = torch.autograd.grad(nothing, leaf, (of_bad, *grads[1:]))
    nothing = all_of(leaf, bad, **options)
    (expected,) = torch.autograd.grad((nothing.lse, nothing.entropy), leaf, grads[1:])
    assert_same_bits(gradient, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_exact_contract_on_cuda_is_the_cpus(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Values and gradient."""
    for vocab in (7, 4097, 50257):
        problem = make_problem(vocab, dtype, "cpu", generator, rows=20)
        answers = []
        for device in ("cpu", "cuda"):
            x, ids, *grads = (part.to(device) for part in problem)
            leaf = x.detach().requires_grad_()
            found = all_of(leaf, ids, contract="exact", temperature=0.9)
            answers.append([*found, *torch.autograd.grad(found, leaf, grads)])
        for one, other in zip(*answers, strict=True):
            assert_same_bits(one.detach(), other.detach().cpu())


# ---- gradients -----------------------------------------------------------------------------------


@both_contracts
@pytest.mark.parametrize("masked", [False, True])
@temperatures
@vocabs
def test_gradient(
    vocab: int,
    temperature: float,
    masked: bool,
    contract: str,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """Against float64, in both routes; NaN cotangents count where an id or a row does, alone."""
    skip_double(contract, dtype)
    problem = make_problem(vocab, dtype, device, generator)
    problem.logits[5, 0] += 30
    problem.token_ids[5, 2:4] = 0
    mask = torch.arange(7, device=device) != 4 if masked else None
    grads = [grad.clone() for grad in problem[2:]]
    grads[0][~problem.counts] = NAN
    if masked:
        for each in grads:
            each[4] = NAN
    wide = problem.logits.double().requires_grad_()
    parts = composed(wide, problem.token_ids, mask, temperature)
    finite = [grad.double().nan_to_num() for grad in grads]
    (exact,) = torch.autograd.grad(parts, wide, finite)
    size = finite[0].abs().sum(-1) + finite[1].abs() + finite[2].abs()
    unit = torch.finfo(problem.grad_lse.dtype).eps
    half = exact.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    bound = (60 + vocab / 128) * unit * size.unsqueeze(-1) / temperature + half
    options: dict[str, Any] = {"contract": contract, "temperature": temperature, "rows": mask}
    for create_graph in (False, True):
        leaf = problem.logits.clone().requires_grad_()
        found = all_of(leaf, problem.token_ids, **options)
        (gradient,) = torch.autograd.grad(found, leaf, grads, create_graph=create_graph)
        assert gradient.dtype == dtype
        error = (gradient.double() - exact).abs()
        assert (error <= bound).all(), (create_graph, (error / bound).max())
        if masked:
            assert_same_bits(gradient[4].detach(), torch.zeros_like(leaf[4]).detach())


@both_contracts
def test_a_token_that_is_certain(contract: str, dtype: torch.dtype, device: str) -> None:
    """Gradients 0 and not rounding errors, also where the id repeats."""
    skip_double(contract, dtype)
    x = torch.zeros(1, 5, dtype=dtype, device=device)
    x[0, 1] = 1000.0
    ids = torch.tensor([[1, 1, -1]], device=device)
    leaf = x.requires_grad_()
    (gradient,) = torch.autograd.grad(detlogp.logp(leaf, ids, contract=contract).sum(), leaf)
    assert not gradient.any()


# ---- other calls ---------------------------------------------------------------------------------


X, IDS = torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.int64)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"token_ids": IDS[:2]}, ValueError, r"\(3,\), or one more dimension, got shape \(2, 2\)"),
    ({"token_ids": IDS[None]}, ValueError, r"or one more dimension, got shape \(1, 3, 2\)"),
    ({"token_ids": IDS.float()}, TypeError, "token_ids must have an integer dtype"),
    ({"token_ids": IDS.to("meta")}, ValueError, "token_ids must be on logits' device, cpu"),
    ({"logits": torch.zeros(3, 0)}, ValueError, r"V >= 1\), got shape \(3, 0\)"),
    ({"logits": torch.tensor(1.0), "token_ids": IDS[0, 0]}, ValueError, r"shape \[\.\.\., V\]"),
    ({"rows": IDS.bool()}, ValueError, r"boolean mask, .* \(3,\), got shape \(3, 2\)"),
    ({"out": torch.zeros(3)}, ValueError, r"token_ids' shape, \(3, 2\), got shape \(3,\)"),
    ({"out": torch.zeros(3, 1).expand(3, 2)}, ValueError, "out must have one element a row"),
    ({"temperature": 0.0}, ValueError, "temperature must be between"),
    ({"contract": "fast"}, ValueError, "contract must be"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        detlogp.logp(**{"logits": X, "token_ids": IDS, **changes})


def test_inplace_backward(device: str) -> None:
    """Without a gradient it changes nothing, as for one id."""
    x, ids = X.to(device), IDS.to(device)
    assert detlogp.logp(x, ids, inplace_backward=True).shape == ids.shape
    with pytest.raises(NotImplementedError, match="inplace_backward: not with several"):
        detlogp.logp(x.clone().requires_grad_() * 1, ids, inplace_backward=True)


def test_object(device: str, generator: torch.Generator) -> None:
    x, ids, *_ = make_problem(31, torch.bfloat16, device, generator)
    assert_same_bits(detlogp.DeterministicLogp()(x, ids), detlogp.logp(x, ids))


def test_meta() -> None:
    x = torch.empty(4, 7, 50, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = torch.empty(4, 7, 3, dtype=torch.int64, device="meta")
    found = all_of(x, ids)
    assert found.logp.shape == ids.shape
    assert found.lse.shape == found.entropy.shape == (4, 7)
    (gradient,) = torch.autograd.grad(found.logp.sum(), x)
    assert gradient.shape == x.shape
    assert gradient.dtype == torch.bfloat16
