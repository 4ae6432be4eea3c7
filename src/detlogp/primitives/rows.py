"""The rows that a call is about: what every primitive on logits is given, in this order."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detlogp.primitives._function import keep
from detlogp.primitives.columns import Columns


class Rows(NamedTuple):
    """Arguments that travel together. The statistics are constants: no rule differentiates them."""

    logits: Tensor  # [..., V]
    token_ids: Tensor  # [...], int64
    mask: Tensor | None  # [...], bool
    row_max: Tensor  # [...], m, of the arithmetic's dtype
    log_sum: Tensor  # [...], log(s), of the arithmetic's dtype; float64 in the exact contract
    part: Columns | None = None  # of whole rows, where the logits are a part of them

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    @property
    def place(self) -> tuple[int, ...]:
        """Where the part begins, and the columns of whole rows: what the operators ask for."""
        if self.part is None:
            return ()
        first, end = self.part.first, self.part.first + self.part.count
        return first, max(self.part.vocab_size, end)

    def without_target(self) -> "Rows":
        """Scored, but at no column: as if a column stood before the others, and the id were its."""
        ids = torch.zeros(self.row_max.shape, dtype=torch.int64, device=self.row_max.device)
        return self._replace(token_ids=ids, part=replace(self.columns, first=1))

    @property
    def columns(self) -> Columns:
        if self.part is not None:
            return self.part
        vocab = self.logits.shape[-1]
        return Columns(vocab, vocab, is_exact=self.row_max.dtype is not self.log_sum.dtype)

    def contiguous(self) -> "Rows":
        """As the operators want them: the logits may have any strides, the vectors may not."""
        return self._replace(
            token_ids=self.token_ids.contiguous(),
            mask=None if self.mask is None else self.mask.contiguous(),
            row_max=self.row_max.contiguous(),
            log_sum=self.log_sum.contiguous(),
        )


def keep_rows(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """Saves the inputs of a primitive that begin with Rows."""
    ctx.part = inputs[5]
    keep(ctx, *inputs[:5], *inputs[6:])


def kept_rows(ctx: Any, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """What keep_rows has saved: Rows, and the other inputs."""
    return Rows(*saved[:5])._replace(part=ctx.part), *saved[5:]


def scored(token_ids: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    """[...], bool: selected, and the id is a column. Every other row has the derivative 0."""
    valid = (token_ids >= 0) & (token_ids < vocab)
    return valid if mask is None else valid & mask


def _scored(rows: Rows) -> Tensor:
    return scored(rows.token_ids, rows.mask, rows.columns.vocab_size)


def widen(rows: Rows, matrix: Tensor) -> Tensor:
    """[..., V] in the arithmetic's dtype, with 0 in the rows that are not scored."""
    wide = matrix.to(rows.row_max.dtype)
    zero = torch.zeros((), dtype=wide.dtype, device=wide.device)
    return torch.where(_scored(rows).unsqueeze(-1), wide, zero)


def difference(rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """grad_lse - grad_logp, [...], where a missing one is 0; 0 in the rows that are not scored."""
    zero = torch.zeros((), dtype=rows.row_max.dtype, device=rows.row_max.device)
    if grad_lse is None:
        result = zero.expand(rows.row_max.shape) if grad_logp is None else -grad_logp
    else:
        result = grad_lse if grad_logp is None else grad_lse - grad_logp
    return torch.where(_scored(rows), result, zero)
