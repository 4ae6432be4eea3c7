"""Results into a supplied buffer: whose storage is kept, and which buffers are refused."""

import pytest
import torch
from calls import random_problem
from torch import Tensor

import detlogp
from detlogp.testing import assert_same_bits


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_type(
    out_dtype: torch.dtype, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """`out` sets the final rounding or widening alone; a mismatch of arithmetic never follows."""
    problem = random_problem(6, 300, dtype, device, generator)
    plain = detlogp.logp(problem.logits, problem.token_ids)
    out = torch.full((6,), torch.nan, dtype=out_dtype, device=device)
    pointer = out.data_ptr()
    result = detlogp.logp(problem.logits, problem.token_ids, out=out, return_lse=True)
    assert result.logp is out
    assert out.data_ptr() == pointer
    assert_same_bits(out, plain.to(out_dtype))
    assert result.lse.dtype == plain.dtype


def test_strided_buffer(device: str, generator: torch.Generator) -> None:
    problem = random_problem(6, 300, torch.float32, device, generator)
    memory = torch.full((6, 2), 7.0, device=device)
    detlogp.logp(problem.logits, problem.token_ids, out=memory[:, 1])
    assert_same_bits(memory[:, 1], detlogp.logp(problem.logits, problem.token_ids))
    assert (memory[:, 0] == 7.0).all()


@pytest.mark.parametrize("strided", [False, True])
def test_unselected_rows_keep_their_values(
    strided: bool, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(4, 300, torch.float32, device, generator)
    problem.token_ids[2] = -100
    memory = torch.full((4, 2), 7.0, device=device)
    out = memory[:, 0] if strided else memory[:, 0].contiguous()
    rows = torch.tensor([3, 2], device=device)
    detlogp.logp(problem.logits, problem.token_ids, rows=rows, out=out)
    expected = detlogp.logp(problem.logits, problem.token_ids, rows=rows)
    assert out[:2].tolist() == [7.0, 7.0]
    assert_same_bits(out[2:], expected[2:])


def test_a_saved_value_is_protected(device: str, generator: torch.Generator) -> None:
    """Overwriting a buffer that an earlier graph saved must be noticed by its backward."""
    problem = random_problem(4, 300, torch.float32, device, generator)
    out = torch.ones(4, device=device)
    weight = torch.ones(4, device=device, requires_grad=True)
    product = weight * out
    detlogp.logp(problem.logits, problem.token_ids, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def _refused(name: str, logits: Tensor, token_ids: Tensor) -> Tensor:
    shared = logits.new_zeros(8)
    return {
        "requires_grad": torch.zeros(4, device=logits.device, requires_grad=True),
        "shape": torch.zeros(5, device=logits.device),
        "integer": torch.zeros(4, dtype=torch.int64, device=logits.device),
        "device": torch.zeros(4, device="meta"),
        "expanded": torch.zeros(1, device=logits.device).expand(4),
        "input": logits.view(-1)[:4],
        "ids": token_ids.view(torch.float32),
        "dtype": shared[:4].half(),
    }[name]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("requires_grad", ValueError, "out must not require grad"),
        ("shape", ValueError, r"out must have logits' leading shape, \(4,\), got shape \(5,\)"),
        ("integer", TypeError, "out must be float16.*got int64"),
        ("device", ValueError, "out must be on logits' device"),
        ("expanded", ValueError, "out must have one element a row"),
        ("input", ValueError, "out must not share storage with an input"),
        ("ids", ValueError, "out must not share storage with an input"),
        ("rows", ValueError, "out must not share storage with an input"),
        ("dtype", ValueError, "dtype must agree with out, float16, got float32"),
    ],
)
def test_refused_buffers(name: str, error: type[Exception], message: str, device: str) -> None:
    logits = torch.zeros(4, 9, device=device)
    token_ids = torch.zeros(4, dtype=torch.int32, device=device)
    rows = torch.zeros(4, dtype=torch.int32, device=device)
    out = rows.view(torch.float32) if name == "rows" else _refused(name, logits, token_ids)
    before = out.detach().clone()
    dtype = torch.float32 if name == "dtype" else None
    with pytest.raises(error, match=message):
        detlogp.logp(logits, token_ids, rows=rows, out=out, dtype=dtype)
    assert out.is_meta or torch.equal(out, before), "nothing is written"


def test_overlapping_buffer(device: str) -> None:
    logits = torch.zeros(2, 2, 9, device=device)
    ids = torch.zeros(2, 2, dtype=torch.int64, device=device)
    memory = torch.zeros(8, device=device)
    with pytest.raises(ValueError, match=r"one element a row, got strides \(1, 1\)"):
        detlogp.logp(logits, ids, out=memory.as_strided((2, 2), (1, 1)))
    turned = memory.as_strided((2, 2), (2, 3))
    detlogp.logp(logits, ids, out=turned)
    assert_same_bits(turned, detlogp.logp(logits, ids))


def test_no_gradient_yet(device: str) -> None:
    logits = torch.zeros(4, 9, device=device, requires_grad=True)
    token_ids = torch.zeros(4, dtype=torch.int64, device=device)
    out = torch.full((4,), 7.0, device=device)
    with pytest.raises(NotImplementedError, match="out: a call whose logits require grad"):
        detlogp.logp(logits, token_ids, out=out)
    assert (out == 7.0).all()
    with torch.no_grad():
        detlogp.logp(logits, token_ids, out=out)
    assert not out.requires_grad
