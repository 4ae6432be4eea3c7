"""`detlogp validate`: the whole acceptance in one command."""

import argparse
import json
import signal
import warnings
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from detlogp.cli._command import Command, CommandError, choose_device, import_report
from detlogp.evidence import validation
from detlogp.evidence.machine import facts
from detlogp.evidence.sections import SECTIONS, Options
from detlogp.evidence.validation import Row

DESCRIPTION = """\
The whole acceptance: recorded bits, the semantics table, layouts, buffers,
derivatives of every order by every route in four precisions, whose kernels ran,
and training. Into --output go report.html, cases.csv (a row a check, with its
own reason), errors.png, coverage.png, draw.py which redraws them, log.txt,
probe.json and manifest.sha256. A run that fails or is interrupted leaves a
report that says so; --resume goes on after what had passed.

Exit code: 0; 1 when a check failed, the run was interrupted, or a file differs
from the manifest; 2 on an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, metavar="DIR", help="folder of the report")
    where.add_argument("--verify", type=Path, metavar="DIR", help="check a folder's manifest")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if available)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, orders 1 and 2")
    parser.add_argument("--max-order", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--section", action="append", choices=SECTIONS, metavar="S")
    parser.add_argument(
        *("--examples",),
        type=Path,
        default=Path("examples"),
        metavar="DIR",
        help="folder with grpo.py and the tiny model (default: examples)",
    )
    parser.add_argument("--resume", action="store_true", help="keep what has passed already")


def _verify(folder: Path, console: Console) -> int:
    if not (folder / validation.MANIFEST).is_file():
        raise CommandError(f"--verify needs a folder with {validation.MANIFEST}, got {folder}")
    complaints = validation.verify_manifest(folder)
    for complaint in complaints:
        console.print(complaint, style="bold red", markup=False, soft_wrap=True)
    console.print("differs from its manifest" if complaints else "every file is as in the manifest")
    return int(bool(complaints))


def _folder(args: argparse.Namespace) -> Path:
    folder: Path = args.output
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--output must be a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not args.resume:
        raise CommandError(f"--output {folder} is not empty; --resume goes on with it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show(console: Console, counts: dict[str, dict[str, int]], rows: list[Row]) -> None:
    table = Table(box=box.SIMPLE)
    for name in ("section", "passed", "failed", "skipped"):
        table.add_column(name, justify="left" if name == "section" else "right")
    for name, count in counts.items():
        table.add_row(name, *(str(count[outcome]) for outcome in ("pass", "fail", "skip")))
    console.print(table)
    for row in [row for row in rows if row.outcome == "fail"][:20]:
        text = f"{row.section}: {row.case}, {row.dtype}: {row.reason}"
        console.print(text, style="bold red", markup=False, soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False)
    if args.verify is not None:
        return _verify(args.verify, console)
    report = import_report("validation_report", "validate")
    device = choose_device(args.device)
    options = Options(device, args.quick, args.max_order, args.examples, [])
    checks = validation.plan(args.section or list(SECTIONS), options)
    if not checks:
        raise CommandError(f"--max-order {args.max_order} and --section leave no check to run")
    folder, machine = _folder(args), facts(device)
    changed = validation.check_same(folder, machine)
    if changed:
        raise CommandError(f"--resume needs the build and machine of the folder's rows: {changed}")
    known = validation.read(folder / "cases.csv")
    # PyTorch's own, of torch.func.jvp and linearize.
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script")
    warnings.filterwarnings("ignore", message=".*get_attr Node")
    # As Ctrl-C, so that the report is written.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    done = 0
    status = "complete"
    try:
        with Progress(console=console) as progress:
            task = progress.add_task("validate", total=len(checks))
            for row in validation.run(folder, checks, device, known):
                done += 1
                progress.update(task, advance=1, description=f"validate, {row.section}")
    except KeyboardInterrupt:
        status = f"interrupted after {done} of {len(checks)} checks"
    except BaseException as error:
        status = f"stopped by {type(error).__name__} after {done} of {len(checks)} checks"
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if options.probed:
            record = {"machine": machine, "routes": options.probed}
            (folder / "probe.json").write_text(json.dumps(record, indent=1) + "\n")
        rows = validation.settle(folder)
        report.write(folder, rows, machine, status)
    show(console, report.counts(rows), rows)
    console.print(f"{status}; written: {folder}/report.html", soft_wrap=True)
    return int(status != "complete" or any(row.outcome == "fail" for row in rows))


COMMAND = Command(
    "validate", "the whole acceptance, with a report", DESCRIPTION, add_arguments, run
)
