"""Forward and backward of a vocabulary split over processes, beside Megatron's way in torch.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \\
        benchmarks/parallel.py --device cuda

N rows whose V columns all processes share: `detlogp.parallel.logp`, and log-probabilities by
all-reduces of float32 maxima, sums and targets, as Megatron-LM computes its vocabulary-parallel
cross entropy. Times are those of the slowest process: by events on CUDA, by the
clock on the CPU. The variants take turns; the median of 20 turns after 3.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch import distributed as dist

import detlogp
from detlogp.evidence.machine import facts
from detlogp.evidence.timing import events_ms

TURNS, WARM_UP = 20, 3


class MegatronLogp(torch.autograd.Function):
    """logp [N] of shards [N, W]; keeps the shard's softmax for the backward, as Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, token_ids: Tensor, first: int) -> Tensor:
        x = shard.float()
        row_max = x.amax(-1)
        dist.all_reduce(row_max, dist.ReduceOp.MAX)
        x = x - row_max.unsqueeze(-1)
        column = token_ids - first
        is_here = (column >= 0) & (column < x.shape[-1])
        column = torch.where(is_here, column, 0)
        target = x.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~is_here, 0.0)
        dist.all_reduce(target)
        e = x.exp()
        total = e.sum(-1)
        dist.all_reduce(total)
        ctx.dtype = shard.dtype
        ctx.save_for_backward(e.div_(total.unsqueeze(-1)), column, is_here)
        return target - total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        p, column, is_here = ctx.saved_tensors
        gradient = p * -grad.unsqueeze(-1)
        gradient.scatter_add_(-1, column.unsqueeze(-1), (grad * is_here).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None


def slowest_ms(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    if device.type == "cuda":
        elapsed_ms = events_ms(call)
    else:
        start = time.perf_counter()
        call()
        elapsed_ms = (time.perf_counter() - start) * 1e3
    slowest = torch.tensor(elapsed_ms, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{rank}" if options.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    widths = [len(columns) for columns in torch.arange(options.vocab).tensor_split(count)]
    first = sum(widths[:rank])
    dtype = getattr(torch, options.dtype)
    shard = torch.randn(options.rows, widths[rank], device=device, dtype=dtype).requires_grad_()
    ids = torch.randint(options.vocab, (options.rows,), device=device)
    dist.broadcast(ids, 0)
    cotangent = torch.ones(options.rows, device=device)

    def ours() -> Tensor:
        return detlogp.parallel.logp(shard, ids, vocab_size=options.vocab)

    def megatron() -> Tensor:
        value: Tensor = MegatronLogp.apply(shard, ids, first)  # type: ignore[no-untyped-call]
        return value

    torch.testing.assert_close(ours(), megatron(), rtol=1e-4, atol=1e-4)
    variants = {"detlogp.parallel": ours, "Megatron-style": megatron}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(WARM_UP + TURNS):
        for name, run in variants.items():
            step = lambda run=run: torch.autograd.grad(run(), shard, cotangent)  # noqa: E731
            times[name].append(slowest_ms(step, device))
    medians = {name: statistics.median(taken[WARM_UP:]) for name, taken in times.items()}
    case = f"{options.rows} x {options.vocab} {options.dtype} on {count} processes"
    Console(quiet=rank > 0).print(case, {name: f"{ms:.3f} ms" for name, ms in medians.items()})
    if rank == 0 and options.output is not None:
        record = {"case": case, "median_ms": medians, "machine": facts(str(device))}
        options.output.write_text(json.dumps(record, indent=2, default=str) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
