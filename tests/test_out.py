"""Results into a supplied buffer: whose storage is kept, and which buffers are refused."""

from typing import Any

import pytest
import torch
from calls import random_problem
from torch import Tensor
from torch.autograd import forward_ad

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


def test_training(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """A differentiable call: the buffer's storage is kept, the gradient is that of a new tensor."""
    problem = random_problem(4, 300, dtype, device, generator)
    leaf = problem.logits.requires_grad_()
    rows = torch.tensor([3, 0, 2], device=device)
    out = torch.full((4,), 7.0, dtype=problem.grad_logp.dtype, device=device)
    pointer = out.data_ptr()
    result = detlogp.logp(leaf, problem.token_ids, rows=rows, out=out, return_lse=True)
    assert result.logp is out
    assert out.data_ptr() == pointer
    assert out[1].item() == 7.0
    plain = detlogp.logp(leaf, problem.token_ids, rows=rows, return_lse=True)
    assert_same_bits(out[rows].detach(), plain.logp[rows].detach())
    assert_same_bits(result.lse.detach(), plain.lse.detach())
    (actual,) = torch.autograd.grad(out, leaf, problem.grad_logp)
    (expected,) = torch.autograd.grad(plain.logp, leaf, problem.grad_logp)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_training_with_another_type(
    half: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(4, 300, torch.float32, device, generator)
    leaf = problem.logits.requires_grad_()
    out = torch.empty(4, dtype=half, device=device)
    result = detlogp.logp(leaf, problem.token_ids, out=out, return_lse=True)
    assert result.lse.dtype == torch.float32
    (actual,) = torch.autograd.grad(out, leaf, problem.grad_logp.to(half))
    plain = detlogp.logp(leaf, problem.token_ids)
    assert_same_bits(out.detach(), plain.detach().to(half))
    seed = problem.grad_logp.to(half).float()
    assert_same_bits(actual, torch.autograd.grad(plain, leaf, seed)[0])


def test_second_order_through_a_buffer(device: str, generator: torch.Generator) -> None:
    problem = random_problem(3, 40, torch.float64, device, generator)
    leaf = problem.logits.requires_grad_()

    def penalty(logp: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(logp.square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaf)[0]

    out = torch.empty(3, dtype=torch.float64, device=device)
    actual = penalty(detlogp.logp(leaf, problem.token_ids, out=out))
    torch.testing.assert_close(actual, penalty(detlogp.logp(leaf, problem.token_ids)))


def test_using_the_buffer_again(device: str, generator: torch.Generator) -> None:
    """Detach it after backward; before, autograd's version check catches the overwritten value."""
    problem = random_problem(4, 300, torch.float32, device, generator)
    leaf = problem.logits.requires_grad_()
    out = torch.empty(4, device=device)
    loss = detlogp.logp(leaf, problem.token_ids, out=out).square().sum()
    with pytest.raises(ValueError, match="out must not require grad"):
        detlogp.logp(leaf, problem.token_ids, out=out)
    loss.backward()
    again = out.detach()
    later = detlogp.logp(leaf, problem.token_ids, out=again).square().sum()
    detlogp.logp(leaf.detach(), problem.token_ids, out=again.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


def test_dual_buffer(device: str) -> None:
    logits = torch.zeros(2, 9, device=device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    with forward_ad.dual_level():
        out = forward_ad.make_dual(torch.zeros(2, device=device), torch.ones(2, device=device))
        with pytest.raises(ValueError, match="out must not carry a tangent"):
            detlogp.logp(logits, ids, out=out)


def test_dual_logits(device: str, generator: torch.Generator) -> None:
    problem = random_problem(4, 40, torch.float32, device, generator)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(problem.logits, torch.ones_like(problem.logits).cumsum(1))
        out = torch.empty(4, device=device)
        detlogp.logp(dual, problem.token_ids, out=out)
        expected = detlogp.logp(dual, problem.token_ids)
        for one, other in zip(*map(forward_ad.unpack_dual, (out, expected)), strict=True):
            assert_same_bits(one, other)


# ---- under transforms ----------------------------------------------------------------------------


def _batch(device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    problem = random_problem(12, 40, torch.float32, device, generator)
    return problem.logits.view(3, 4, 40), problem.token_ids[:4]


def test_made_inside_a_transform(device: str, generator: torch.Generator) -> None:
    x, ids = _batch(device, generator)

    def into_buffer(row: Tensor) -> Tensor:
        return detlogp.logp(row, ids, out=torch.empty_like(row[:, 0])).square().sum()

    def plain(row: Tensor) -> Tensor:
        return detlogp.logp(row, ids).square().sum()

    transforms: tuple[Any, ...] = (torch.func.grad, torch.func.hessian, torch.func.jacfwd)
    for transform in transforms:
        torch.testing.assert_close(transform(into_buffer)(x[0]), transform(plain)(x[0]))
        mapped, expected = (torch.vmap(transform(f))(x) for f in (into_buffer, plain))
        torch.testing.assert_close(mapped, expected)


def test_mapped_by_vmap(device: str, generator: torch.Generator) -> None:
    x, ids = _batch(device, generator)
    out = torch.full((3, 4), torch.nan, device=device)
    pointer = out.data_ptr()
    torch.vmap(lambda row, buffer: detlogp.logp(row, ids, out=buffer))(x, out)
    assert out.data_ptr() == pointer
    assert_same_bits(out, detlogp.logp(x, ids.expand(3, 4)))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vjp", "vmap", "vmap of grad"])
def test_captured_from_outside(transform: str, device: str, generator: torch.Generator) -> None:
    x, ids = _batch(device, generator)
    out = torch.full((4,), 7.0, device=device)

    def write(row: Tensor) -> Tensor:
        return detlogp.logp(row, ids, out=out).sum()

    calls: dict[str, Any] = {
        "grad": lambda: torch.func.grad(write)(x[0]),
        "jvp": lambda: torch.func.jvp(write, (x[0],), (x[0],)),
        "vjp": lambda: torch.func.vjp(write, x[0]),
        "vmap": lambda: torch.vmap(write)(x),
        "vmap of grad": lambda: torch.vmap(torch.func.grad(write))(x),
    }
    expected = "mapped axis" if transform == "vmap" else "made inside the transform"
    with pytest.raises(ValueError, match=f"out must .*{expected}"):
        calls[transform]()
    assert (out == 7.0).all()


def test_shared_by_the_samples_of_vmap(device: str, generator: torch.Generator) -> None:
    """Made inside, but not mapped: one buffer for all of them."""
    x, ids = _batch(device, generator)

    def write(row: Tensor) -> Tensor:
        return detlogp.logp(row, ids, out=torch.empty(4, device=device)).sum()

    for call in (lambda: torch.vmap(write)(x), lambda: torch.vmap(torch.func.grad(write))(x)):
        with pytest.raises(ValueError, match="out must have a mapped axis"):
            call()
