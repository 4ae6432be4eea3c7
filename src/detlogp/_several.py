"""Several token ids a row: one read of it, and the log-probability of each.

The row's statistics are those of the calls with one id, so a value has the bits of the call with
that id. What is done for each id is done on [..., K] alone.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp import _checks
from detlogp._checks import FLOAT_DTYPES
from detlogp._first_order import tempered
from detlogp._guards import call
from detlogp._native import (
    DTYPE_NUMBERS,
    FLOAT64,
    logp_with_entropy_op,
    logp_with_stats_op,
)
from detlogp._out import copy_out
from detlogp._targets import targets_backward_op, targets_op
from detlogp.primitives._function import is_plain
from detlogp.primitives.gradient import gradient
from detlogp.primitives.rows import Rows
from detlogp.primitives.score import Score, ScoreEntropy
from detlogp.primitives.targets import targets, targets_vjp
from detlogp.primitives.weighted_log import entropy_gradient

Found = tuple[Tensor, Tensor, Tensor | None]
"""logp [..., K], lse [...], and, with a temperature, the entropy [...]."""


def score(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    out: Tensor | None,
    options: tuple[int, int, bool],
    temperature: tuple[float, ...],
    *,
    transformed: bool,
) -> Found:
    """What `functional.score` does where token_ids are [..., K], int64, and options are checked."""
    _checks.check_tensors(logits, token_ids)
    number = options[0] if out is None else DTYPE_NUMBERS[out.dtype]
    args: tuple[Any, ...] = (token_ids, mask, number, *options, *temperature)
    if transformed:
        values, lse, *rest = _composed(logits, *args)
    elif logits.requires_grad and torch.is_grad_enabled():
        values, lse, *rest = FirstOrderSeveral.apply(logits, *args)  # type: ignore[no-untyped-call]
    else:
        values, lse, *rest = _forward(logits, *args)[0]
    if out is not None:
        values = copy_out(out, values, None if mask is None else mask.unsqueeze(-1))
    return values, lse, rest[0] if rest else None


def _forward(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    number: int,
    lse_number: int,
    arithmetic: int,
    nan_for_invalid: bool,
    *temperature: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """logp, lse and, with a temperature, the entropy; m, log(s) and, with it, the gap."""
    column = token_ids.new_zeros(logits.shape[:-1])  # any column: the row's own numbers count
    args = (logits, column, mask, lse_number, lse_number, arithmetic, False)
    if temperature:
        _, lse, entropy, *kept = call(logp_with_entropy_op, *args, *temperature)
        results = [lse, entropy]
    else:
        _, lse, *kept = call(logp_with_stats_op, *args)
        results = [lse]
    rows = (logits, token_ids, mask, *kept[:2])
    values = call(targets_op, *rows, number, nan_for_invalid, *(temperature or (1.0,)))
    return [values, *results], kept


class FirstOrderSeveral(torch.autograd.Function):
    """Ordinary training: logp, lse and, with a temperature, the entropy. Keeps no [N, V] tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, mask: Any, *options: Any) -> Any:
        ctx.temperature = options[4:]
        results, kept = _forward(logits, token_ids, mask, *options)
        ctx.save_for_backward(logits, token_ids, mask, *kept)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *rows, gap = ctx.saved_tensors if ctx.temperature else (*ctx.saved_tensors, None)
        grad_logp, grad_lse, *rest = grads
        of_entropy = rest[0] if rest else None
        temperature = ctx.temperature[0] if ctx.temperature else 1.0
        if torch.compiler.is_compiling() or is_plain():
            more = (gap, of_entropy, temperature)
            grad_logits = call(targets_backward_op, *rows, grad_logp, grad_lse, *more)
        else:
            # create_graph, or is_grads_batched, which maps over the cotangents.
            cotangents = (grad_logp, grad_lse, of_entropy)
            grad_logits = _differentiable_gradient(Rows(*rows), temperature, *cotangents)
        return grad_logits, *(None,) * (6 + len(ctx.temperature))


def _differentiable_gradient(
    rows: Rows,
    temperature: float,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    dtype = rows.row_max.dtype
    ids, mask, vocab = rows.token_ids, rows.mask, rows.logits.shape[-1]
    whole = rows._replace(logits=_quotients(rows.logits, temperature, dtype)).without_target()
    of_lse = None if grad_lse is None else grad_lse.to(dtype)
    of_targets = None
    if grad_logp is not None:
        of_targets, c = targets_vjp(grad_logp.to(dtype), ids, mask, vocab)
        of_lse = c if of_lse is None else of_lse + c
    result = gradient(whole, None, of_lse)
    if of_targets is not None:
        result = result + of_targets
    if grad_entropy is not None:
        result = result + entropy_gradient(whole, grad_entropy)
    return tempered(result, temperature, dtype).to(rows.logits.dtype)


def _quotients(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """In the arithmetic's dtype, so that a sum of two parts of a gradient is rounded once."""
    return tempered(logits, temperature, dtype).to(dtype)


def _composed(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    number: int,
    lse_number: int,
    arithmetic: int,
    nan_for_invalid: bool,
    *temperature: float,
) -> list[Tensor]:
    """The same results under a transform or in forward mode, of primitives."""
    dtype = torch.float64 if arithmetic == FLOAT64 else torch.float32
    quotients = _quotients(logits, temperature[0] if temperature else 1.0, dtype)
    wide = DTYPE_NUMBERS[dtype]
    args = (quotients, None, mask, wide, wide, arithmetic, False)
    function = ScoreEntropy if temperature else Score
    _, *results, row_max, log_sum = function.apply(*args)
    rows = (token_ids, mask, row_max, log_sum)
    values = targets(quotients, results[0], *rows, number, nan_for_invalid)
    return [values, *(result.to(FLOAT_DTYPES[lse_number]) for result in results)]
