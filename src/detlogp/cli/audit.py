"""`detlogp audit`: runs implementations of logp through what reinforcement learning needs."""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from detlogp.cli._command import Command, CommandError, choose_device, import_report
from detlogp.evidence import audit, summary
from detlogp.evidence.layouts import PROPERTIES
from detlogp.evidence.machine import facts
from detlogp.evidence.peers import Peer, default_names, find
from detlogp.evidence.worker import Stop, run_isolated

DESCRIPTION = """\
Runs implementations f(logits, token_ids) -> logp through the properties that a
reinforcement-learning run needs. An implementation is a built-in name or
module:function; without one, every built-in that is installed is run.

Bits of value and gradient, the same rows presented otherwise: repeat, batch,
position, chunk, reorder, padding, noise, nan, strides, alignment. Then: inputs
(the logits are not written to), the accuracy against float64 (accuracy, offset,
near-certain, masked), bad ids, and the routes to a derivative.

In the tables: "=" held; a percentage, the rows whose value drifts or is less
accurate than float32 allows, in the worst size and type; "grad", the gradient
alone; "bad", wrong; "err", it raised; "dies", its process ended. Routes: right /
raise / silently wrong.

Every implementation runs in a process of its own. Exit code: 0; 1 when
a property named by --require did not hold; 2 on an error.
"""
SHORT = {
    **{"repeat": "rep", "batch": "bat", "position": "pos", "chunk": "chk", "reorder": "ord"},
    **{"padding": "pad", "noise": "noi", "strides": "str", "alignment": "ali"},
    **{"inputs": "inp", "accuracy": "accur", "offset": "offs", "near-certain": "near"},
    **{"masked": "mask", "bad ids": "ids"},
}
STYLES = {"held": "green", "refused": "yellow", "not loaded": "dim"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("implementation", nargs="*", help="built-in name or module:function")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if available)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="64 rows, V = 1000, 50257; by default without torch-compile",
    )
    parser.add_argument("--property", action="append", choices=audit.NAMES, metavar="P")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--vocab", action="append", type=int, metavar="V")
    parser.add_argument("--rows", type=int, metavar="N", help="default: 4096 on CUDA, else 256")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--require",
        metavar="P,P",
        default="",
        help='properties that decide the exit code, or "all" (default: none)',
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write report.html, findings.csv, audit.png, .svg",
    )


def _plan(args: argparse.Namespace, device: str) -> list[audit.Job]:
    on_cuda = device.startswith("cuda")
    vocabs = (1000, 50257) if args.quick else (1000, 32000, 50257)
    if on_cuda and not args.quick:
        vocabs = (*vocabs, 151936)
    rows = (64 if args.quick else 4096 if on_cuda else 256) if args.rows is None else args.rows
    for name, number in (("--rows", rows), *(("--vocab", vocab) for vocab in args.vocab or ())):
        if number < 8:
            raise CommandError(f"{name} must be at least 8, got {number}")
    return list(
        audit.jobs(
            tuple(args.property or audit.NAMES),
            tuple(args.dtype or ("float32", "bfloat16")),
            tuple(args.vocab or vocabs),
            *(rows, device, args.seed),
        )
    )


def _peers(names: Sequence[str], device: str, quick: bool) -> tuple[list[Peer], list[Peer]]:
    """Those to run, and those that are not installed. A module may lie in the current folder."""
    sys.path.insert(0, os.getcwd())
    try:
        chosen = [find(name) for name in names or default_names(quick)]
    except ValueError as error:
        raise CommandError(str(error)) from error
    absent = [peer for peer in chosen if not peer.installed()]
    present = [peer for peer in chosen if peer not in absent]
    elsewhere = [peer for peer in present if device.split(":")[0] not in peer.devices]
    if names and (absent or elsewhere):
        missing = ", ".join(peer.name for peer in absent) or "nothing"
        other = ", ".join(peer.name for peer in elsewhere) or "nothing"
        raise CommandError(f"not installed: {missing}; not for {device}: {other}")
    return [peer for peer in present if peer not in elsewhere], absent


