"""What `detlogp score` prints: the summary, the least likely tokens, the layout check."""

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from detlogp.cli._layouts import OWN, Comparison
from detlogp.cli._pairs import print_pairs
from detlogp.cli._scores import Scores


def print_summary(console: Console, scores: Scores) -> None:
    scored = int(scores.scored.sum())
    skipped = len(scores.scored) - scored
    not_finite = scored - int(np.isfinite(scores.logp[scores.scored]).sum())
    pairs = [("tokens scored", f"{scored}")]
    if skipped:
        pairs.append(("skipped", f"{skipped} (token id outside the vocabulary)"))
    if not_finite:
        pairs.append(("not finite", f"{not_finite} (logp is -inf or NaN)"))
    if scored:
        pairs.append(("mean logp", f"{scores.mean_logp:.6f} nats"))
        pairs.append(("perplexity", f"{scores.perplexity:.4f}"))
    print_pairs(console, pairs)


def print_least_likely(console: Console, scores: Scores, count: int) -> None:
    rows = np.flatnonzero(scores.scored)
    order = np.argsort(scores.logp[rows], kind="stable")[:count]
    if len(order) == 0:
        return
    table = Table(box=box.SIMPLE)
    for name in ("position", "token id", "logp"):
        table.add_column(name, justify="right")
    if scores.tokens is not None:
        table.add_column("token")
    for row in rows[order]:
        cells = [
            f"{scores.positions[row]}",
            f"{scores.token_ids[row]}",
            f"{scores.logp[row]:.6f}",
        ]
        if scores.tokens is not None:
            cells.append(repr(scores.tokens[row]))
        table.add_row(*(Text(cell) for cell in cells))
    console.print("\nLeast likely tokens", style="bold")
    console.print(table)


def print_layouts(console: Console, comparisons: list[Comparison]) -> None:
    rows = max(comparison.rows for comparison in comparisons)
    table = Table(box=box.SIMPLE)
    for name in ("implementation", "layout", "bits of logp"):
        table.add_column(name)
    shown = ""
    for comparison in comparisons:
        if shown not in ("", comparison.implementation):
            table.add_section()
        name = comparison.implementation if comparison.implementation != shown else ""
        shown = comparison.implementation
        style = "" if comparison.differing == 0 else "yellow"
        table.add_row(name, comparison.layout, Text(str(comparison), style=style))
    title = f"Layout check: the same {rows} rows of logits, against all rows at once"
    console.print(f"\n{title}", style="bold")
    console.print(table)


def verdict(comparisons: list[Comparison]) -> tuple[bool, str]:
    """Whether detlogp's bits are equal in every layout, and the sentence that says so."""
    own = [comparison for comparison in comparisons if comparison.implementation == OWN]
    bad = [f"{comparison.layout} ({comparison})" for comparison in own if comparison.differing]
    if bad:
        return False, f"{OWN} is NOT reproducible here; please report this: {'; '.join(bad)}."
    return True, f"{OWN} gave the same bits in all {len(own) + 1} layouts."
