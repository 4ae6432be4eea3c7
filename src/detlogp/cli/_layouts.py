"""Scores the same logits in several layouts and compares the bits. Prints nothing."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from detlogp.evidence.layouts import LAYOUTS
from detlogp.evidence.peers import PEERS, Implementation
from detlogp.testing import bits

OWN = "detlogp.logp"
ONE_THREAD = "one thread"
SHOWN = (
    "one row at a time",
    "chunks of 7",
    "reversed",
    "noise beside each row",
    "misaligned by one element",
)


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


def _widened(name: str) -> Implementation:
    """Half types to float32, as detlogp's arithmetic has them, so that no rounding hides a bit."""
    run = PEERS[name].load()

    def widened(logits: Tensor, token_ids: Tensor) -> Tensor:
        return run(logits if logits.dtype == torch.float64 else logits.float(), token_ids)

    return widened


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    OWN: PEERS["detlogp"].load(),
    "torch log_softmax": _widened("torch-log-softmax"),
    "torch logsumexp": _widened("torch-logsumexp"),
}


def compare_layouts(
    logits: Tensor,
    token_ids: Tensor,
    implementations: Mapping[str, Implementation] = IMPLEMENTATIONS,
) -> list[Comparison]:
    """Every implementation in every layout, against all rows at once; on the CPU with more than one
    thread, with one thread too.

    logits [N, V], N >= 1; token_ids [N], int64, all within [0, V).
    """
    comparisons = []
    for name, score in implementations.items():
        at_once = score(logits, token_ids)
        for layout in SHOWN:
            generator = torch.Generator().manual_seed(0)
            calls = list(LAYOUTS[layout]((logits, token_ids), generator))
            found = torch.cat([score(*call.parts)[call.take] for call in calls])
            expected = torch.cat([at_once[call.rows] for call in calls])
            comparisons.append(_compare(name, layout, found, expected))
        if logits.device.type == "cpu" and torch.get_num_threads() > 1:
            found = _with_one_thread(score, logits, token_ids)
            comparisons.append(_compare(name, ONE_THREAD, found, at_once))
    return comparisons


def _compare(name: str, layout: str, found: Tensor, expected: Tensor) -> Comparison:
    differs = bits(found) != bits(expected)
    gap = (found.double() - expected.double()).abs()[differs]
    count = len(gap)
    return Comparison(name, layout, len(expected), count, gap.max().item() if count else 0.0)


def _with_one_thread(score: Implementation, logits: Tensor, token_ids: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return score(logits, token_ids)
    finally:
        torch.set_num_threads(threads)
