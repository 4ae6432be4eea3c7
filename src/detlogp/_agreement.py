"""What the processes of a group must agree on before they share the columns of rows."""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch import distributed as dist

from detlogp._checks import dtype_name, unwrap
from detlogp.primitives.columns import Columns


@dataclass(frozen=True)
class Claim:
    """What one process says of its call; `error` where its arguments are refused."""

    width: int = 0  # columns of its shard
    vocab_size: int = 0
    leading: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    options: tuple[object, ...] = ()
    error: str | None = None


# By group and vocabulary size, once all have agreed: this process's width, and its columns, which
# do not name the group, so that it can be freed.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[int, Columns]]]
_agreed = weakref.WeakKeyDictionary()


def agree(
    group: dist.ProcessGroup, claim: Claim, device: torch.device | None, validate: bool
) -> Columns:
    """This process's columns. Communicates at the first call of a group and vocabulary size.

    Raises: ValueError, on every process, where they disagree or one of them refuses; later, and
    without validate, on this process, where it refuses or its width is not that of the first call.
    """
    known = _agreed.setdefault(group, {})
    is_settled = claim.vocab_size in known if claim.vocab_size else bool(known)
    shared = group if group.size() > 1 else None
    if validate or not is_settled:
        columns = _columns(_exchange(group, claim, device), dist.get_rank(group))
        known[claim.vocab_size] = (claim.width, columns)
        return replace(columns, group=shared)
    if claim.error is not None:
        raise ValueError(claim.error)
    width, columns = known[claim.vocab_size]
    if claim.width != width:
        raise ValueError(
            f"logits_shard must have {width} columns, as at the first call of this group with "
            f"vocab_size={claim.vocab_size}, got {claim.width}; validate=True agrees anew"
        )
    return replace(columns, group=shared)


def check_same_vectors(group: dist.ProcessGroup, vectors: dict[str, Tensor]) -> None:
    """Raises ValueError on every process unless all have the same integers. Synchronises."""
    for name, vector in vectors.items():
        numbers = unwrap(vector).to(torch.int64)
        # The largest of the numbers and of their complements: these agree where all are equal.
        both = torch.stack([numbers, ~numbers])
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
        differ = both[0] != ~both[1]
        if bool(differ.any()):
            where = tuple(differ.nonzero()[0].tolist())
            raise ValueError(f"{name} must be the same on every process, but differ at {where}")


def _exchange(group: dist.ProcessGroup, claim: Claim, device: torch.device | None) -> list[Claim]:
    claims = [claim] * group.size()
    # Where the group's backend is of GPUs alone, objects travel through the current one.
    with (
        torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
    ):
        dist.all_gather_object(claims, claim, group)
    return claims


def _columns(claims: list[Claim], rank: int) -> Columns:
    """The same error on every process, or its columns: shards follow each other in rank order."""
    for other, claim in enumerate(claims):
        if claim.error is not None:
            raise ValueError(
                f"process {other} of the group was given a bad argument: {claim.error}"
            )
    first = claims[0]
    for other, claim in enumerate(claims):
        if replace(claim, width=0) != replace(first, width=0):
            raise ValueError(
                "every process of the group must be given the same vocab_size, leading shape, "
                f"dtype and options, got {_text(first)} in process 0, {_text(claim)} in {other}"
            )
    widths = [claim.width for claim in claims]
    vocab = first.vocab_size
    if not _add_up(widths, vocab):
        raise ValueError(
            f"logits_shard must be this process's share of {vocab} columns, and all shares add up "
            f"to vocab_size or its padding, got widths {widths}; were the logits gathered already?"
        )
    begin = min(sum(widths[:rank]), vocab)  # a shard may be padding alone
    count = min(widths[rank], vocab - begin)
    return Columns(count, vocab, begin, is_exact=True)


def _add_up(widths: list[int], vocab: int) -> bool:
    """To the vocabulary, or to its padding: less than the narrowest shard, or, where all are equal,
    less than a multiple of 128 for each; so that gathered logits do not pass for padding."""
    padding = sum(widths) - vocab
    narrowest = min((width for width in widths if width > 0), default=0)
    is_multiple = len(set(widths)) == 1 and narrowest < vocab
    return 0 <= padding < max(1, narrowest, 128 * len(widths) if is_multiple else 0)


def _text(claim: Claim) -> str:
    return f"{claim.vocab_size}, {claim.leading}, {dtype_name(claim.dtype)}, {claim.options}"
