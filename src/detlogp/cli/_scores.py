"""Scores a source window by window, keeping a few numbers a token."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import detlogp
from detlogp.cli._sources import Source

KEPT_ROWS = 256


@dataclass(frozen=True)
class Scores:
    """The scored tokens, and the logits of the first of them for the layout check."""

    positions: npt.NDArray[np.int64]  # [N]
    token_ids: npt.NDArray[np.int64]  # [N]
    tokens: list[str] | None  # [N]
    logp: npt.NDArray[Any]  # [N], float32, or float64 for float64 logits
    lse: npt.NDArray[Any]  # [N], of logp's type
    scored: npt.NDArray[np.bool_]  # [N], False where the id is outside [0, V)
    kept_logits: Tensor  # [at most KEPT_ROWS, V], rows whose id is valid
    kept_ids: Tensor  # [at most KEPT_ROWS]

    @property
    def mean_logp(self) -> float:
        """Over the scored rows, in double, correctly rounded sum; NaN when there is none."""
        values = self.logp[self.scored].astype(np.float64)
        if not np.isfinite(values).all():
            return float(values.sum() / len(values))
        return math.fsum(values) / len(values) if len(values) else math.nan

    @property
    def perplexity(self) -> float:
        """exp(-mean logp), inf past the largest double."""
        with np.errstate(over="ignore"):
            return float(np.exp(-self.mean_logp))


def score_source(source: Source) -> Scores:
    """Scores every window; a bar on stderr when there are several and someone watches."""
    console = Console(stderr=True)
    silent = source.window_count == 1 or not console.is_terminal
    parts: list[tuple[Tensor, ...]] = []
    kept: list[tuple[Tensor, Tensor]] = []
    room = KEPT_ROWS
    with Progress(console=console, transient=True, disable=silent) as progress:
        task = progress.add_task("scoring", total=source.window_count)
        for logits, token_ids in source.windows:
            logp, lse = detlogp.logp(logits, token_ids, return_lse=True)
            valid = (token_ids >= 0) & (token_ids < logits.shape[-1])
            parts.append(tuple(part.cpu() for part in (token_ids, logp, lse, valid)))
            chosen = valid.nonzero().squeeze(-1)[:room]
            kept.append((logits[chosen], token_ids[chosen]))
            room -= len(chosen)
            progress.advance(task)
    ids, logp, lse, valid = (torch.cat(column) for column in zip(*parts, strict=True))
    kept_logits, kept_ids = (torch.cat(column) for column in zip(*kept, strict=True))
    decode = source.decode
    return Scores(
        positions=np.arange(len(ids)) + source.first_position,
        token_ids=ids.numpy(),
        tokens=None if decode is None else [decode(token_id) for token_id in ids.tolist()],
        logp=logp.numpy(),
        lse=lse.numpy(),
        scored=valid.numpy(),
        kept_logits=kept_logits,
        kept_ids=kept_ids,
    )
