"""`detlogp bench`: forward, forward + backward and second order, beside every peer installed."""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from detlogp.cli._command import Command, CommandError, choose_device, import_report
from detlogp.evidence import timing
from detlogp.evidence.machine import facts
from detlogp.evidence.matrix import judge_implementation
from detlogp.evidence.peers import WITH_ENTROPY, Implementation, default_names, find, in_place
from detlogp.evidence.timing import Row
from detlogp.evidence.works import (
    FIRST_ORDER,
    SECOND_ORDER,
    TRAINING_STEP,
    Benchmark,
    Case,
    make_inputs,
)

DESCRIPTION = """\
Times forward, backward, forward + backward and second order of detlogp and of
every peer that is installed, alternating within one run.

On CUDA: "graph" is a tenth of the replay of a CUDA graph of ten calls, "eager" a
call with what the host adds; both by events. On the CPU, the clock. GB/s counts the
fewest bytes that the work must move; the share compares it with a plain copy in
the same run. Extra is the most memory that one call allocates at a time.
"+ entropy": the entropy of each row besides, in one call.
With --scaling: detlogp alone, against N and against V.
"""
_HALF, _FLOAT = torch.bfloat16, torch.float32
Jobs = list[tuple[str, Benchmark, Case]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("variant", nargs="*", help="built-in names (default: all installed)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if available)")
    parser.add_argument("--quick", action="store_true", help="one small case, 5 rounds")
    parser.add_argument("--scaling", action="store_true", help="time against N and against V")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed turns (default: 20)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write bench.csv and bench.png")


def _jobs(device: str, quick: bool) -> Jobs:
    if quick:
        rows = 1024 if device.startswith("cuda") else 8
        first, second = [Case(rows, 32000, _HALF)], [Case(rows, 32000, _FLOAT)]
    elif device.startswith("cuda"):
        large = [Case(4096, 151936, dtype) for dtype in (_HALF, _FLOAT)]
        first = [*large, Case(4096, 32000, _HALF)]
        second = [Case(1024, 151936, dtype) for dtype in (_HALF, _FLOAT)]
    else:
        first = [Case(64, 151936, dtype) for dtype in (_HALF, _FLOAT)]
        second = [Case(16, 151936, dtype) for dtype in (_HALF, _FLOAT)]
    jobs = [(name, run, case) for case in first for name, run in FIRST_ORDER.items()]
    return jobs + [(name, run, case) for case in second for name, run in SECOND_ORDER.items()]


def _scaling_jobs(device: str, quick: bool) -> Jobs:
    """Powers of two of N and of V, the other one fixed."""
    on_cuda = device.startswith("cuda")
    rows, vocab = (4096 if on_cuda else 64, 151936)
    if quick:
        rows, vocab = (rows // 4, 4096)
    most_rows, most_vocab = (2**14, 2**18) if on_cuda and not quick else (4 * rows, 4 * vocab)
    sizes = [(2**k, vocab) for k in range(most_rows.bit_length())]
    sizes += [(rows, 2**k) for k in range(9, most_vocab.bit_length())]
    return [
        (name, FIRST_ORDER[name], Case(*size, dtype))
        for name in ("forward", "forward + backward")
        for dtype in (_HALF, _FLOAT)
        for size in sizes
    ]


def _variants(names: list[str], device: str, quick: bool) -> dict[str, Implementation]:
    """Those that can be imported; a name that was given must be."""
    variants = {}
    for name in names or default_names(quick):
        try:
            peer = find(name)
        except ValueError as error:
            raise CommandError(str(error)) from error
        if not names and (not peer.installed() or device.split(":")[0] not in peer.devices):
            continue
        try:
            variants[name] = peer.load()
        except ImportError as error:
            if names:
                raise CommandError(f"{name} could not be imported: {error}") from error
    return variants


def _wrong_at(
    benchmark: str, variants: Mapping[str, Implementation], device: str
) -> dict[str, str]:
    """Whoever has no right second derivative is not timed at it: by name, why."""
    route = {"hvp, reverse over reverse": "reverse 2", "hvp, forward over reverse": "jvp of grad"}
    if benchmark not in route:
        return {}
    judged = {n: judge_implementation(v, route[benchmark], device) for n, v in variants.items()}
    words = {"refused": "raises", "broken": "silently wrong"}
    return {n: f"{words[o]}: {why}" for n, (o, why) in judged.items() if o in words}


def _host_us(variants: Mapping[str, Implementation], device: str) -> dict[str, float]:
    logits, token_ids, _ = make_inputs(Case(64, 1000, torch.bfloat16), device)
    timed = [name for name in variants if name in ("detlogp", "torch-log-softmax")]
    return timing.host_us({n: partial(variants[n], logits, token_ids) for n in timed}, device)


def collect(
    variants: Mapping[str, Implementation],
    jobs: Jobs,
    device: str,
    rounds: int,
    *,
    with_entropy: bool,
) -> tuple[list[Row], float]:
    rows: list[Row] = []
    copied = timing.copy_gb_s(device)
    for name, benchmark, case in track(jobs, description="bench"):
        wrong = _wrong_at(name, variants, device)
        chosen = {variant: run for variant, run in variants.items() if variant not in wrong}
        if name == TRAINING_STEP and "detlogp" in variants:
            chosen["detlogp in place"] = in_place
        if with_entropy and name in ("forward", "forward + backward"):
            more = {f"{v} + entropy": run for v, run in WITH_ENTROPY.items() if v in variants}
            chosen |= more
        rows += timing.measure(name, benchmark, case, chosen, device, rounds, copied)
        nothing = (0.0,) * 6
        for variant, reason in wrong.items():
            rows.append(Row(name, case.name(), variant, "", *nothing, None, reason))
        timing.release(device)
    return rows, copied


def show(console: Console, rows: list[Row], copied: float) -> None:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), title=f"copy {copied:.1f} GB/s")
    for name in ("variant", "method", "median ms", "GB/s", "of copy", "extra MB"):
        table.add_column(name, justify="left" if name in ("variant", "method") else "right")
    shown = ("", "")
    for row in rows:
        if (row.benchmark, row.case) != shown:
            shown = (row.benchmark, row.case)
            table.add_section()
            table.add_row(f"[bold]{row.benchmark}[/], {row.case}")
        if row.reason:
            table.add_row(f"  {row.variant}", row.method, f"[dim]{row.reason[:24]}[/]")
            continue
        extra = "" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:.1f}"
        share = f"{row.share_of_copy:.1%}"
        numbers = (f"{row.median_ms:.4f}", f"{row.gb_s:.0f}", share, extra)
        table.add_row(f"  {row.variant}", row.method, *numbers)
    console.print(table)


