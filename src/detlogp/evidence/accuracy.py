"""Rows on which implementations lose accuracy, and the error that float32 arithmetic allows.

The yardstick is float64 arithmetic on the same rounded inputs, and the proven bound of a float32
sum in 128 to 512 lanes (detlogp.testing.logp_error_bound), for a result of float32 whatever the
logits' type: a bfloat16 result does not keep it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from detlogp import reference
from detlogp.testing import gradient_error_bound, logp_error_bound

Rows = tuple[Tensor, Tensor]
"""logits [N, V], token_ids [N]."""
BAD_IDS = (-100, -1, 0, 5, 2**40)
"""Ids to try; those from 0 up to 5 count from V."""


def random_rows(rows: int, vocab: int, dtype: torch.dtype, device: str, seed: int) -> Rows:
    """N(0, 3) logits."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.empty(rows, vocab, dtype=dtype, device=device).normal_(0, 3, generator=generator)
    return logits, torch.randint(vocab, (rows,), device=device, generator=generator)


def _offset(logits: Tensor, token_ids: Tensor) -> Rows:
    """Case 4: what is left of the logits at an offset of 1e7 (at 2^11 for half types)."""
    offset = 1e7 if logits.dtype == torch.float32 else 2048.0
    return (logits.float() - offset).to(logits.dtype), token_ids


def _near_certain(logits: Tensor, token_ids: Tensor) -> Rows:
    """The token leads by so much that logp is about -1e-4 (-1e-6 to -1e-3 over the rows)."""
    wide = logits.double()
    lse = torch.logsumexp(wide, -1)
    missing = torch.logspace(-6, -3, len(logits), dtype=torch.float64, device=logits.device)
    target = (lse - missing.log()).unsqueeze(-1).to(logits.dtype)
    return logits.scatter(-1, token_ids.unsqueeze(-1), target), token_ids


def _masked(logits: Tensor, token_ids: Tensor) -> Rows:
    """Case 6: the first columns are -inf, by whole tiles; in the last row all but the token."""
    vocab = logits.shape[1]
    masked = logits.clone()
    ids = token_ids.clone()
    for row in range(len(masked)):
        count = min((1024, 2048, 65536)[row % 3], vocab // 2)
        masked[row, :count] = -torch.inf
        ids[row] = count + int(ids[row]) % (vocab - count)
    token = logits[-1, ids[-1]].clone()
    masked[-1] = -torch.inf
    masked[-1, ids[-1]] = token
    return masked, ids


CASES: dict[str, Callable[[Tensor, Tensor], Rows]] = {
    "random": lambda logits, token_ids: (logits, token_ids),
    "offset": _offset,
    "near-certain": _near_certain,
    "masked": _masked,
}


def value_error(value: Tensor, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[N] error in nats (infinite where a NaN came or a value is missing), and what is allowed."""
    exact = reference.logp(logits, token_ids).logp
    error = (value.double() - exact).abs().nan_to_num(nan=torch.inf)
    return torch.where(value.double() == exact, 0.0, error), logp_error_bound(logits, token_ids)


def gradient_error(
    gradient: Tensor, logits: Tensor, token_ids: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """[N] the row's largest error relative to what is allowed there, and 1."""
    exact = reference.gradient(logits, token_ids, cotangent, torch.zeros_like(cotangent))
    p = reference.probability(logits)
    allowed = gradient_error_bound(p, cotangent.abs(), exact, logits.dtype)
    error = (gradient.double() - exact).abs().nan_to_num(nan=torch.inf)
    return (error / allowed).amax(-1), torch.ones(len(logits), device=logits.device)
