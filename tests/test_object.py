"""DeterministicLogp: RL-Kernel's names are `logp` in other words."""

import pytest
import torch
from calls import random_problem

import detlogp
from detlogp.testing import assert_same_bits

ALIASES = {
    "online_out": "out",
    "online_fp32": "apply_fp32",
    "online_fp64": "apply_fp64",
    "online_indexed_out": "indexed_out",
    "online_indexed_fp32": "indexed_fp32",
    "online_indexed_fp64": "indexed_fp64",
}


def test_aliases() -> None:
    for alias, name in ALIASES.items():
        assert getattr(detlogp.DeterministicLogp, alias) is getattr(detlogp.DeterministicLogp, name)


def test_values(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    op = detlogp.DeterministicLogp()
    x, ids = random_problem(6, 300, dtype, device, generator)[:2]
    x, ids = x.view(2, 3, 300), ids.view(2, 3)
    rows = torch.tensor([4, 1, 4], device=device)
    fp32 = detlogp.logp(x, ids, dtype=torch.float32)
    fp64 = detlogp.logp(x, ids, dtype=torch.float64)
    for result in (op(x, ids), op.apply(x, ids), op.apply_fp32(x, ids)):
        assert_same_bits(result, fp32)
    assert_same_bits(op.apply_fp64(x, ids), fp64)
    indexed32 = detlogp.logp(x, ids, rows=rows, dtype=torch.float32)
    indexed64 = detlogp.logp(x, ids, rows=rows, dtype=torch.float64)
    assert_same_bits(op.indexed_fp32(x, ids, rows), indexed32)
    assert_same_bits(op.indexed_fp64(x, ids, rows), indexed64)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_buffers(
    out_dtype: torch.dtype, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """float32 arithmetic whatever the buffer's type and the logits'."""
    op = detlogp.DeterministicLogp()
    x, ids = random_problem(6, 300, dtype, device, generator)[:2]
    rows = torch.tensor([4, 1], device=device)
    fp32 = detlogp.logp(x, ids, dtype=torch.float32)
    output = torch.full((6,), 7.0, dtype=out_dtype, device=device)
    assert op.indexed_out(x, ids, rows, output) is output
    expected = torch.full_like(output, 7.0)
    expected[rows] = fp32[rows].to(out_dtype)
    assert_same_bits(output, expected)
    assert op.out(x, ids, output) is output
    assert_same_bits(output, fp32.to(out_dtype))


def test_gradient(device: str, generator: torch.Generator) -> None:
    x, ids = random_problem(6, 300, torch.float32, device, generator)[:2]
    leaf = x.requires_grad_()
    op = detlogp.DeterministicLogp(contract="locked")
    (actual,) = torch.autograd.grad(op(leaf, ids).sum(), leaf)
    (expected,) = torch.autograd.grad(detlogp.logp(leaf, ids).sum(), leaf)
    assert_same_bits(actual, expected)


def test_errors(device: str) -> None:
    with pytest.raises(ValueError, match="contract must be 'locked' or 'exact', got 'fast'"):
        detlogp.DeterministicLogp("fast")
    op = detlogp.DeterministicLogp()
    x = torch.zeros(3, 5, device=device)
    ids = torch.zeros(3, dtype=torch.int64, device=device)
    mask = torch.ones(3, dtype=torch.bool, device=device)
    with pytest.raises(TypeError, match="row_indices must be a Tensor of an integer dtype"):
        op.indexed_fp32(x, ids, mask)
