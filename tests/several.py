"""Problems with several token ids a row, and what they should give, for tests that share them."""

from typing import NamedTuple

import pytest
import torch
from calls import random_problem
from torch import Tensor

temperatures = pytest.mark.parametrize("temperature", [1.0, 0.7])


class Problem(NamedTuple):
    """Rows 1, 2 and 3 have ids that repeat, some that are bad, and bad ones alone."""

    logits: Tensor  # [N, V]
    token_ids: Tensor  # [N, K]
    grad_logp: Tensor  # [N, K], of the result's dtype
    grad_lse: Tensor  # [N]
    grad_entropy: Tensor  # [N]

    @property
    def counts(self) -> Tensor:
        return (self.token_ids >= 0) & (self.token_ids < self.logits.shape[-1])


def make_problem(
    vocab: int,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
    rows: int = 7,
    count: int = 5,
) -> Problem:
    x, _, a, b = random_problem(rows, vocab, dtype, device, generator)
    ids = torch.randint(vocab, (rows, count), generator=generator).to(device)
    ids[1] = ids[1, :1]
    ids[2, ::2] = torch.tensor([-100, vocab, 2**40], device=device)[: len(ids[2, ::2])]
    ids[3] = -1
    of_values = torch.randn(rows, count, generator=generator).to(device, a.dtype)
    return Problem(x, ids, of_values, a, b)


def composed(x: Tensor, ids: Tensor, mask: Tensor | None, temperature: float) -> list[Tensor]:
    """logp, lse and entropy of PyTorch alone."""
    scaled = x / temperature
    lse = scaled.exp().sum(-1).log()
    log_p = scaled - lse.unsqueeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    counts = (ids >= 0) & (ids < x.shape[-1])
    selected = torch.ones_like(lse, dtype=torch.bool) if mask is None else mask
    logp = log_p.gather(-1, ids.clamp(0, x.shape[-1] - 1))
    return [
        torch.where(counts & selected.unsqueeze(-1), logp, 0.0),
        torch.where(selected, lse, 0.0),
        torch.where(selected, entropy, 0.0),
    ]
