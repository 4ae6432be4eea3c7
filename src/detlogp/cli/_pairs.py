"""Prints names beside their values."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text


def print_pairs(console: Console, pairs: Sequence[tuple[str, str]], indent: int = 0) -> None:
    """One line a pair, values aligned; a long value is never cut or wrapped by us."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        line = Text(f"{'':{indent}}{name:{width}}  {value}")
        console.print(line, soft_wrap=True)
