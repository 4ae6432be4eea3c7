"""The semantics table (docs/semantics.md), line by line: value, lse, gradient."""

import pytest
import torch
from calls import Answer, Problem, assert_same_answer, pick, random_problem, solve
from torch import Tensor

import detlogp
from detlogp.testing import assert_same_bits

INF = torch.inf
NAN = torch.nan


def _solve_row(row: list[float], token_id: int, dtype: torch.dtype, device: str) -> Answer:
    """One row with cotangents 1 and 0.5."""
    result_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    grads = torch.tensor([1.0, 0.5], dtype=result_dtype, device=device)
    logits = torch.tensor(row, dtype=dtype, device=device)
    return solve(Problem(logits, torch.tensor(token_id, device=device), grads[0], grads[1]))


@pytest.mark.parametrize("token_id", [-1, -100, 300, 305, 2**40, -(2**40), 2**63 - 1, -(2**63)])
def test_bad_id(token_id: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Case 22. The rows beside it are untouched by it."""
    problem = random_problem(3, 300, dtype, device, generator)
    expected = solve(problem)
    problem.token_ids[1] = token_id
    answer = solve(problem)
    assert answer.logp[1].item() == 0.0
    assert answer.lse[1].item() == -INF
    assert_same_bits(answer.gradient[1], torch.zeros_like(answer.gradient[1]))
    others = torch.tensor([0, 2], device=device)
    assert_same_answer(pick(answer, others), pick(expected, others))


def test_255_is_an_ordinary_id(device: str, generator: torch.Generator) -> None:
    """Case 23: nothing but the range makes an id bad."""
    logits = torch.randn(2, 300, generator=generator).to(device)
    ids = torch.tensor([255, 255], device=device)
    mask = torch.tensor([True, False], device=device)
    result = detlogp.logp(logits, ids, rows=mask)
    assert result[0] < 0
    assert result[1] == 0


def test_rows(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Not selected, out of range, twice; an unselected row is not read."""
    problem = random_problem(5, 100, dtype, device, generator)
    expected = solve(problem)
    problem.logits[0] = NAN
    problem.token_ids[1] = -100
    rows = torch.tensor([3, 1, 3, -1, 5, 2**40], dtype=torch.int64, device=device)
    answer = solve(problem, rows=rows)
    three = torch.tensor(3, device=device)
    assert_same_answer(pick(answer, three), pick(expected, three))
    for row in (0, 1, 2, 4):
        assert answer.logp[row].item() == 0.0
        assert answer.lse[row].item() == -INF
        assert_same_bits(answer.gradient[row], torch.zeros_like(answer.gradient[row]))


@pytest.mark.parametrize(
    "row", [[NAN, 1.0, 2.0], [INF, 1.0, 2.0], [NAN, NAN, 1.0], [1.0, 2.0, NAN]]
)
def test_bad_row(row: list[float], dtype: torch.dtype, device: str) -> None:
    for token_id in range(3):
        answer = _solve_row(row, token_id, dtype, device)
        assert answer.logp.isnan()
        assert answer.lse.isnan()
        assert answer.gradient.isnan().all()


@pytest.mark.parametrize("row", [[NAN, 1.0], [INF, 1.0], [-INF, -INF]])
def test_bad_id_wins_over_bad_row(row: list[float], dtype: torch.dtype, device: str) -> None:
    answer = _solve_row(row, -100, dtype, device)
    assert answer.logp.item() == 0.0
    assert answer.lse.item() == -INF
    assert_same_bits(answer.gradient, torch.zeros_like(answer.gradient))


def test_whole_row_minus_infinity(dtype: torch.dtype, device: str) -> None:
    answer = _solve_row([-INF, -INF, -INF], 1, dtype, device)
    assert answer.logp.isnan()
    assert answer.lse.item() == -INF
    assert answer.gradient.isnan().all()


def test_target_minus_infinity(dtype: torch.dtype, device: str) -> None:
    """As torch's log_softmax: value -inf, a finite gradient."""
    answer = _solve_row([-INF, 0.0, 0.0], 0, dtype, device)
    assert answer.logp.item() == -INF
    assert answer.lse.item() == pytest.approx(0.693147, abs=1e-6)
    assert answer.gradient.tolist() == [1.0, -0.25, -0.25]


def test_minus_infinity_elsewhere(dtype: torch.dtype, device: str) -> None:
    """Case 5."""
    answer = _solve_row([0.0, -INF], 0, dtype, device)
    assert answer.logp.item() == 0.0
    assert answer.lse.item() == 0.0
    assert answer.gradient.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("masked", [1024, 2048, 65536])
def test_masked_tiles(
    masked: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Case 6: whole tiles of -inf. A multiple of B keeps every lane's order, hence the bits."""
    problem = random_problem(2, 100000 - masked, dtype, device, generator)
    padding = torch.full((2, masked), -INF, dtype=dtype, device=device)
    masked_problem = problem._replace(
        logits=torch.cat([padding, problem.logits], 1), token_ids=problem.token_ids + masked
    )
    answer, expected = solve(masked_problem), solve(problem)
    assert_same_bits(answer.logp, expected.logp)
    assert_same_bits(answer.gradient[:, masked:], expected.gradient)
    assert not answer.gradient[:, :masked].any()


def test_one_finite_column(dtype: torch.dtype, device: str) -> None:
    """Case 6."""
    logits = torch.full((1, 100000), -INF, dtype=dtype, device=device)
    logits[0, 50000] = -3.0
    result = detlogp.logp(logits, torch.tensor([50000], device=device), return_lse=True)
    assert result.logp.item() == 0.0
    assert result.lse.item() == -3.0


@pytest.mark.parametrize("vocab", [7, 5000])
def test_nan_stays_in_its_row(
    vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Case 7."""
    problem = random_problem(64, vocab, dtype, device, generator)
    expected = solve(problem)
    problem.logits[20, vocab // 2] = NAN
    answer = solve(problem)
    assert answer.gradient[20].isnan().all()
    others = torch.arange(64, device=device) != 20
    assert_same_answer(pick(answer, others), pick(expected, others))


def test_empty(dtype: torch.dtype, device: str) -> None:
    for shape in ((0,), (3, 0), (0, 4)):
        logits = torch.zeros(*shape, 7, dtype=dtype, device=device, requires_grad=True)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        result = detlogp.logp(logits, ids, return_lse=True)
        assert result.logp.shape == result.lse.shape == shape
        result.logp.sum().backward()
        assert logits.grad is not None
        assert logits.grad.shape == logits.shape
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        assert detlogp.logp(logits, ids, rows=nothing).shape == shape


def test_no_row_selected(device: str, generator: torch.Generator) -> None:
    problem = random_problem(3, 40, torch.float32, device, generator)
    answer = solve(problem, rows=torch.zeros(0, dtype=torch.int64, device=device))
    assert answer.logp.tolist() == [0.0] * 3
    assert not answer.gradient.any()


@pytest.mark.parametrize("vocab", [1, 5, 4097])
def test_on_invalid_nan(vocab: int, device: str, generator: torch.Generator) -> None:
    logits = torch.randn(4, vocab, generator=generator).to(device).requires_grad_()
    ids = torch.tensor([0, -100, vocab, 0], device=device)
    selected = torch.tensor([True, True, True, False], device=device)
    result = detlogp.logp(logits, ids, rows=selected, return_lse=True, on_invalid="nan")
    zero = detlogp.logp(logits, ids, rows=selected, return_lse=True)
    assert result.logp.isnan().tolist() == [False, True, True, False]
    assert result.logp[3].item() == 0.0
    assert_same_bits(result.lse, zero.lse)
    (gradient,) = torch.autograd.grad(result.logp.sum() + result.lse[0], logits)
    assert not gradient[1:].any()


def test_on_invalid_raise(device: str) -> None:
    logits = torch.zeros(3, 5, device=device)
    ids = torch.tensor([0, 7, 1], device=device)
    out = torch.full((3,), NAN, device=device)
    with pytest.raises(ValueError, match=r"token_ids must be in \[0, 5\), got 7 in row 1"):
        detlogp.logp(logits, ids, out=out, on_invalid="raise")
    assert out.isnan().all(), "nothing is written before the error"
    mask = torch.tensor([True, False, True], device=device)
    result = detlogp.logp(logits, ids, rows=mask, on_invalid="raise")
    assert result.tolist() == pytest.approx([-1.609438, 0.0, -1.609438])


@pytest.mark.parametrize(
    "integer",
    [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64],
)
def test_integer_types(integer: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Case 31: every integer type is converted."""
    logits = torch.randn(3, 100, generator=generator).to(device)
    ids = torch.tensor([5, 99, 0], device=device)
    expected = detlogp.logp(logits, ids)
    assert_same_bits(detlogp.logp(logits, ids.to(integer)), expected)
    rows = torch.tensor([0, 2], device=device)
    indexed: Tensor = detlogp.logp(logits, ids, rows=rows.to(integer))
    assert_same_bits(indexed, detlogp.logp(logits, ids, rows=rows))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_ids_and_masks_of_any_strides(
    integer: torch.dtype, device: str, generator: torch.Generator
) -> None:
    logits = torch.randn(4, 3, 50, generator=generator).to(device)
    ids = torch.randint(50, (3, 4), generator=generator).to(device, integer).t()
    mask = (torch.rand(3, 4, generator=generator) < 0.5).to(device).t()
    expected = detlogp.logp(logits, ids.contiguous(), rows=mask.contiguous())
    assert_same_bits(detlogp.logp(logits, ids, rows=mask), expected)
    out = torch.zeros(4, 3, device=device)
    assert_same_bits(detlogp.logp(logits, ids, rows=mask, out=out), expected)
