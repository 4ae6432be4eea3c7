"""`detlogp probe`: which kernels really run on each route to a derivative."""

import argparse
import json
import warnings
from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from detlogp.cli._command import Command, choose_device
from detlogp.evidence import probe
from detlogp.evidence.machine import facts

DESCRIPTION = """\
Runs ordinary training and each route to a derivative under PyTorch's profiler,
and records which kernels really ran, the library's own and others apart, with
versions, build and device.

Exit code: 0; 1 where ordinary training did not use exactly the fused forward
and backward, a route ran without a derivative kernel of the library, or ran
PyTorch's own softmax; 2 on an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if available)")
    parser.add_argument("--quick", action="store_true", help="routes of order 2 and below")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record as JSON")


def collect(device: str, quick: bool) -> list[probe.Ran]:
    with warnings.catch_warnings():
        # PyTorch's own, of torch.func.jvp and linearize.
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script")
        warnings.filterwarnings("ignore", message=".*get_attr Node")
        total = probe.count(quick)
        return list(track(probe.probe(device, quick), f"probe, {device}", total))


def show(console: Console, ran: list[probe.Ran]) -> None:
    table = Table(box=box.SIMPLE)
    for name in ("derivatives", "routes", "as it should be", "the library's operators"):
        table.add_column(name, justify="right" if name in ("routes", "as it should be") else "left")
    for kind in dict.fromkeys(
        sorted((item.kind for item in ran), key=lambda kind: (kind.isdigit(), len(kind), kind))
    ):
        items = [item for item in ran if item.kind == kind]
        operators: Counter[str] = Counter()
        for item in items:
            operators.update(dict.fromkeys(item.own_operators, 1))
        names = ", ".join(name.removeprefix("detlogp::") for name in operators)
        good = sum(not item.complaint for item in items)
        table.add_row(kind, str(len(items)), str(good), names)
    console.print(table)
    for item in ran:
        if item.complaint:
            console.print(f"{item.route}: {item.complaint}", style="bold red", markup=False)


def run(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    ran = collect(device, args.quick)
    console = Console(highlight=False)
    show(console, ran)
    if args.output is not None:
        record = {"machine": facts(device), "routes": [item._asdict() for item in ran]}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written: {args.output}", soft_wrap=True)
    return int(any(item.complaint for item in ran))


COMMAND = Command(
    "probe",
    "which kernels really run on each route to a derivative",
    DESCRIPTION,
    add_arguments,
    run,
)
