"""The rows that a call is about: what every primitive on logits is given, in this order."""

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Arguments that travel together. The statistics are constants: no rule differentiates them."""

    logits: Tensor  # [..., V]
    token_ids: Tensor  # [...], int64
    mask: Tensor | None  # [...], bool
    row_max: Tensor  # [...], m, of the arithmetic's dtype
    log_sum: Tensor  # [...], log(s), of the arithmetic's dtype

    def contiguous(self) -> "Rows":
        """As the operators want them: the logits may have any strides, the vectors may not."""
        mask = None if self.mask is None else self.mask.contiguous()
        vectors = (self.token_ids.contiguous(), mask)
        return Rows(self.logits, *vectors, self.row_max.contiguous(), self.log_sum.contiguous())


def scored(token_ids: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    """[...], bool: selected, and the id is a column. Every other row has the derivative 0."""
    valid = (token_ids >= 0) & (token_ids < vocab)
    return valid if mask is None else valid & mask


def widen(rows: Rows, matrix: Tensor) -> Tensor:
    """[..., V] in the arithmetic's dtype, with 0 in the rows that are not scored."""
    wide = matrix.to(rows.row_max.dtype)
    kept = scored(rows.token_ids, rows.mask, matrix.shape[-1]).unsqueeze(-1)
    return torch.where(kept, wide, torch.zeros((), dtype=wide.dtype, device=wide.device))


def difference(rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """grad_lse - grad_logp, [...], where a missing one is 0; 0 in the rows that are not scored."""
    zero = torch.zeros((), dtype=rows.row_max.dtype, device=rows.row_max.device)
    if grad_lse is None:
        result = zero.expand(rows.row_max.shape) if grad_logp is None else -grad_logp
    else:
        result = grad_lse if grad_logp is None else grad_lse - grad_logp
    return torch.where(scored(rows.token_ids, rows.mask, rows.logits.shape[-1]), result, zero)
