"""A model whose last layer is split over processes by the vocabulary, trained with the bits of one.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/tensor_parallel.py

Every process has the same body and its own rows of the last layer's weights, so its own columns of
the logits. At each step the columns are also gathered, and scored as one process would: the loss
and the gradient of the logits must have the same bits. So must the loss on every process.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch import distributed as dist

import detlogp

TEXT = Path(__file__).with_name("held-out.txt")
VOCAB = 259  # bytes, and three that no text has, so that two processes get unequal parts
CONTEXT, WIDTH, ROWS, LEARNING_RATE = 8, 64, 256, 3e-3


class Spread(torch.autograd.Function):
    """The hidden states that every process multiplies by its part; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class Model(nn.Module):
    """A body that all processes share, and the part of the last layer that is this one's."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH // CONTEXT)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        whole = torch.randn(VOCAB, WIDTH) * WIDTH**-0.5
        self.part = nn.Parameter(whole[first:last].clone())

    def forward(self, contexts: Tensor) -> Tensor:
        """contexts [N, CONTEXT] -> this process's columns of the logits."""
        hidden = self.body(self.embedding(contexts).flatten(1))
        logits: Tensor = Spread.apply(hidden) @ self.part.T  # type: ignore[no-untyped-call]
        return logits


def batch_of(data: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """contexts [ROWS, CONTEXT] and the bytes that follow them; the same on every process."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - CONTEXT, (ROWS,), generator=generator).to(data.device)
    contexts = data[starts[:, None] + torch.arange(CONTEXT, device=data.device)]
    return contexts, data[starts + CONTEXT]


def loss_of_one_process(part: Tensor, widths: list[int], ids: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the gathered logits, and its gradient, with the exact contract on one process."""
    parts = [part.new_empty(len(part), width) for width in widths]
    parts[dist.get_rank()] = part.detach().contiguous()
    for rank, columns in enumerate(parts):
        dist.broadcast(columns, rank)
    logits = torch.cat(parts, -1).requires_grad_()
    loss = -detlogp.logp(logits, ids, contract="exact").mean()
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient


def train(
    model: Model, optimizer: torch.optim.Optimizer, widths: list[int], data: Tensor, steps: int
) -> list[float]:
    """The losses of every step. Exits where a bit differs from one process's."""
    rank = dist.get_rank()
    first = sum(widths[:rank])
    losses = []
    for step in track(range(steps), console=Console(quiet=rank > 0), description="training"):
        contexts, ids = batch_of(data, step)
        part = model(contexts)
        part.retain_grad()
        loss = -detlogp.parallel.logp(part, ids, vocab_size=VOCAB).mean()
        optimizer.zero_grad()
        loss.backward()
        expected, gradient = loss_of_one_process(part, widths, ids)
        here = gradient[:, first : first + widths[rank]]
        same = part.grad is not None and torch.equal(part.grad, here)
        if not same or not torch.equal(loss.detach(), expected):
            raise SystemExit(f"step {step}: {loss.item()!r} is not {expected.item()!r}")
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Over NCCL where each process has a GPU of its own.
    on_gpus = options.device == "cuda" and torch.cuda.device_count() >= count
    device = torch.device(f"cuda:{rank}" if on_gpus else options.device)
    if on_gpus:
        torch.cuda.set_device(device)
    widths = [len(columns) for columns in torch.arange(VOCAB).tensor_split(count)]
    first = sum(widths[:rank])
    torch.manual_seed(0)
    model = Model(first, first + widths[rank]).to(device)
    # Before the group is made: optimizers import torch.distributed.nn, whose default arguments are
    # the group of that moment. It would outlive destroy_process_group, and gloo's threads Python.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    data = torch.tensor(list(TEXT.read_bytes()), device=device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    losses = train(model, optimizer, widths, data, options.steps)
    seen: list[list[float]] = [[]] * count
    dist.all_gather_object(seen, losses)
    dist.destroy_process_group()
    if any(other != losses for other in seen):
        raise SystemExit("the losses of two processes differ")
    if rank == 0:
        print(
            f"{options.steps} steps on {count} processes, with {widths} columns: loss "
            f"{losses[0]:.4f} to {losses[-1]:.4f}"
        )
        print("every loss and gradient has the bits of one process")


if __name__ == "__main__":
    main()
