"""From findings to the cells of a table: one for an implementation and a property."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from detlogp.evidence.audit import Finding
from detlogp.evidence.layouts import PROPERTIES

_WORST_LAST = ("held", "refused", "not loaded", "crashed", "broken")


class Cell(NamedTuple):
    """The text of a broken one is the share of the rows whose values were compared, those that
    differ, in the worst finding; "grad" where the gradient alone is broken."""

    outcome: str  # "held", "refused", "not loaded", "crashed", "broken", or "" where nothing ran
    text: str


class Meaning(NamedTuple):
    """What an implementation's drift alone does to training, over all layouts."""

    largest_ulp: float
    largest: float  # nats
    largest_ratio: float
    k3_kl: float  # of the worst layout


def select(findings: Iterable[Finding], implementation: str, name: str) -> list[Finding]:
    return [f for f in findings if f.implementation == implementation and f.property == name]


def cell(findings: Sequence[Finding]) -> Cell:
    """The worst of findings that are about one property of one implementation."""
    if not findings:
        return Cell("", "")
    outcome = max((finding.outcome for finding in findings), key=_WORST_LAST.index)
    if findings[0].property == "routes":
        counts = [sum(f.outcome == o for f in findings) for o in ("held", "refused", "broken")]
        return Cell(outcome, "/".join(map(str, counts)))
    worst = [finding for finding in findings if finding.outcome == outcome]
    values = [finding for finding in worst if finding.quantity == "value"]
    share = max((f.drifting / f.rows for f in values if f.rows), default=0.0)
    texts = {"held": "=", "refused": "err", "crashed": "dies", "not loaded": "none"}
    text = texts.get(outcome) or (_percent(share) if values else "grad")
    return Cell(outcome, text)


def _percent(share: float) -> str:
    """In whole percent, but never 0% for something."""
    return "bad" if share == 0 else "<1%" if share < 0.01 else f"{math.floor(share * 100)}%"


def meaning(findings: Iterable[Finding], implementation: str) -> Meaning:
    drifts = [
        f
        for f in findings
        if f.implementation == implementation and f.property in PROPERTIES and f.quantity == "value"
    ]
    return Meaning(
        max((f.largest_ulp for f in drifts), default=0.0),
        max((f.largest for f in drifts), default=0.0),
        max((f.largest_ratio for f in drifts), default=1.0),
        max((f.k3_kl for f in drifts), default=0.0),
    )


def first_offenders(findings: Iterable[Finding]) -> list[Finding]:
    """The first broken or crashed finding of each implementation and property."""
    seen: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        if finding.outcome in ("broken", "crashed", "not loaded"):
            seen.setdefault((finding.implementation, finding.property), finding)
    return list(seen.values())
