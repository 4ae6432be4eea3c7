"""The acceptance in sections: a file for each; a check is one row of the CSV."""

from collections.abc import Callable, Iterator

from detlogp.evidence.sections import (
    derivatives,
    golden,
    layouts,
    out,
    probes,
    semantics,
    training,
)
from detlogp.evidence.sections._check import Check, Options, Result

__all__ = ["SECTIONS", "Check", "Options", "Result"]

SECTIONS: dict[str, Callable[[Options], Iterator[Check]]] = {
    "golden": golden.checks,
    "semantics": semantics.checks,
    "layouts": layouts.checks,
    "out": out.checks,
    "orders": derivatives.orders,
    "transforms": derivatives.transforms,
    "probe": probes.checks,
    "training": training.checks,
}
