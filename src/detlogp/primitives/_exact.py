"""The exact contract in steps, so that each process of a group can have a part of the columns.

A step is an operator on what is here; between two steps the processes agree, by one reduction of
integers with O(N) elements. Keys are floats as integers of the same order (csrc/core/parts.h).
"""

import torch
from torch import Tensor

from detlogp._guards import call
from detlogp._native import (
    exact_extremes_op,
    exact_finish_op,
    exact_max_op,
    exact_row_sum_op,
    exact_sum_op,
    exact_total_op,
)
from detlogp._row_total import empty_sums, exact_row_total_op
from detlogp.primitives.columns import Columns
from detlogp.primitives.rows import Rows, scored

_KEY_OF_MINUS_INFINITY = -0x7F800001


def score(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    columns: Columns,
    dtype: int,
    lse_dtype: int,
    nan_for_invalid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, lse, m and log(s) of whole rows, on every process; the vectors are contiguous."""
    keys = torch.full(
        (2, *token_ids.shape), _KEY_OF_MINUS_INFINITY, dtype=torch.int32, device=logits.device
    )
    sums = torch.zeros(token_ids.shape, dtype=torch.int64, device=logits.device)
    rows = (logits, token_ids, mask, columns.first, columns.vocab_size)
    call(exact_max_op, *rows, keys)
    columns.largest(keys)
    call(exact_sum_op, *rows, keys, sums)
    columns.total(sums)
    options = (columns.vocab_size, dtype, lse_dtype, nan_for_invalid)
    result: tuple[Tensor, Tensor, Tensor, Tensor]
    result = call(exact_finish_op, keys, sums, token_ids, mask, *options)
    return result


def row_sum(operand: Tensor, columns: Columns, rows: Rows | None = None) -> Tensor:
    """[...], the sum of each row of the operand, float32; with rows, of p times the operand."""
    tensors = (None,) * 5 if rows is None else rows.contiguous().tensors
    terms = (operand, *tensors, columns.vocab_size)
    total: Tensor
    if columns.group is None:
        total = call(exact_row_total_op, *terms)
        return total
    keys, sums = empty_sums(operand)
    call(exact_extremes_op, *terms, keys)
    columns.largest(keys)
    call(exact_row_sum_op, *terms, keys, sums)
    columns.total(sums)
    total = call(exact_total_op, keys, sums, columns.vocab_size)
    return total


def target_here(token_ids: Tensor, mask: Tensor | None, columns: Columns) -> tuple[Tensor, Tensor]:
    """[...], whether a row is scored and its target is here; and which column that is, or 0."""
    column = token_ids - columns.first
    in_part = (column >= 0) & (column < columns.count)
    is_here = scored(token_ids, mask, columns.vocab_size) & in_part
    return is_here, torch.where(is_here, column, 0)


def at_target(values: Tensor, token_ids: Tensor, mask: Tensor | None, columns: Columns) -> Tensor:
    """[...], the element at each row's target, wherever it is; 0 in rows that are not scored."""
    if columns.count == 0:
        found = values.new_zeros(token_ids.shape)
    else:
        is_here, column = target_here(token_ids, mask, columns)
        found = values.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0)
    if columns.group is None:
        return found
    # The bits travel as an integer: all others send 0.
    number = found.float().view(torch.int32)
    columns.total(number)
    return number.view(torch.float32).to(values.dtype)
