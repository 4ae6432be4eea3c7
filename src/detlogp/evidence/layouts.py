"""Other ways to present the same rows. A row's result must have the same bits in each of them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]
"""logits [N, V], then whatever else there is of a row: [N], or [N, ...]."""
Index = Tensor | slice
_ALL = slice(None)
_MOST_CALLS = 64


class Call(NamedTuple):
    """One call: its rows `take` are the rows `rows` of the batch."""

    parts: Parts
    take: Index
    rows: Index


Layout = Callable[[Parts, torch.Generator], Iterator[Call]]


def repeat(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    yield Call(parts, _ALL, _ALL)


def chunks_of(size: int) -> Layout:
    """At most 64 calls, spread over the batch, each on memory of its own."""

    def chunks(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
        starts = range(0, len(parts[0]), size)
        for start in starts[:: -(-len(starts) // _MOST_CALLS)]:
            rows = slice(start, start + size)
            yield Call(tuple(part[rows].clone() for part in parts), _ALL, rows)

    return chunks


def in_larger_batch(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    count = len(parts[0])
    yield Call(tuple(torch.cat([part] * 3) for part in parts), slice(count, 2 * count), _ALL)


def rolled(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    """Every row in its neighbour's place."""
    take = torch.arange(len(parts[0]), device=parts[0].device).roll(-1)
    yield Call(tuple(part.roll(1, 0) for part in parts), take, _ALL)


def reverse(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    order = torch.arange(len(parts[0]) - 1, -1, -1, device=parts[0].device)
    yield Call(_pick(parts, order), order, _ALL)


def shuffle(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    order = torch.randperm(len(parts[0]), generator=generator).to(parts[0].device)
    yield Call(_pick(parts, order), order.argsort(), _ALL)


def padded_rows(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    longer = tuple(torch.cat([part, torch.zeros_like(part)]) for part in parts)
    yield Call(longer, slice(len(parts[0])), _ALL)


def noise_beside(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    seed = int(torch.randint(2**31, (), generator=generator))
    random = torch.Generator(parts[0].device).manual_seed(seed)
    yield _beside(parts, torch.empty_like(parts[0]).normal_(0, 100, generator=random))


def nan_beside(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    yield _beside(parts, torch.full_like(parts[0], torch.nan))


def infinity_beside(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    yield _beside(parts, torch.full_like(parts[0], torch.inf))


def misaligned(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    """The first row begins one element after a boundary of 16 bytes."""
    yield _moved(parts, _inside_larger(parts[0], parts[0].shape[1], 1))


def padded_vocab(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    """A slice of logits whose columns were padded to a multiple of 256: 152064 for 151936."""
    yield _moved(parts, _inside_larger(parts[0], (parts[0].shape[1] // 256 + 1) * 256, 0))


def odd_row_stride(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    yield _moved(parts, _inside_larger(parts[0], (parts[0].shape[1] | 1) + 2, 2))


def transposed(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    yield _moved(parts, parts[0].t().contiguous().t())


def every_third_column(parts: Parts, generator: torch.Generator) -> Iterator[Call]:
    memory = parts[0].new_full((*parts[0].shape, 3), torch.nan)
    memory[..., 1] = parts[0]
    yield _moved(parts, memory[..., 1])


LAYOUTS: dict[str, Layout] = {
    "the same call again": repeat,
    "one row at a time": chunks_of(1),
    "chunks of 7": chunks_of(7),
    "in the middle of a batch three times as large": in_larger_batch,
    "every row one place further": rolled,
    "reversed": reverse,
    "shuffled": shuffle,
    "rows of zeros behind": padded_rows,
    "noise beside each row": noise_beside,
    "NaN beside each row": nan_beside,
    "infinity beside each row": infinity_beside,
    "misaligned by one element": misaligned,
    "a slice of a padded vocabulary": padded_vocab,
    "an odd row stride": odd_row_stride,
    "transposed": transposed,
    "every third column": every_third_column,
}
# What a reinforcement-learning run needs, in the order of the audit's table.
PROPERTIES: dict[str, tuple[str, ...]] = {
    "repeat": ("the same call again",),
    "batch": ("one row at a time", "in the middle of a batch three times as large"),
    "position": ("every row one place further",),
    "chunk": ("chunks of 7",),
    "reorder": ("reversed", "shuffled"),
    "padding": ("rows of zeros behind",),
    "noise": ("noise beside each row",),
    "nan": ("NaN beside each row", "infinity beside each row"),
    "strides": (
        "a slice of a padded vocabulary",
        "an odd row stride",
        "transposed",
        "every third column",
    ),
    "alignment": ("misaligned by one element",),
}


def _pick(parts: Parts, rows: Index) -> Parts:
    return tuple(part[rows] for part in parts)


def _moved(parts: Parts, logits: Tensor) -> Call:
    return Call((logits, *parts[1:]), _ALL, _ALL)


def _beside(parts: Parts, neighbour: Tensor) -> Call:
    """The rows at even places, the neighbour's at odd ones."""
    logits = torch.stack([parts[0], neighbour], 1).flatten(0, 1)
    rest = (part.repeat_interleave(2, 0) for part in parts[1:])
    return Call((logits, *rest), slice(0, None, 2), _ALL)


def _inside_larger(logits: Tensor, row_stride: int, offset: int) -> Tensor:
    """A view of larger memory, NaN around it, that begins `offset` elements in."""
    rows, vocab = logits.shape
    memory = logits.new_full((rows * row_stride + offset,), torch.nan)
    view = memory[offset:].view(rows, row_stride)[:, :vocab]
    return view.copy_(logits)
