"""Scores the same logits in several batch layouts and compares the bits. Prints nothing."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import detlogp
from detlogp.testing import bits

Implementation = Callable[[Tensor, Tensor], Tensor]
"""(logits [n, V], token_ids [n]) -> logp [n]."""


class Layout(NamedTuple):
    """A way to hand rows to an implementation; the result is in the rows' own order."""

    name: str
    score: Callable[[Implementation, Tensor, Tensor], Tensor]
    max_rows: int | None = None
    threads_only: bool = False  # says something on the CPU alone, with more than one thread


class Comparison(NamedTuple):
    """One implementation in one layout, against the same rows scored all at once."""

    implementation: str
    layout: str
    rows: int
    differing: int
    max_difference: float  # in nats, over the rows that differ

    def __str__(self) -> str:
        if self.differing == 0:
            return "equal"
        return f"{self.differing} of {self.rows} rows differ, max {self.max_difference:.1e}"


# ---- implementations -----------------------------------------------------------------------------
def score_with_detlogp(logits: Tensor, token_ids: Tensor) -> Tensor:
    value = detlogp.logp(logits, token_ids)
    assert isinstance(value, Tensor)
    return value


def _widen(logits: Tensor) -> Tensor:
    """Half types to float32, as detlogp's arithmetic has them, so that no rounding hides a bit."""
    return logits if logits.dtype == torch.float64 else logits.float()


def score_with_log_softmax(logits: Tensor, token_ids: Tensor) -> Tensor:
    table = torch.log_softmax(_widen(logits), dim=-1)
    return table.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def score_with_logsumexp(logits: Tensor, token_ids: Tensor) -> Tensor:
    wide = _widen(logits)
    target = wide.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return target - torch.logsumexp(wide, dim=-1)


OWN = "detlogp.logp"
IMPLEMENTATIONS: Mapping[str, Implementation] = {
    OWN: score_with_detlogp,
    "torch log_softmax": score_with_log_softmax,
    "torch logsumexp": score_with_logsumexp,
}


# ---- layouts -------------------------------------------------------------------------------------
def in_chunks(score: Implementation, logits: Tensor, token_ids: Tensor, size: int) -> Tensor:
    starts = range(0, len(logits), size)
    return torch.cat([score(logits[i : i + size], token_ids[i : i + size]) for i in starts])


def reversed_order(score: Implementation, logits: Tensor, token_ids: Tensor) -> Tensor:
    return score(logits.flip(0), token_ids.flip(0)).flip(0)


def padded_with_noise(score: Implementation, logits: Tensor, token_ids: Tensor) -> Tensor:
    """The rows at the odd places of a batch of 2 N + 1; noise at the others."""
    count, vocab = logits.shape
    generator = torch.Generator().manual_seed(0)
    noise = 10 * torch.randn(count + 1, vocab, generator=generator)
    batch = logits.new_empty(2 * count + 1, vocab)
    batch[0::2] = noise.to(batch)
    batch[1::2] = logits
    ids = token_ids.new_zeros(2 * count + 1)
    ids[1::2] = token_ids
    return score(batch, ids)[1::2]


def misaligned(score: Implementation, logits: Tensor, token_ids: Tensor) -> Tensor:
    """The rows in a buffer that begins one element after its storage does."""
    view = logits.new_empty(logits.numel() + 1)[1:].view(logits.shape)
    return score(view.copy_(logits), token_ids)


def one_thread(score: Implementation, logits: Tensor, token_ids: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return score(logits, token_ids)
    finally:
        torch.set_num_threads(threads)


LAYOUTS = (
    Layout("one row at a time", partial(in_chunks, size=1), max_rows=64),
    Layout("chunks of 7", partial(in_chunks, size=7)),
    Layout("reversed order", reversed_order),
    Layout("padded with noise", padded_with_noise),
    Layout("misaligned buffer", misaligned),
    Layout("one thread", one_thread, threads_only=True),
)


# ---- the check -----------------------------------------------------------------------------------
def compare_layouts(
    logits: Tensor,
    token_ids: Tensor,
    implementations: Mapping[str, Implementation] = IMPLEMENTATIONS,
) -> list[Comparison]:
    """Every implementation in every layout that applies here, against all rows at once.

    logits [N, V], N >= 1; token_ids [N], int64, all within [0, V).
    """
    threaded = logits.device.type == "cpu" and torch.get_num_threads() > 1
    layouts = [layout for layout in LAYOUTS if threaded or not layout.threads_only]
    comparisons = []
    for name, score in implementations.items():
        at_once = score(logits, token_ids)
        for layout in layouts:
            step = 1 if layout.max_rows is None else -(-len(logits) // layout.max_rows)
            expected = at_once[::step].contiguous()
            found = layout.score(score, logits[::step], token_ids[::step]).contiguous()
            differs = bits(found) != bits(expected)
            gap = (found.double() - expected.double()).abs()[differs]
            count = len(gap)
            largest = gap.max().item() if count else 0.0
            comparisons.append(Comparison(name, layout.name, len(expected), count, largest))
    return comparisons
