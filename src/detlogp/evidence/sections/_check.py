"""What a section is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import detlogp
from detlogp.testing import assert_same_bits

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Options(NamedTuple):
    device: str
    quick: bool
    max_order: int
    examples: Path | None  # the repository's examples/, for the model and the GRPO script
    probed: list[Any]  # the records of the probe section, as they come


class Result(NamedTuple):
    outcome: str  # "pass", "fail" or "skip"
    reason: str
    error: float | None = None
    tolerance: float | None = None


class Check(NamedTuple):
    name: str
    dtype: str
    run: Callable[[], Result]
    order: int | None = None  # of the derivative
    method: str = ""  # the family of its route


class Answer(NamedTuple):
    """What a call gives: [...], [...] and [..., V]."""

    logp: Tensor
    lse: Tensor
    gradient: Tensor


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def solve(
    logits: Tensor, token_ids: Tensor, grads: tuple[Tensor, Tensor], rows: Tensor | None = None
) -> Answer:
    """Value, lse and the gradient for one cotangent of each."""
    leaf = logits.detach().requires_grad_()
    result = detlogp.logp(leaf, token_ids, rows=rows, return_lse=True)
    (gradient,) = torch.autograd.grad(result, leaf, grads, materialize_grads=True)
    return Answer(result.logp.detach(), result.lse.detach(), gradient)


def same_bits(actual: Tensor, expected: Tensor, what: str) -> Result:
    try:
        assert_same_bits(actual, expected)
    except AssertionError as error:
        return Result("fail", f"{what}: {error}")
    return Result("pass", f"{what}: {actual.numel()} numbers, the same bits")


def all_of(results: list[Result]) -> Result:
    """The first that failed, or one pass with every reason."""
    for result in results:
        if result.outcome != "pass":
            return result
    return Result("pass", "; ".join(result.reason for result in results))
