"""First-order training: cotangents of every kind, repeated backward, and what must raise."""

import pytest
import torch
from calls import assert_same_answer, random_problem, solve
from torch import Tensor
from torch.autograd import forward_ad

import detlogp
from detlogp import reference
from detlogp.testing import assert_same_bits, gradient_error_bound

V = 4097


def _leaf(rows: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    problem = random_problem(rows, V, torch.float32, device, generator)
    return problem.logits.requires_grad_(), problem.token_ids


def test_value_alone_and_lse_alone(
    dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(5, V, dtype, device, generator)
    leaf = problem.logits.requires_grad_()
    result = detlogp.logp(leaf, problem.token_ids, return_lse=True)
    nothing = torch.zeros_like(problem.grad_logp)
    for output, grads in (
        (result.logp, (problem.grad_logp, nothing)),
        (result.lse, (nothing, problem.grad_lse)),
    ):
        seed = grads[0] if output is result.logp else grads[1]
        (actual,) = torch.autograd.grad(output, leaf, seed, retain_graph=True)
        expected = reference.gradient(leaf.detach(), problem.token_ids, *grads)
        p = reference.probability(leaf.detach())
        bound = gradient_error_bound(p, seed.abs(), expected, dtype)
        # float64: the reference's own rounding is as large.
        bound = bound * (2 if dtype == torch.float64 else 1)
        assert ((actual.double() - expected).abs() <= bound).all()


def test_every_row_has_its_own_cotangent(device: str, generator: torch.Generator) -> None:
    """Case 13."""
    leaf, ids = _leaf(6, generator, device)
    grads = torch.arange(1.0, 7.0, device=device)
    (whole,) = torch.autograd.grad(detlogp.logp(leaf, ids), leaf, grads)
    for row in range(6):
        part = leaf.detach()[row].clone().requires_grad_()
        (alone,) = torch.autograd.grad(detlogp.logp(part, ids[row]), part, grads[row])
        assert_same_bits(whole[row], alone)


def test_expanded_and_strided_cotangents(device: str, generator: torch.Generator) -> None:
    """Case 14: sum() gives an expanded cotangent of stride 0."""
    leaf, ids = _leaf(6, generator, device)
    (expected,) = torch.autograd.grad(detlogp.logp(leaf, ids), leaf, torch.ones(6, device=device))
    (expanded,) = torch.autograd.grad(detlogp.logp(leaf, ids).sum(), leaf)
    assert_same_bits(expanded, expected)
    strided = torch.stack([torch.ones(6), torch.full((6,), torch.nan)], 1).to(device)[:, 0]
    (actual,) = torch.autograd.grad(detlogp.logp(leaf, ids), leaf, strided)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_results_have_half_cotangents(
    half: torch.dtype, device: str, generator: torch.Generator
) -> None:
    leaf, ids = _leaf(4, generator, device)
    grads = torch.tensor([1.0, -0.5, 2.0, 0.25], device=device)
    result = detlogp.logp(leaf, ids, dtype=half)
    assert result.dtype == half
    (actual,) = torch.autograd.grad(result, leaf, grads.to(half))
    (expected,) = torch.autograd.grad(detlogp.logp(leaf, ids), leaf, grads)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("result_dtype", [torch.float32, torch.float64])
def test_gradient_has_the_logits_type(
    result_dtype: torch.dtype, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(3, 300, dtype, device, generator)
    leaf = problem.logits.requires_grad_()
    result = detlogp.logp(leaf, problem.token_ids, dtype=result_dtype)
    assert result.dtype == result_dtype
    result.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    rounded = leaf.detach() if result_dtype == torch.float64 else leaf.detach().float()
    ones = torch.ones(3, device=device)
    expected = reference.gradient(rounded, problem.token_ids, ones, 0 * ones)
    p = reference.probability(rounded)
    arithmetic = dtype if result_dtype == torch.float64 else torch.float32
    bound = gradient_error_bound(p, ones, expected, arithmetic)
    if dtype in (torch.float16, torch.bfloat16):
        bound = bound + gradient_error_bound(p, 0 * ones, expected, dtype) * 1.01
    if result_dtype == torch.float64:
        bound = bound + 2.0**-50 * (expected.abs() + p)
    assert ((leaf.grad.double() - expected).abs() <= bound).all()


def test_backward_twice(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Case 11."""
    problem = random_problem(5, V, dtype, device, generator)
    leaf = problem.logits.requires_grad_()
    result = detlogp.logp(leaf, problem.token_ids)
    first, second = (
        torch.autograd.grad(result, leaf, problem.grad_logp, retain_graph=True)[0] for _ in range(2)
    )
    assert_same_bits(first, second)
    assert_same_answer(solve(problem), solve(problem))


def test_logits_used_twice(device: str, generator: torch.Generator) -> None:
    """Cases 10, 12 and 27: nothing is written in place, so both uses are right."""
    leaf, ids = _leaf(4, generator, device)
    before = leaf.detach().clone()
    loss = leaf.softmax(-1).square().sum() + detlogp.logp(leaf, ids).sum()
    (both,) = torch.autograd.grad(loss, leaf)
    (one,) = torch.autograd.grad(leaf.softmax(-1).square().sum(), leaf)
    (other,) = torch.autograd.grad(detlogp.logp(leaf, ids).sum(), leaf)
    torch.testing.assert_close(both, one + other)
    assert_same_bits(leaf.detach(), before)


def test_logits_changed_before_backward(device: str, generator: torch.Generator) -> None:
    leaf, ids = _leaf(2, generator, device)
    logits = leaf * 1
    result = detlogp.logp(logits, ids)
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_dual_cotangent(device: str, generator: torch.Generator) -> None:
    """The tangent of a cotangent passes through the gradient."""
    leaf, ids = _leaf(3, generator, device)
    result = detlogp.logp(leaf, ids)
    tangent = torch.tensor([1.0, -2.0, 0.5], device=device)
    (expected,) = torch.autograd.grad(result, leaf, tangent, retain_graph=True)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones(3, device=device), tangent)
        (gradient,) = torch.autograd.grad(result, leaf, cotangent)
        torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, expected)
