"""Times every variant of every benchmark, and writes one row for each.

    python benchmarks/run.py --output benchmarks/results/NAME.json

On CUDA a call is captured in a graph and its replay is timed with events; on the CPU, the clock.
Variants and inputs alternate, inputs are larger than the cache, and the copy bandwidth of the same
run is the yardstick. "torch" is log_softmax and gather. Host time is one eager call without grad,
the GPU not waited for.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import backward
import forward
import second_order
import torch
from cases import Case, Setup, Work, make_inputs
from rich.console import Console
from rich.progress import track
from rich.table import Table

import detlogp

FIRST_ORDER: dict[str, Mapping[str, Setup]] = {
    "forward": forward.VARIANTS,
    "backward": backward.VARIANTS,
}
SECOND_ORDER: dict[str, Mapping[str, Setup]] = {
    "hvp, reverse over reverse": second_order.REVERSE_OVER_REVERSE,
    "hvp, forward over reverse": second_order.FORWARD_OVER_REVERSE,
}
HALF, FLOAT = torch.bfloat16, torch.float32
JOBS = {
    "cuda": [
        (
            FIRST_ORDER,
            [Case(4096, 151936, HALF), Case(4096, 151936, FLOAT), Case(4096, 32000, HALF)],
        ),
        (SECOND_ORDER, [Case(1024, 151936, HALF), Case(1024, 151936, FLOAT)]),
    ],
    "cpu": [
        (FIRST_ORDER, [Case(64, 151936, HALF), Case(64, 151936, FLOAT)]),
        (SECOND_ORDER, [Case(16, 151936, HALF), Case(16, 151936, FLOAT)]),
    ],
}


def timer(call: Callable[[], object], device: str) -> Callable[[], float]:
    """A function that runs the call once and returns its time in ms."""
    if device == "cpu":
        return lambda: _clock_ms(call)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return lambda: _events_ms(graph.replay)


def _clock_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _events_ms(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms


def copy_work(device: str) -> Work:
    count = 2**32 if device == "cuda" else 2**26
    source = torch.randint(256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Work(lambda: target.copy_(source), 2 * count)


class Measurement(NamedTuple):
    minimum_bytes: int
    extra_bytes: int | None  # the most that one call allocates at a time, its results included
    times_ms: list[float]


def extra_bytes(call: Callable[[], object], device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    setups: Mapping[str, Setup], case: Case, device: str, rounds: int
) -> dict[str, Measurement]:
    """Variants take turns, on two inputs each in turn, so that none finds its own in the cache."""
    inputs = [make_inputs(case, device) for _ in range(2)]
    works = {name: [setup(case, chosen) for chosen in inputs] for name, setup in setups.items()}
    result = {
        name: Measurement(pair[0].minimum_bytes, extra_bytes(pair[0].call, device), [])
        for name, pair in works.items()
    }
    timers = {name: [timer(work.call, device) for work in pair] for name, pair in works.items()}
    for turn in range(rounds + 2):
        for name, pair in timers.items():
            elapsed = pair[turn % 2]()
            if turn >= 2:
                result[name].times_ms.append(elapsed)
    return result


def host_us(device: str) -> dict[str, float]:
    """Median over batches of 50 eager calls without grad, fewer than the GPU's queue holds."""
    case = Case(64, 1000, torch.bfloat16)
    inputs = make_inputs(case, device)
    calls = {name: setup(case, inputs).call for name, setup in forward.VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(300):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            elapsed_ms = _clock_ms(lambda call=call: _repeat(call, 50))  # type: ignore[misc]
            if turn >= 100:
                times[name].append(elapsed_ms * 1e3 / 50)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def current_commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def machine(device: str, commit: str) -> dict[str, str]:
    facts = {
        "date": date.today().isoformat(),
        "commit": commit,
        "detlogp": detlogp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.split()[0]
    return facts


def run(device: str, rounds: int) -> dict[str, Any]:
    work = copy_work(device)
    copy_once = _clock_ms if device == "cpu" else _events_ms
    copy_ms = statistics.median([copy_once(work.call) for _ in range(20)][5:])
    copy_gb_s = work.minimum_bytes / copy_ms / 1e6
    rows = []
    jobs = [
        (name, setups, case)
        for benchmarks, cases in JOBS[device]
        for case in cases
        for name, setups in benchmarks.items()
    ]
    for name, setups, case in track(jobs, description="benchmarks"):
        for variant, measured in measure(setups, case, device, rounds).items():
            median = statistics.median(measured.times_ms)
            gb_s = measured.minimum_bytes / median / 1e6
            rows.append(
                {
                    "benchmark": name,
                    "case": case.name(),
                    "variant": variant,
                    "median_ms": round(median, 4),
                    "low_ms": round(min(measured.times_ms), 4),
                    "high_ms": round(max(measured.times_ms), 4),
                    "gb_s": round(gb_s, 1),
                    "share_of_copy": round(gb_s / copy_gb_s, 3),
                    "extra_bytes": measured.extra_bytes,
                }
            )
        if device == "cuda":
            torch.cuda.empty_cache()
    return {
        "method": "graph replay, events" if device == "cuda" else "clock",
        "copy_gb_s": round(copy_gb_s, 1),
        "rows": rows,
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"copy {result['copy_gb_s']} GB/s, {result['machine'].get('gpu', 'CPU')}")
    columns = ["benchmark", "case", "variant", "median_ms", "gb_s", "share_of_copy", "extra_bytes"]
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 2 else "left")
    for row in result["rows"]:
        table.add_row(*(str(row[column]) for column in columns))
    console = Console(width=120)
    console.print(table)
    console.print("host time of one call, us:", result["host_us_of_one_call"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="of the build, where the checkout has no git")
    options = parser.parse_args()
    commit = options.commit or current_commit()
    # A backward runs on its forward's stream, and a graph is captured on a stream that is not the
    # default one: so everything runs on one side stream.
    side = torch.cuda.Stream() if options.device == "cuda" else None
    host = host_us(options.device)
    with torch.cuda.stream(side):
        result = run(options.device, options.rounds)
    result = {"machine": machine(options.device, commit), "host_us_of_one_call": host, **result}
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
