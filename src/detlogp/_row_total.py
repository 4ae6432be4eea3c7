"""An operator for the row sum of the exact contract, made of its steps.

The steps write into their arguments. A tracer that folds constants, as torch.func.linearize does,
takes what they write into for constants; it is given one operator that depends on its inputs alone.
"""

import torch
from torch import Tensor

from detlogp._guards import call, guard
from detlogp._native import exact_extremes_op, exact_row_sum_op, exact_total_op

_library = torch.library.Library("detlogp", "FRAGMENT")
_library.define(
    "exact_row_total(Tensor operand, Tensor? logits, Tensor? token_ids, Tensor? mask,"
    " Tensor? row_max, Tensor? log_sum, int vocab_size) -> Tensor"
)
exact_row_total_op = torch.ops.detlogp.exact_row_total.default


def empty_sums(operand: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [2, ...], int32, and sums [...], int64, of rows without a term."""
    leading, device = operand.shape[:-1], operand.device
    keys = torch.zeros(2, *leading, dtype=torch.int32, device=device)
    return keys, torch.zeros(leading, dtype=torch.int64, device=device)


def _row_total(
    operand: Tensor,
    logits: Tensor | None,
    token_ids: Tensor | None,
    mask: Tensor | None,
    row_max: Tensor | None,
    log_sum: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """[...], the sum of each row's elements, or of p times them where there are logits."""
    keys, sums = empty_sums(operand)
    terms = (operand, logits, token_ids, mask, row_max, log_sum, vocab_size)
    call(exact_extremes_op, *terms, keys)
    call(exact_row_sum_op, *terms, keys, sums)
    total: Tensor = call(exact_total_op, keys, sums, vocab_size)
    return total


for _device in ("CPU", "CUDA"):
    _library.impl("exact_row_total", _row_total, _device)
guard("exact_row_total", exact_row_total_op)


@torch.library.register_fake("detlogp::exact_row_total")
def _(operand: Tensor, *_: Tensor | int | None) -> Tensor:
    return operand.new_empty(operand.shape[:-1], dtype=torch.float32)
