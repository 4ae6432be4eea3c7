"""Log-probabilities of tokens where every process has a part of the vocabulary."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from torch import distributed as dist

from detlogp import _checks
from detlogp._agreement import Claim, agree, check_same_vectors
from detlogp.functional import LogpResult, exact_number
from detlogp.primitives.score import ScorePart

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(TypedDict, total=False):
        vocab_size: int | None
        group: dist.ProcessGroup | None
        rows: Tensor | None
        dtype: torch.dtype | None
        on_invalid: str
        validate: bool


@overload
def logp(
    logits_shard: Tensor,
    token_ids: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: "Unpack[_Options]",
) -> Tensor: ...


@overload
def logp(
    logits_shard: Tensor,
    token_ids: Tensor,
    *,
    return_lse: Literal[True],
    **options: "Unpack[_Options]",
) -> LogpResult: ...


@overload
def logp(
    logits_shard: Tensor,
    token_ids: Tensor,
    *,
    return_lse: bool,
    **options: "Unpack[_Options]",
) -> Tensor | LogpResult: ...


def logp(
    logits_shard: Tensor,
    token_ids: Tensor,
    *,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    rows: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    on_invalid: str = "zero",
    validate: bool = False,
) -> Tensor | LogpResult:
    """`detlogp.logp` with `contract="exact"` of rows whose columns are shared by a group.

    The shards follow each other in the order of the group's ranks. Value, lse and gradient have
    the bits of one process that has whole rows, whatever the number of processes and the widths of
    their shards; derivatives of every order have the same bits under any split.

    A call communicates twice, O(N): the largest of int32 keys, of a row's max and its target, and
    the sum of an int64. A backward does not; a jvp, and each row sum of further orders, does as
    often. All processes must make the same calls in the same order.

    Args:
        logits_shard: [..., W], float16, bfloat16 or float32 (float64 with a `dtype`), this
            process's columns; W may differ between processes and may be 0. Columns from
            `vocab_size` on are padding: they are not read, and have the gradient 0; padding is
            less than the narrowest shard, or equal shards are padded to a multiple of up to 128. Or
            a DTensor that one mesh dimension, then the group, shards on the last dimension.
        token_ids: [...], any integer dtype, ids of the whole vocabulary, the same on every
            process, as are `rows` and every argument below.
        vocab_size: columns of whole rows, padding left out. A DTensor has one of its own.
        group: the processes that share the rows. Default: all.
        rows, dtype, return_lse, on_invalid: as for `detlogp.logp`; float32 arithmetic alone.
        validate: check at this call that the processes agree, on token ids and rows too.
            Synchronises. Without it widths, shapes, dtypes and options are compared at the
            first call of a group with a vocab_size, and nothing after.

    Returns:
        logp [...], in nats, or LogpResult(logp, lse), the same on every process. The backward
        takes the same cotangents on every process, and gives each the gradient of its shard.

    Raises:
        ValueError, TypeError: as `detlogp.logp`. Where the processes compare, all of them raise:
            for widths that do not add up to vocab_size (gathered logits in place of a shard), and
            where processes disagree. Later a bad argument raises on its own process alone.
        NotImplementedError: inside torch.compile, or under torch.func.linearize.

    Source: the exact contract (docs/exact.md): its sums are integers, so that they have no order.
    """
    if torch.compiler.is_compiling() or _is_traced():
        raise NotImplementedError(
            "detlogp.parallel.logp: not in a compiled or traced function, nor under "
            "torch.func.linearize, which traces"
        )
    options = (dtype, return_lse, on_invalid, rows is not None)
    place = None
    if _is_dtensor(logits_shard):
        logits_shard, vocab_size, group, place = _of_dtensor(logits_shard)
    group = _checked_group(group)
    # A refusal is raised after the processes have compared, so that all of them hear of it.
    refusal: Exception | None = None
    vectors: dict[str, Tensor] = {}
    claim = Claim(vocab_size=vocab_size if isinstance(vocab_size, int) else 0)
    try:
        if place not in (None, dist.get_rank(group)):
            raise ValueError(
                "logits_shard, a DTensor, must have a mesh whose processes are in the order of "
                f"their ranks, got place {place} for rank {dist.get_rank(group)} of the group"
            )
        vocab_size = _checked_vocab_size(vocab_size)
        number = exact_number(logits_shard, dtype)
        vectors = _vectors(logits_shard, token_ids, rows, vocab_size, on_invalid)
        leading = tuple(logits_shard.shape[:-1])
        claim = Claim(logits_shard.shape[-1], vocab_size, leading, logits_shard.dtype, options)
    except (TypeError, ValueError) as error:
        refusal = error
        claim = replace(claim, error=f"{type(error).__name__}: {error}")
    try:
        columns = agree(group, claim, getattr(logits_shard, "device", None), validate)
    except ValueError as error:
        raise refusal or error from None
    if validate:
        check_same_vectors(group, vectors)
    shard = logits_shard
    if columns.count < shard.shape[-1]:
        shard = shard[..., : columns.count]  # without padding
    args: tuple[Any, ...] = (vectors["token_ids"], vectors.get("rows"), columns, number, number)
    value, lse, _, _ = ScorePart.apply(shard, *args, on_invalid == "nan")
    return LogpResult(value, lse) if return_lse else value


def _vectors(
    logits_shard: Tensor, token_ids: Tensor, rows: Tensor | None, vocab_size: int, on_invalid: str
) -> dict[str, Tensor]:
    """The ids, and the mask if there is one, contiguous."""
    _checks.check_choice("on_invalid", on_invalid, _checks.ON_INVALID)
    ids = _checks.to_ids(token_ids)
    _checks.check_placement(logits_shard, ids, "logits_shard")
    mask = None if rows is None else _checks.to_mask(rows, logits_shard)
    if on_invalid == "raise":
        _checks.check_ids_in_range(ids, mask, vocab_size)
    return {"token_ids": ids} | ({} if mask is None else {"rows": mask})


def _checked_vocab_size(vocab_size: int | None) -> int:
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        raise TypeError(f"vocab_size must be an int, got {type(vocab_size).__name__}")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
    return vocab_size


def _checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group must be of an initialized torch.distributed, which this is not")
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup) or dist.get_rank(chosen) < 0:
        raise ValueError(f"group must be one that this process belongs to, got {group!r}")
    return chosen


def _is_traced() -> bool:
    """Whether make_fx records the operators: it would take what they write into for constants."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


# ---- DTensor -------------------------------------------------------------------------------------


def _is_dtensor(logits: object) -> bool:
    # Its module takes long to import, and whoever has one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(logits, module.DTensor)


def _of_dtensor(logits: Any) -> tuple[Tensor, int, dist.ProcessGroup, int]:
    """The local tensor, the columns of whole rows, the group that shares them, and which of the
    shards this is."""
    last = logits.dim() - 1
    dims = [d for d, placement in enumerate(logits.placements) if placement.is_shard(last)]
    partial = any(placement.is_partial() for placement in logits.placements)
    if len(dims) != 1 or partial or type(logits.placements[dims[0]]).__name__ != "Shard":
        raise ValueError(
            "logits_shard, a DTensor, must be sharded on the last dimension by one mesh "
            f"dimension, got placements {logits.placements}"
        )
    mesh = logits.device_mesh
    coordinate = mesh.get_coordinate()
    # A process outside the mesh is outside its group, which is refused.
    place = -1 if coordinate is None else coordinate[dims[0]]
    return logits.to_local(), logits.shape[last], mesh.get_group(dims[0]), place
