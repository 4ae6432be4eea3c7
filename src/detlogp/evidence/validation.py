"""Runs the acceptance, one check at a time, and keeps a row for each as soon as it is known."""

import csv
import hashlib
import json
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from detlogp.evidence.peers import one_line
from detlogp.evidence.sections import SECTIONS, Check, Options, Result

MANIFEST = "manifest.sha256"


class Row(NamedTuple):
    """A line of cases.csv. `error` and `tolerance` are empty where a check has none."""

    section: str
    case: str
    dtype: str
    device: str
    order: str
    method: str
    outcome: str  # "pass", "fail" or "skip"
    reason: str
    error: str
    tolerance: str
    seconds: str


Key = tuple[str, str, str, str]


def plan(sections: list[str], options: Options) -> list[tuple[str, Check]]:
    return [(name, check) for name in sections for check in SECTIONS[name](options)]


def run(
    folder: Path, checks: list[tuple[str, Check]], device: str, known: dict[Key, Row]
) -> Iterator[Row]:
    """Every check that has not passed already. A row goes to cases.csv and log.txt at once, behind
    those of an earlier run: what is there is never lost, and the last row of a check counts."""
    path = folder / "cases.csv"
    is_new = not path.is_file()
    with path.open("a", newline="") as table, (folder / "log.txt").open("a") as log:
        writer = csv.writer(table, lineterminator="\n")
        if is_new:
            writer.writerow(Row._fields)
        log.write(f"{datetime.now().isoformat(timespec='seconds')} start, {len(checks)} checks\n")
        for section, check in checks:
            earlier = known.get((section, check.name, check.dtype, device))
            if earlier is not None and earlier.outcome == "pass":
                yield earlier
                continue
            row = _run(section, check, device)
            log.write(f"{row.outcome} {section}: {check.name}, {row.dtype}: {row.reason}\n")
            writer.writerow(row)
            table.flush()
            log.flush()
            yield row


def settle(folder: Path) -> list[Row]:
    """Rewrites cases.csv with one row for each check, the last, and returns them."""
    rows = list(read(folder / "cases.csv").values())
    fresh = folder / "cases.csv.new"
    with fresh.open("w", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(rows)
    fresh.replace(folder / "cases.csv")
    return rows


def check_same(folder: Path, machine: dict[str, str]) -> str:
    """What differs between this build and machine and those of the folder's rows; empty if nothing.
    Notes them where the folder is new."""
    path = folder / "machine.json"
    if not path.is_file():
        path.write_text(json.dumps(machine, indent=1) + "\n")
        return ""
    before: dict[str, str] = json.loads(path.read_text())
    names = [name for name in machine if name != "date" and machine[name] != before.get(name)]
    return ", ".join(f"{name} was {before.get(name)}, is {machine[name]}" for name in names)


def _run(section: str, check: Check, device: str) -> Row:
    start = time.perf_counter()
    try:
        result = check.run()
    except Exception as error:
        result = Result("fail", one_line(error, 300))
    order = "" if check.order is None else str(check.order)
    numbers = (_text(result.error), _text(result.tolerance))
    seconds = f"{time.perf_counter() - start:.3f}"
    what = (section, check.name, check.dtype, device, order, check.method)
    return Row(*what, result.outcome, result.reason, *numbers, seconds)


def _text(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def read(path: Path) -> dict[Key, Row]:
    """The whole rows of a cases.csv, which an interrupted run may have left."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = [Row(*line) for line in csv.reader(file) if len(line) == len(Row._fields)]
    return {(row.section, row.case, row.dtype, row.device): row for row in rows[1:]}


def write_manifest(folder: Path) -> None:
    """SHA-256 of every file, as `sha256sum -c` reads it."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    (folder / MANIFEST).write_text("".join(lines))


def verify_manifest(folder: Path) -> list[str]:
    """What differs from the manifest: a changed, missing or unlisted file, one line each."""
    listed = {}
    for line in (folder / MANIFEST).read_text().splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    complaints = []
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file():
            complaints.append(f"missing: {name}")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            complaints.append(f"changed: {name}")
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name != MANIFEST and name not in listed:
            complaints.append(f"not in the manifest: {name}")
    return complaints