def run_all(peers: Sequence[Peer], jobs: Sequence[audit.Job]) -> list[audit.Finding]:
    """Every job of every implementation, with a progress bar; four processes at a time on CUDA."""
    processes = 4 if jobs[0].device.startswith("cuda") else 1
    found: dict[str, list[audit.Finding]] = defaultdict(list)
    with Progress() as progress, ThreadPoolExecutor(processes) as pool:
        task = progress.add_task("audit", total=len(jobs) * len(peers))

        stop = Stop()

        def one(peer: Peer) -> None:
            for findings in run_isolated(peer, jobs, stop):
                found[peer.name].extend(findings)
                progress.advance(task)

        try:
            for future in [pool.submit(one, peer) for peer in peers]:
                future.result()
        except BaseException:
            stop()
            pool.shutdown(cancel_futures=True)
            raise
    return [finding for peer in peers for finding in found[peer.name]]


def _table(findings: list[audit.Finding], names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("implementation", no_wrap=True)
    for name in names:
        table.add_column(SHORT.get(name, name), justify="right")
    for implementation in dict.fromkeys(finding.implementation for finding in findings):
        cells = [summary.cell(summary.select(findings, implementation, name)) for name in names]
        texts = (Text(cell.text, STYLES.get(cell.outcome, "bold red")) for cell in cells)
        table.add_row(implementation, *texts)
    return table


def _meaning(findings: list[audit.Finding]) -> Table:
    table = Table(box=box.SIMPLE, title="What the drift alone does to a run, nothing trained")
    for name in ("implementation", "ulp", "nats", "ratio - 1", "k3 KL"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    for name in dict.fromkeys(finding.implementation for finding in findings):
        means = summary.meaning(findings, name)
        ratio = means.largest_ratio - 1.0
        table.add_row(
            name,
            f"{means.largest_ulp:.1f}",
            *(f"{number:.2e}" for number in (means.largest, ratio, means.k3_kl)),
        )
    return table


def show(console: Console, findings: list[audit.Finding], absent: Sequence[Peer]) -> None:
    ran = {finding.property for finding in findings}
    for names in (tuple(PROPERTIES), audit.NAMES[len(PROPERTIES) :]):
        if ran & set(names):
            console.print(_table(findings, [name for name in names if name in ran]))
    if ran & set(PROPERTIES):
        console.print(_meaning(findings))
    offenders = summary.first_offenders(findings)
    if offenders and len(ran) <= 2:
        for offender in offenders:
            console.print(
                f"{offender.implementation}, {offender.layout or offender.property}, "
                f"{offender.quantity}, {offender.dtype}, V = {offender.vocab}: {offender.detail}",
                highlight=False,
                markup=False,
            )
    elif offenders:
        console.print("First offending rows (again: --property P; all of them: --output DIR)")
        for offender in offenders[:8]:
            console.print(f"  {offender.reproduce}", highlight=False, markup=False, soft_wrap=True)
        if len(offenders) > 8:
            console.print(f"  and {len(offenders) - 8} more")
    if absent:
        console.print("not installed: " + ", ".join(peer.name for peer in absent))


def _required(text: str, ran: Sequence[str]) -> tuple[str, ...]:
    if text == "all":
        return tuple(ran)
    names = tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in audit.NAMES:
            raise CommandError(f"--require must name properties or all, got {name!r}")
        if name not in ran:
            raise CommandError(f"--require {name}: --property leaves it out")
    return names


def run(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    required = _required(args.require, args.property or audit.NAMES)
    plots = None
    if args.output is not None:
        plots = import_report("audit_report", "--output")
    machine = facts(device)
    jobs = _plan(args, device)
    peers, absent = _peers(args.implementation, device, args.quick)
    findings = run_all(peers, jobs)
    console = Console(highlight=False)
    show(console, findings, absent)
    if plots is not None:
        plots.write(args.output, findings, machine, [peer.name for peer in absent])
        console.print(f"written: {args.output}/report.html", soft_wrap=True)
    failed = sorted({f"{f.implementation}: {f.property}" for f in findings if _fails(f, required)})
    if failed:
        console.print("required, and did not hold: " + "; ".join(failed), style="bold red")
    return int(bool(failed))


def _fails(finding: audit.Finding, required: Sequence[str]) -> bool:
    """Where anything is required, an implementation that could not be loaded fails."""
    concerned = finding.property in required or (required and finding.outcome == "not loaded")
    return bool(concerned) and finding.outcome != "held"


COMMAND = Command(
    "audit",
    "run any implementation of logp through what reinforcement learning needs",
    DESCRIPTION,
    add_arguments,
    run,
)