def run(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    rounds = (5 if args.quick else 20) if args.rounds is None else args.rounds
    if rounds < 1:
        raise CommandError(f"--rounds must be at least 1, got {rounds}")
    machine = facts(device)
    report = None
    if args.output is not None:
        report = import_report("bench_report", "--output")
    if args.scaling and args.variant not in ([], ["detlogp"]):
        raise CommandError(f"--scaling times detlogp alone, got {' '.join(args.variant)}")
    names = ["detlogp"] if args.scaling else args.variant
    variants = _variants(names, device, args.quick)
    on_cuda = device.startswith("cuda")
    host = _host_us(variants, device) if on_cuda else {}
    jobs = (_scaling_jobs if args.scaling else _jobs)(device, args.quick)
    rows, copied = collect(variants, jobs, device, rounds, with_entropy=not args.scaling)
    console = Console(highlight=False)
    show(console, rows, copied)
    for name, microseconds in host.items():
        console.print(f"host time of one call without grad: {name} {microseconds} us")
        times_ms = (microseconds / 1e3,) * 3
        rows.append(Row("host time", "64 x 1000 bfloat16", name, "host", *times_ms, 0, 0, 0, None))
    if report is not None:
        draw = report.draw_scaling if args.scaling else report.draw
        report.write(args.output, rows, machine, copied, draw)
        console.print(f"written: {args.output}/bench.csv, bench.png", soft_wrap=True)
    return 0


COMMAND = Command(
    "bench",
    "time forward, backward and second order beside every peer installed",
    DESCRIPTION,
    add_arguments,
    run,
)
