"""Two operators for several ids a row, made of the library's others: values, and gradient.

Operators, so that a compiler takes each as a whole, and fuses no product with an addition in it.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp._checks import FLOAT_DTYPES
from detlogp._first_order import tempered
from detlogp._guards import call, guard
from detlogp._native import (
    DTYPE_NUMBERS,
    FLOAT64,
    logp_backward_op,
    logp_with_stats_op,
    row_sum_op,
)
from detlogp.primitives._places import places, sum_of_equals
from detlogp.primitives.rows import Rows

_library = torch.library.Library("detlogp", "FRAGMENT")
_library.define(
    "targets(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum,"
    " int dtype, bool nan_for_invalid, float temperature) -> Tensor"
)
_library.define(
    "targets_backward(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max,"
    " Tensor log_sum, Tensor? grad_logp, Tensor? grad_lse, Tensor? gap, Tensor? grad_entropy,"
    " float temperature) -> Tensor"
)
targets_op = torch.ops.detlogp.targets.default
targets_backward_op = torch.ops.detlogp.targets_backward.default


def _targets(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    dtype: int,
    nan_for_invalid: bool,
    temperature: float,
) -> Tensor:
    """(x[t_k] - m) - log(s), [..., K]: the last step of the kernels, with their bits."""
    counts, column = places(token_ids, mask, logits.shape[-1])
    x = tempered(logits.gather(-1, column), temperature, row_max.dtype).to(row_max.dtype)
    # In float64 where the exact contract keeps log(s) in it. m is kept as 0 where it is -0, but the
    # kernels take it as it is; so 0 is added, and no distance of -0 comes of it.
    below_max = x.to(log_sum.dtype) - row_max.to(log_sum.dtype).unsqueeze(-1) + 0.0
    values = (below_max - log_sum.unsqueeze(-1)).to(row_max.dtype).masked_fill(~counts, 0)
    if nan_for_invalid:
        is_nan = ~counts if mask is None else ~counts & mask.unsqueeze(-1)
        values = values.masked_fill(is_nan, torch.nan)
    return _rounded(values, dtype).contiguous()


def _rounded(values: Tensor, number: int) -> Tensor:
    """In the dtype of that number, by one rounding."""
    dtype = FLOAT_DTYPES[number]
    if values.dtype is not torch.float64 or number > DTYPE_NUMBERS[torch.bfloat16]:
        return values.to(dtype)
    # PyTorch rounds twice, to float32 first. The lse of a row of one column is that column.
    rows = (
        values.unsqueeze(-1),
        torch.zeros(values.shape, dtype=torch.int64, device=values.device),
    )
    result: Tensor = call(logp_with_stats_op, *rows, None, number, number, FLOAT64, False)[1]
    return result


def _targets_backward(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    gap: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """The gradient, [..., V], for cotangents of the values, [..., K], and of lse and entropy.

    With c = grad_lse - sum_k grad_logp[k], a column that is no target has c p, and a target t

        own (1 - p) + (c + own) p,    own = the sum of grad_logp[k] over k with t_k = t

    which is the gradient of a row at its target: one column, with the row's statistics. So the
    kernels give both, with the entropy's part, the temperature and the rounding.
    """
    of_lse, of_entropy = (
        None if grad is None else grad.to(row_max.dtype).contiguous()
        for grad in (grad_lse, grad_entropy)
    )
    rows = Rows(logits, token_ids, mask, row_max, log_sum).without_target()
    shared = (*rows.place, gap, of_entropy, temperature)
    if grad_logp is None or token_ids.shape[-1] == 0:
        whole: Tensor = call(logp_backward_op, *rows.tensors, None, of_lse, *shared)
        return whole
    counts, column = places(token_ids, mask, logits.shape[-1])
    of_values = grad_logp.to(row_max.dtype).masked_fill(~counts, 0)
    c = (0.0 if of_lse is None else of_lse) - call(row_sum_op, of_values)
    result: Tensor = call(logp_backward_op, *rows.tensors, None, c, *shared)
    own = sum_of_equals(of_values, column)
    at_targets = call(
        logp_backward_op,
        logits.gather(-1, column).unsqueeze(-1),
        torch.zeros_like(column),
        *_for_each(column, mask, row_max, log_sum),
        own,
        c.unsqueeze(-1) + own,
        0,
        None,
        *_for_each(column, gap, of_entropy),
        temperature,
    ).squeeze(-1)
    # Without an id that counts the row has no target, and its column keeps what it has.
    has_target = counts.any(-1, keepdim=True)
    at_targets = torch.where(has_target, at_targets, result.gather(-1, column))
    return result.scatter_(-1, column, at_targets)


def _for_each(column: Tensor, *vectors: Tensor | None) -> list[Tensor | None]:
    """[..., K]: what the row has, for each of its ids."""
    return [
        None if vector is None else vector.unsqueeze(-1).expand_as(column).contiguous()
        for vector in vectors
    ]


for _device in ("CPU", "CUDA"):
    _library.impl("targets", _targets, _device)
    _library.impl("targets_backward", _targets_backward, _device)
guard("targets", targets_op)
guard("targets_backward", targets_backward_op)


@torch.library.register_fake("detlogp::targets")
def _(logits: Tensor, token_ids: Tensor, mask: Tensor | None, *args: Any) -> Tensor:
    return token_ids.new_empty(token_ids.shape, dtype=FLOAT_DTYPES[args[2]])


@torch.library.register_fake("detlogp::targets_backward")
def _(logits: Tensor, *_: Tensor | float | None) -> Tensor:
    return logits.new_empty(logits.shape)
