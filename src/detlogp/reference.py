"""Slow, obvious, in float64: what `logp` and its gradient are, written from the formulas alone."""

import torch
from torch import Tensor

from detlogp.functional import LogpResult


def logp(logits: Tensor, token_ids: Tensor, mask: Tensor | None = None) -> LogpResult:
    """log_softmax and gather in float64, with the semantics table.

    Args:
        logits: [..., V], any floating dtype.
        token_ids: [...], int64; an id outside [0, V) gives logp 0 and lse -inf.
        mask: [...], bool; a row that is False gives logp 0 and lse -inf.

    Returns:
        LogpResult of float64 tensors [...], in nats.
    """
    x = logits.double()
    scored = _scored(logits, token_ids, mask)
    lowest = torch.finfo(torch.float64).min
    row_max = x.nan_to_num(nan=lowest, posinf=torch.inf, neginf=-torch.inf).amax(-1)
    row_max = row_max.clamp_min(lowest)
    log_sum = (x - row_max.unsqueeze(-1)).exp().sum(-1).log()
    target = _gather(x, token_ids)
    return LogpResult(
        torch.where(scored, target - row_max - log_sum, 0.0),
        torch.where(scored, row_max + log_sum, -torch.inf),
    )


def probability(logits: Tensor) -> Tensor:
    """softmax over the last dimension in float64, [..., V]."""
    x = logits.double()
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def gradient(
    logits: Tensor,
    token_ids: Tensor,
    grad_logp: Tensor,
    grad_lse: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """grad_logp (onehot - p) + grad_lse p in float64, [..., V]; 0 in rows that are not scored."""
    p = probability(logits)
    scored = _scored(logits, token_ids, mask).unsqueeze(-1)
    columns = torch.arange(logits.shape[-1], device=logits.device)
    onehot = (token_ids.unsqueeze(-1) == columns).double()
    full = grad_logp.double().unsqueeze(-1) * (onehot - p) + grad_lse.double().unsqueeze(-1) * p
    return torch.where(scored, full, 0.0)


def _scored(logits: Tensor, token_ids: Tensor, mask: Tensor | None) -> Tensor:
    valid = (token_ids >= 0) & (token_ids < logits.shape[-1])
    return valid if mask is None else valid & mask


def _gather(x: Tensor, token_ids: Tensor) -> Tensor:
    safe = token_ids.clamp(0, x.shape[-1] - 1)
    return x.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
