"""The exact contract in steps: rows cut anywhere, sums of terms of either sign, derivatives."""

import math
from collections.abc import Iterator
from itertools import pairwise

import exact_reference
import pytest
import torch
from calls import nested_derivatives
from torch import Tensor

import detlogp
from detlogp._guards import call
from detlogp._native import EXACT, exact_extremes_op, exact_row_sum_op, logp_with_stats_op
from detlogp.primitives import _exact
from detlogp.primitives.columns import Columns
from detlogp.primitives.rows import Rows
from detlogp.testing import assert_same_bits, available_cpu_paths, cpu_path

INF, NAN = torch.inf, torch.nan
TYPES = [torch.float16, torch.bfloat16, torch.float32]


def _cuts(vocab: int, generator: torch.Generator) -> Iterator[tuple[int, int]]:
    """Parts from left to right, one of them empty."""
    inner = torch.randint(vocab + 1, (4,), generator=generator).tolist()
    return pairwise([0, *sorted([*inner, inner[0]]), vocab])


def _whole(matrix: Tensor) -> Columns:
    return Columns(matrix.shape[-1], matrix.shape[-1], is_exact=True)


def _rows(vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Tensor:
    x = 3 * torch.randn(9, vocab, generator=generator)
    x[1] += 300
    x[2, 0] = NAN
    x[3, -1] = INF
    x[4] = -INF
    x[5, : vocab // 2] = -INF
    x[6, vocab // 2] = 60.0
    return x.to(dtype).to(device)


# ---- value ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [2, 129, 4097, 50257])
def test_rows_cut_anywhere(
    vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Parts in any order have the bits of the fused kernel, layouts that are not contiguous too."""
    x = _rows(vocab, dtype, device, generator)
    ids = torch.randint(vocab, (9,), generator=generator).to(device)
    ids[7] = -100
    mask = torch.arange(9, device=device) != 8
    expected = call(logp_with_stats_op, x, ids, mask, 2, 2, EXACT, False)
    for matrix in (x, x.t().contiguous().t()):
        parts = list(_cuts(vocab, generator))[::-1]
        keys = torch.full((2, 9), _exact._KEY_OF_MINUS_INFINITY, dtype=torch.int32, device=device)
        sums = torch.zeros(9, dtype=torch.int64, device=device)
        ops = torch.ops.detlogp
        for first, last in parts:
            ops.exact_max(matrix[:, first:last], ids, mask, first, vocab, keys)
        for first, last in parts:
            ops.exact_sum(matrix[:, first:last], ids, mask, first, vocab, keys, sums)
        found = ops.exact_finish(keys, sums, ids, mask, vocab, 2, 2, False)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def test_gradient_of_parts(device: str, generator: torch.Generator) -> None:
    """Each part's gradient is that of the whole, wherever the target is."""
    vocab = 700
    for dtype in TYPES:
        x = _rows(vocab, dtype, device, generator)
        ids = torch.randint(vocab, (9,), generator=generator).to(device)
        ids[7] = vocab
        stats = call(logp_with_stats_op, x, ids, None, 2, 2, EXACT, False)[2:]
        grads = torch.randn(2, 9, generator=generator).to(device)
        expected = torch.ops.detlogp.logp_backward(x, ids, None, *stats, *grads)
        p = torch.ops.detlogp.probability(x, ids, None, *stats)
        for first, last in _cuts(vocab, generator):
            part, place = x[:, first:last], (first, vocab)
            found = torch.ops.detlogp.logp_backward(part, ids, None, *stats, *grads, *place)
            assert_same_bits(found, expected[:, first:last])
            found = torch.ops.detlogp.probability(part, ids, None, *stats, *place)
            assert_same_bits(found, p[:, first:last])


def test_parts_must_lie_in_the_rows(device: str) -> None:
    x, ids = torch.zeros(2, 5, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    keys = torch.zeros(2, 2, dtype=torch.int32, device=device)
    for first, vocab in ((6, 10), (-1, 10), (0, 4)):
        with pytest.raises(RuntimeError, match="must lie in rows of"):
            torch.ops.detlogp.exact_max(x, ids, None, first, vocab, keys)
    for bad in (keys.long(), keys[:, :1], keys[0], keys.t()[:, :1].t()):
        with pytest.raises(RuntimeError, match="keys must"):
            torch.ops.detlogp.exact_max(x, ids, None, 0, 5, bad)
    with pytest.raises(RuntimeError, match="sums must"):
        torch.ops.detlogp.exact_sum(x, ids, None, 0, 5, keys, ids[:1])
    assert not keys.any()


# ---- row sums ------------------------------------------------------------------------------------


def _terms(vocab: int, generator: torch.Generator) -> Tensor:
    """Rows of many magnitudes, that cancel, of one sign, subnormal, zero."""
    plain = torch.randn(9, vocab, generator=generator)
    scale = torch.tensor([1, 1e-30, 1e30, 1e-42, 0, 3, 1, 1, 1e33]).unsqueeze(-1)
    terms = plain * scale
    terms[5] = terms[5].abs()
    terms[6] *= torch.exp(30 * torch.randn(vocab, generator=generator))
    terms[7, : vocab // 2] = -terms[7, vocab - vocab // 2 :]
    return terms.clamp(-1e33, 1e33)


@pytest.mark.parametrize("vocab", [1, 2, 7, 129, 700])
def test_row_sum(vocab: int, device: str, generator: torch.Generator) -> None:
    """The bits of the page's row sum, in whole numbers."""
    terms = _terms(vocab, generator)
    found = _exact.row_sum(terms.to(device), _whole(terms))
    for row, numbers in enumerate(terms.tolist()):
        assert found[row].item() == exact_reference.row_sum(numbers), row


@pytest.mark.parametrize("path", available_cpu_paths())
def test_row_sum_on_cpu_paths(path: str, generator: torch.Generator) -> None:
    terms = _terms(3001, generator)
    with cpu_path("portable"):
        expected = _exact.row_sum(terms, _whole(terms))
    with cpu_path(path):
        assert_same_bits(_exact.row_sum(terms, _whole(terms)), expected)


@pytest.mark.parametrize("vocab", [2**19 + 1, 2**21])
def test_row_sum_of_wide_rows(vocab: int, device: str) -> None:
    """Their quantum is coarser: 2^-41 and 2^-40 of the largest, and no sum overflows."""
    terms = torch.full((2, vocab), 1.9, device=device)
    terms[1, ::2] = -1.9
    found = _exact.row_sum(terms, _whole(terms))
    bits = 61 - math.ceil(math.log2(vocab))
    each = round(terms[0, 0].item() * 2.0**bits)
    expected = torch.tensor([vocab * each, each * (vocab % 2)], dtype=torch.float64) / 2.0**bits
    assert found.tolist() == (expected * torch.tensor([1, -1])).float().tolist()


@pytest.mark.parametrize("vocab", [3, 129, 50257])
def test_row_sum_cut_anywhere(vocab: int, device: str, generator: torch.Generator) -> None:
    terms = _terms(vocab, generator).to(device)
    expected = _exact.row_sum(terms, _whole(terms))
    order = torch.randperm(vocab, generator=generator)
    assert_same_bits(_exact.row_sum(terms[:, order], _whole(terms)), expected)
    keys = torch.zeros(2, 9, dtype=torch.int32, device=device)
    sums = torch.zeros(9, dtype=torch.int64, device=device)
    parts = [terms[:, first:last] for first, last in _cuts(vocab, generator)]
    for part in parts:
        call(exact_extremes_op, part, *(None,) * 5, vocab, keys)
    for part in parts[::-1]:
        call(exact_row_sum_op, part, *(None,) * 5, vocab, keys, sums)
    assert_same_bits(torch.ops.detlogp.exact_total(keys, sums, vocab), expected)


def test_row_sum_of_what_is_not_finite(device: str) -> None:
    """As IEEE additions have it."""
    rows = [[1, INF, 2], [-INF, 5, 1], [INF, -INF, 0], [NAN, 1, 1], [INF, INF, 1], [-NAN, INF, 0]]
    terms = torch.tensor(rows, device=device)
    assert_same_bits(_exact.row_sum(terms, _whole(terms)), terms.sum(-1))
    huge = torch.full((1, 9), 3e38, device=device)
    assert _exact.row_sum(huge, _whole(huge)).isposinf()


@pytest.mark.parametrize("vocab", [5, 1000, 50257])
def test_error_of_row_sum(vocab: int, device: str, generator: torch.Generator) -> None:
    """Half a quantum a term, and one rounding."""
    terms = _terms(vocab, generator).to(device)
    found = _exact.row_sum(terms, _whole(terms)).double()
    exact = terms.double().sum(-1)
    largest = terms.double().abs().amax(-1).clamp_min(2.0**-80)
    bound = vocab * largest * 2.0**-43 + 2.0**-24 * exact.abs() + 2.0**-150
    assert ((found - exact).abs() <= 1.001 * bound).all()


@pytest.mark.cuda
def test_row_sum_on_cuda_is_the_cpus(generator: torch.Generator) -> None:
    for vocab in (1, 129, 4097, 151936):
        terms = _terms(vocab, generator)
        expected = _exact.row_sum(terms, _whole(terms))
        assert_same_bits(_exact.row_sum(terms.cuda(), _whole(terms)).cpu(), expected)


# ---- derivatives ---------------------------------------------------------------------------------


def _derivatives(x: Tensor, ids: Tensor, u: Tensor, w: Tensor) -> dict[str, Tensor]:
    def f(logits: Tensor) -> Tensor:
        return detlogp.logp(logits, ids, contract="exact")

    return nested_derivatives(f, x, u, w, torch.ones(x.shape[0], device=x.device))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [129, 4097, 20000])
def test_derivatives_have_no_order(
    vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Columns in another order, and a row alone: the same bits in every derivative."""
    x = _rows(vocab, dtype, device, generator)
    ids = torch.randint(vocab, (9,), generator=generator).to(device)
    ids[7] = -100
    u, w = (torch.randn(9, vocab, generator=generator).to(dtype).to(device) for _ in range(2))
    expected = _derivatives(x, ids, u, w)
    order = torch.randperm(vocab, generator=generator).to(device)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(vocab, device=device))
    moved = torch.where(ids < 0, ids, place[ids.clamp_min(0)])
    shuffled = _derivatives(x[:, order], moved, u[:, order], w[:, order])
    for name, value in expected.items():
        found = shuffled[name][:, place] if value.dim() == 2 else shuffled[name]
        try:
            assert_same_bits(found, value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    pair = _derivatives(x[5:7], ids[5:7], u[5:7], w[5:7])
    for name, value in expected.items():
        assert_same_bits(pair[name], value[5:7])


@pytest.mark.filterwarnings("ignore:.*get_attr Node:UserWarning")
@pytest.mark.parametrize("name", ["logp", "lse", "entropy", "several", "gradient"])
def test_linearize(name: str, device: str, generator: torch.Generator) -> None:
    """Its tracer folds constants, and must not take a sum for one: the bits of jvp."""
    x, u = torch.randn(2, 5, 70, generator=generator).to(device)
    ids = torch.randint(70, (5, 2), generator=generator).to(device)

    def f(logits: Tensor) -> Tensor:
        if name == "several":
            return detlogp.logp(logits, ids, contract="exact")
        options = {"return_lse": True, "return_entropy": True, "contract": "exact"}
        found = detlogp.logp(logits, ids[:, 0], **options)  # type: ignore[call-overload]
        value: Tensor = getattr(found, "logp" if name == "gradient" else name)
        return value

    def square(logits: Tensor) -> Tensor:
        return f(logits).square().sum()

    function = torch.func.grad(square) if name == "gradient" else f
    expected = torch.func.jvp(function, (x,), (u,))[1]
    assert expected.abs().max() > 0.01
    assert_same_bits(torch.func.linearize(function, x)[1](u), expected)


def test_tangent_needs_no_matrix(generator: torch.Generator) -> None:
    """The mean is p u summed as it is computed: as the sum of a matrix p u."""
    for dtype in TYPES:
        x = _rows(500, dtype, "cpu", generator)
        ids = torch.randint(500, (9,), generator=generator)
        stats = call(logp_with_stats_op, x, ids, None, 2, 2, EXACT, False)[2:]
        u = torch.randn(9, 500, generator=generator).to(dtype)
        rows = Rows(x, ids, None, *stats)
        p = torch.ops.detlogp.probability(x, ids, None, *stats)
        expected = _exact.row_sum(p * u.float(), _whole(p))
        assert_same_bits(_exact.row_sum(u, rows.columns, rows), expected)
