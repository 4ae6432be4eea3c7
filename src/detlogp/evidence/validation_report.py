"""The report of a validation: report.html, the figures, and the script that redraws them."""

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from detlogp.evidence import figures, page
from detlogp.evidence.sections import SECTIONS
from detlogp.evidence.validation import Row, write_manifest


def counts(rows: Sequence[Row]) -> dict[str, Counter[str]]:
    """How many passed, failed and were skipped in each section, in order."""
    by_section = {name: Counter[str]() for name in SECTIONS}
    for row in rows:
        by_section[row.section][row.outcome] += 1
    return {name: counter for name, counter in by_section.items() if counter}


def write(folder: Path, rows: Sequence[Row], machine: dict[str, str], status: str) -> None:
    """`status` says how the run ended: "complete", or what stopped it."""
    shutil.copy(Path(figures.__file__), folder / "draw.py")
    figures.draw(folder)
    skips = Counter((row.section, row.reason) for row in rows if row.outcome == "skip")
    html = page.render(
        "validation.html",
        machine=machine,
        status=status,
        counts=counts(rows),
        failures=[row for row in rows if row.outcome == "fail"],
        skips=skips.most_common(),
        pictures=[name for name in ("errors.png", "coverage.png") if (folder / name).is_file()],
    )
    (folder / "report.html").write_text(html)
    write_manifest(folder)
