"""Runs every route to a derivative in every precision, and says how many are right.

    python benchmarks/derivatives.py --output FILE.csv

Routes, reference and tolerances are those of the tests (detlogp.evidence). "raised"
means that PyTorch refuses the route whatever the function, and that detlogp raises too.
"""

import argparse
import csv
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from detlogp.evidence import matrix, routes

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COLUMNS = [
    *("device", "dtype", "form", "route", "order"),
    *("error", "tolerance", "outcome", "reason"),
]
OUTCOMES = ["right", "raised", "skipped", "wrong"]


def run(device: str) -> list[dict[str, str]]:
    rows = []
    for name, form in track(list(matrix.cases()), description=f"routes, {device}"):
        for dtype in DTYPES:
            result = matrix.judge(name, form, dtype, device)
            rows.append(
                {
                    "device": device,
                    "dtype": str(dtype).removeprefix("torch."),
                    "form": form.name,
                    "route": name,
                    "order": str(routes.ALL[name].order),
                    "error": f"{result.error:.3g}",
                    "tolerance": f"{result.tolerance:.3g}",
                    "outcome": result.outcome,
                    "reason": result.reason,
                }
            )
    return rows


def show(rows: list[dict[str, str]]) -> None:
    console = Console(width=120)
    counts = Counter((row["device"], row["dtype"], row["outcome"]) for row in rows)
    table = Table(title=f"{len(rows)} cases: route x form x precision")
    for column in ("device", "dtype", *OUTCOMES):
        table.add_column(column)
    for device, dtype in dict.fromkeys((row["device"], row["dtype"]) for row in rows):
        numbers = (str(counts[device, dtype, outcome]) for outcome in OUTCOMES)
        table.add_row(device, dtype, *numbers)
    console.print(table)
    reasons = Counter((row["outcome"], row["reason"]) for row in rows if row["reason"])
    for (outcome, reason), count in reasons.most_common():
        console.print(f"{count:5} {outcome}: {reason}", highlight=False, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    # PyTorch's own, of torch.func.jvp and linearize.
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script")
    warnings.filterwarnings("ignore", message=".*get_attr Node")
    torch.set_num_threads(1)
    rows = run(options.device)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    show(rows)
    return int(any(row["outcome"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
