"""What `detlogp bench` leaves out, on a GPU, by graphs of one call and of ten.

    python benchmarks/calls.py --output calls.json

Few rows, temperatures, 10% of the rows; and the host's time of one eager call, beside torch's two
calls and `torch.neg`. A graph's launch, some microseconds, is part of its time: of ten calls in a
graph each has a tenth of it.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import detlogp
from detlogp.evidence.machine import facts
from detlogp.evidence.peers import find
from detlogp.evidence.timing import events_ms, host_us
from detlogp.evidence.works import Case, make_inputs

VOCAB = 151936
TORCH = find("torch-log-softmax").load()
REPLAYS, WARM_UP = 15, 3
Call = Callable[[], object]


def graph_ms(call: Call) -> dict[str, float]:
    """Median ms of one call, by the number of calls in a graph."""
    result = {}
    for calls in (1, 10):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        times = [events_ms(graph.replay) for _ in range(WARM_UP + REPLAYS)]
        result[str(calls)] = round(statistics.median(times[WARM_UP:]) / calls, 5)
    return result


def gradient(
    forward: Callable[[], Tensor], leaf: Tensor, cotangent: Tensor | None = None
) -> Tensor:
    value = forward()
    if cotangent is None:
        cotangent = torch.ones_like(value)
    return torch.autograd.grad(value, leaf, cotangent)[0]


def few_rows(rows: int) -> dict[str, Call]:
    logits, token_ids, _ = make_inputs(Case(rows, VOCAB, torch.bfloat16), "cuda")
    return {
        f"{rows} rows, detlogp": lambda: detlogp.logp(logits, token_ids),
        f"{rows} rows, torch": lambda: TORCH(logits, token_ids),
    }


def many_rows(dtype: torch.dtype) -> dict[str, Call]:
    logits, token_ids, _ = make_inputs(Case(4096, VOCAB, dtype), "cuda")
    leaf = logits.detach().requires_grad_()
    calls: dict[str, Call] = {}
    for contract in ("locked", "exact"):
        for temperature in (1.0, 0.7):
            options: dict[str, Any] = {"contract": contract, "temperature": temperature}
            name = f"{contract}, {str(dtype)[6:]}, temperature {temperature}"
            calls[f"{name}, forward"] = partial(detlogp.logp, logits, token_ids, **options)
            forward = partial(detlogp.logp, leaf, token_ids, **options)
            calls[f"{name}, forward + backward"] = partial(gradient, forward, leaf)
    chosen = torch.rand(len(token_ids), device="cuda") < 0.1
    some = f"locked, {str(dtype)[6:]}, {int(chosen.sum())} of 4096 rows, forward"
    calls[some] = partial(detlogp.logp, logits, token_ids, rows=chosen)
    return calls


def host_times() -> dict[str, float]:
    """Microseconds of the host, 64 x 1000 bfloat16. PyTorch hands a backward to a thread of the
    device, unless it is told to use the caller's."""
    logits, token_ids, _ = make_inputs(Case(64, 1000, torch.bfloat16), "cuda")
    leaf = logits.detach().requires_grad_()
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "detlogp": lambda x: detlogp.logp(x, token_ids),
        "torch": lambda x: TORCH(x, token_ids),
        "torch.neg": torch.neg,
    }
    both: dict[str, Call] = {}
    for name, forward in forwards.items():
        cotangent = torch.ones_like(forward(logits))
        both[name] = partial(gradient, partial(forward, leaf), leaf, cotangent)
    with torch.autograd.set_multithreading_enabled(False):
        on_caller = host_us(both, "cuda")
    times = {
        "forward": host_us({n: partial(f, logits) for n, f in forwards.items()}, "cuda"),
        "forward + backward": host_us(both, "cuda"),
        "forward + backward, the caller's thread": on_caller,
    }
    return {f"{n}, {what}": us for what, found in times.items() for n, us in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console()
    scratch = torch.zeros(1, device="cuda")
    times = {"an addition to one number": graph_ms(lambda: scratch.add_(1))}
    dtypes = (torch.bfloat16, torch.float32)
    cases = [partial(few_rows, n) for n in (1, 16, 64)] + [partial(many_rows, d) for d in dtypes]
    for make in cases:
        for name, call in make().items():
            times[name] = graph_ms(call)
            console.print(name, times[name])
        torch.cuda.empty_cache()
    host = host_times()
    console.print("host, us a call", host)
    if options.output is not None:
        record = {"graph_ms": times, "host_us": host, "machine": facts("cuda:0")}
        options.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
