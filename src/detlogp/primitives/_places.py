"""Several ids a row: which of them count, where they are, and sums over those that are equal.

No operation here depends on an order that could vary: sums over ids take them in their order, and
two ids of one column are given the same number, so that it does not matter which is written last.
"""

import torch
from torch import Tensor


def places(token_ids: Tensor, mask: Tensor | None, vocab: int) -> tuple[Tensor, Tensor]:
    """[..., K]: whether an id counts (selected, and a column), and the column it stands for.

    An id that does not count stands for a column of the row that does, so that writing there what
    that column gets anyway changes nothing; for column 0 where no id of the row counts.
    """
    counts = (token_ids >= 0) & (token_ids < vocab)
    if mask is not None:
        counts = counts & mask.unsqueeze(-1)
    if token_ids.shape[-1] == 0:
        return counts, token_ids
    column = token_ids.masked_fill(~counts, 0)
    return counts, torch.where(counts, column, column.amax(-1, keepdim=True))


def sum_of_equals(values: Tensor, column: Tensor) -> Tensor:
    """[..., K]: the sum of the values whose column is that of value k, in the order of the ids."""
    total = torch.zeros_like(values)
    for j in range(values.shape[-1]):
        one = slice(j, j + 1)
        total = total + torch.where(column == column[..., one], values[..., one], 0)
    return total
