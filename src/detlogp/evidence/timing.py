"""Times benchmarks of several implementations, which take turns within one run.

On CUDA every call is timed twice: ten calls captured in a graph and replayed ("graph": a tenth of
the time, what the GPU needs) and called eagerly ("eager": with what the host adds), both by events.
On the CPU, by the clock.
Inputs rotate, and are larger than the cache. The copy bandwidth of the run is the yardstick.
"""

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from detlogp.evidence.peers import Implementation, one_line
from detlogp.evidence.works import Benchmark, Case, Inputs, Work, make_inputs

CALLS_IN_GRAPH = 10


class Row(NamedTuple):
    """One implementation in one benchmark by one method; `reason` where it could not be timed."""

    benchmark: str
    case: str
    variant: str
    method: str  # "graph", "eager" or "clock"
    median_ms: float
    low_ms: float
    high_ms: float
    gb_s: float  # of the fewest bytes that the work must move
    share_of_copy: float
    operations_per_byte: float
    extra_bytes: int | None  # the most that one call allocates at a time, its results included
    reason: str = ""


Timer = Callable[[], float]
"""Runs the call once and returns its time in ms."""


def clock_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def events_ms(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms


def copy_gb_s(device: str) -> float:
    """Bytes read and written by a plain copy, a second."""
    count = 2**32 if device.startswith("cuda") else 2**26
    source = torch.randint(256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    once = events_ms if device.startswith("cuda") else clock_ms
    median_ms = statistics.median([once(lambda: target.copy_(source)) for _ in range(20)][5:])
    return 2 * count / median_ms / 1e6


def _graph_timer(works: list[Work]) -> Timer:
    """Of one call: the inputs take turns within the graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for k in range(CALLS_IN_GRAPH):
            works[k % len(works)].call()
    return lambda: events_ms(graph.replay) / CALLS_IN_GRAPH


def _timers(works: list[Work], device: str) -> dict[str, Timer | str]:
    """By method; a text says why there is none. Each call has run once when this returns."""
    on_cuda = device.startswith("cuda")
    try:
        for work in works:
            work.call()
    except Exception as error:
        return {"graph" if on_cuda else "clock": one_line(error, 160)}
    calls = itertools.cycle([work.call for work in works])
    if not on_cuda:
        return {"clock": lambda: clock_ms(next(calls))}
    torch.cuda.synchronize()
    timers: dict[str, Timer | str] = {"eager": lambda: events_ms(next(calls))}
    try:
        timers["graph"] = _graph_timer(works)
    except Exception as error:
        torch.cuda.synchronize()
        timers["graph"] = one_line(error, 160)
    return timers


def _extra_bytes(call: Callable[[], object], device: str) -> int | None:
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    name: str,
    benchmark: Benchmark,
    case: Case,
    variants: Mapping[str, Implementation],
    device: str,
    rounds: int,
    copied_gb_s: float,
) -> list[Row]:
    """Two inputs in turn, so that none is found in the cache; two turns warm up."""
    with _side_stream(device):
        inputs = [make_inputs(case, device, seed) for seed in range(2)]
        works, failed = _make_works(benchmark, case, variants, inputs)
        timers = {v: _timers(pair, device) for v, pair in works.items()}
        extra = {v: _extra(pair[0], timers[v], device) for v, pair in works.items()}
        times = _take_turns(timers, rounds)
    rows = []
    nothing = (0.0,) * 6
    for variant in variants:
        if variant in failed:
            rows.append(Row(name, case.name(), variant, "", *nothing, None, failed[variant]))
            continue
        for method, timer in timers[variant].items():
            reason = timer if isinstance(timer, str) else ""
            row = Row(name, case.name(), variant, method, *nothing, extra[variant], reason)
            numbers = times.get((variant, method))
            rows.append(
                row if numbers is None else _fill(row, works[variant][0], numbers, copied_gb_s)
            )
    return rows


def _side_stream(device: str) -> Any:
    """A backward runs on its forward's stream, and a graph is captured on a stream that is not the
    default one: so everything runs on one side stream."""
    if device.startswith("cuda"):
        return torch.cuda.stream(torch.cuda.Stream(device))
    return nullcontext()


def _make_works(
    benchmark: Benchmark,
    case: Case,
    variants: Mapping[str, Implementation],
    inputs: list[Inputs],
) -> tuple[dict[str, list[Work]], dict[str, str]]:
    """And why there is none for those that refuse."""
    works: dict[str, list[Work]] = {}
    failed: dict[str, str] = {}
    for variant, run in variants.items():
        try:
            works[variant] = [benchmark(run, case, chosen) for chosen in inputs]
        except Exception as error:
            failed[variant] = one_line(error, 160)
    return works, failed


def _take_turns(
    timers: dict[str, dict[str, Timer | str]], rounds: int
) -> dict[tuple[str, str], list[float]]:
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 2):
        for variant, by_method in timers.items():
            for method, timer in by_method.items():
                if callable(timer):
                    elapsed = timer()
                    if turn >= 2:
                        times.setdefault((variant, method), []).append(elapsed)
    return times


def _extra(work: Work, timers: dict[str, Timer | str], device: str) -> int | None:
    return _extra_bytes(work.call, device) if any(map(callable, timers.values())) else None


def _fill(row: Row, work: Work, times_ms: list[float], copied_gb_s: float) -> Row:
    median_ms = statistics.median(times_ms)
    gb_s = work.minimum_bytes / median_ms / 1e6
    return row._replace(
        median_ms=round(median_ms, 5),
        low_ms=round(min(times_ms), 5),
        high_ms=round(max(times_ms), 5),
        gb_s=round(gb_s, 3),
        share_of_copy=round(gb_s / copied_gb_s, 4),
        operations_per_byte=round(work.operations / work.minimum_bytes, 3),
    )


def host_us(calls: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """One eager call, the GPU not waited for: the median over batches of 50 calls, fewer than the
    GPU's queue holds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    on_cuda = device.startswith("cuda")
    for turn in range(300):
        for name, call in calls.items():
            if on_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            elapsed_us = (time.perf_counter() - start) * 1e6 / 50
            if turn >= 100:
                times[name].append(elapsed_us)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def release(device: str) -> None:
    """Gives memory back between benchmarks."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
