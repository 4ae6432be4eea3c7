"""One call with everything that it gives, for tests that compare calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import detlogp
from detlogp.testing import assert_same_bits


class Problem(NamedTuple):
    logits: Tensor  # [..., V]
    token_ids: Tensor  # [...]
    grad_logp: Tensor  # [...]
    grad_lse: Tensor  # [...]


class Answer(NamedTuple):
    logp: Tensor  # [...]
    lse: Tensor  # [...]
    gradient: Tensor  # [..., V]


def random_problem(
    rows: int, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> Problem:
    """Rows of N(0, 3) logits; the cotangents have the result's dtype."""
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(dtype).to(device)
    token_ids = torch.randint(vocab, (rows,), generator=generator).to(device)
    result_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    grads = torch.randn(2, rows, generator=generator).to(result_dtype).to(device)
    return Problem(logits, token_ids, grads[0], grads[1])


def solve(problem: Problem, rows: Tensor | None = None, contract: str = "locked") -> Answer:
    """Value, lse and gradient; the logits keep their strides, and must come back unwritten."""
    leaf = problem.logits.detach().requires_grad_()
    before = leaf.detach().clone()
    result = detlogp.logp(leaf, problem.token_ids, rows=rows, contract=contract, return_lse=True)
    (gradient,) = torch.autograd.grad(
        result, leaf, (problem.grad_logp, problem.grad_lse), materialize_grads=True
    )
    assert_same_bits(leaf.detach(), before)
    return Answer(result.logp.detach(), result.lse.detach(), gradient)


def assert_finite_differences(function: Callable[..., Any], operands: Any, fast: bool) -> None:
    """gradcheck and gradgradcheck, with the forward mode, and batched where they are slow."""
    assert torch.autograd.gradcheck(
        function,
        operands,
        fast_mode=fast,
        check_forward_ad=True,
        check_batched_grad=not fast,
        # A view (row_expand) has no batched tangent in PyTorch.
        check_batched_forward_grad=not fast,
    )
    assert torch.autograd.gradgradcheck(
        function,
        operands,
        fast_mode=fast,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_batched_grad=not fast,
    )


def pick(answer: Answer, rows: Tensor | slice) -> Answer:
    return Answer(*(part[rows] for part in answer))


def assert_same_answer(actual: Answer, expected: Answer) -> None:
    for name, one, other in zip(Answer._fields, actual, expected, strict=True):
        try:
            assert_same_bits(one, other)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
