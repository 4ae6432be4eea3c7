"""One call with everything that it gives, for tests that compare calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import detlogp
from detlogp.functional import LogpLseEntropyResult
from detlogp.testing import assert_same_bits

Function = Callable[..., Tensor]
"""Of logits, token ids and rows."""

both_contracts = pytest.mark.parametrize("contract", ["locked", "exact"])


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


def all_of(x: Tensor, ids: Tensor, **options: Any) -> LogpLseEntropyResult:
    found = detlogp.logp(x, ids, return_lse=True, return_entropy=True, **options)
    assert isinstance(found, LogpLseEntropyResult)
    return found


def _along(function: Function, seed: int) -> Function:
    """The tangent along a direction that is the same for every sample."""

    def tangent(x: Tensor, ids: Tensor, rows: Tensor | None) -> Tensor:
        numbers = torch.arange(x.numel(), device=x.device).view(x.shape) * seed
        direction = numbers.cos().to(x.dtype)
        result: Tensor = torch.func.jvp(lambda y: function(y, ids, rows), (x,), (direction,))[1]
        return result

    return tangent


def with_tangents(value: Function, gradient: Function) -> dict[str, Function]:
    """A value and its gradient by name, with their tangents: what tests of vmap map."""
    return {
        "value": value,
        "gradient": gradient,
        "jvp": _along(value, 3),
        "jvp of jvp": _along(_along(value, 3), 5),
        "jvp of gradient": _along(gradient, 3),
    }


def skip_double(contract: str, dtype: torch.dtype) -> None:
    if contract == "exact" and dtype == torch.float64:
        pytest.skip("the exact contract has no double arithmetic")


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


def nested_derivatives(
    function: Callable[[Tensor], Tensor], x: Tensor, u: Tensor, w: Tensor, scale: Tensor
) -> dict[str, Tensor]:
    """Orders 1 to 3 in both modes, of [N, V] -> [N]; u and w are directions, scale cotangents."""

    def pushed(logits: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(function, (logits,), (u,))[1]
        return tangent

    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(function(leaf), leaf, scale, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf, u, create_graph=True)
    (third,) = torch.autograd.grad(second, leaf, w)
    return {
        "first": first.detach(),
        "second": second.detach(),
        "third": third,
        "jvp": pushed(x),
        "jvp of jvp": torch.func.jvp(pushed, (x,), (w,))[1],
        "vjp of jvp": torch.func.vjp(pushed, x)[1](scale)[0],
    }
