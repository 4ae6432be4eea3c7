"""TRL: its trainers' log-probabilities and entropies by detlogp.

TRL scores tokens in two ways, and both are replaced. GRPO, RLOO, DPO, KTO and SFT run the model's
head inside `ChunkedLogProbFunction` (through `add_fused_lm_head`); experimental trainers call
`selective_log_softmax`, its variant with the entropy, and `entropy_from_logits` with logits. The
other statistics stay TRL's own.

Source: trl 1.16.0, trl/trainer/utils.py and trl/kernels/chunked_logprob.py.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import detlogp
from detlogp.integrations._patch import (
    Patch,
    Patcher,
    Undo,
    check_parameters,
    entropy_of,
    exchange,
    refers_to,
)

# Rows of logits that exist at once, as in TRL's kernel.
TILE_ROWS = 4096

_SELECTIVE = ("logits", "index", "temperature", "row_mask")
_WITH_ENTROPY = ("logits", "index", "entropy_requires_grad", "temperature", "row_mask")
_ENTROPY = ("logits", "chunk_size")
_CHUNKED = (
    *("ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size"),
    *("final_logit_softcapping", "logit_scale", "outputs"),
)
_STATISTICS = ("log_sum_sq_probs", "mean_logits", "is_top1")


def enable() -> Patch:
    """Makes TRL score tokens with detlogp until the returned Patch is undone.

    Trainers that exist already are included: TRL looks the functions up at every call. An id
    outside [0, V) gives NaN. Log-probabilities of half-precision logits are float32.

    Raises:
        ImportError: TRL is not installed.
        RuntimeError: this TRL's trainers score tokens in a way that detlogp does not know.
    """
    return _patcher.enable()


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """TRL's function of this name, by `detlogp.logp`.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64.
        index: [...] or [..., K], ids.
        temperature: the logits are divided by it, in float32 at least.
        row_mask: of index's shape; where it is 0 the result and its gradient are 0.

    Returns:
        Of index's shape; float64 for float64 logits, otherwise float32. NaN for an id outside
        [0, V).

    Raises: ValueError, for a temperature that is not positive; what `detlogp.logp` raises.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = None if row_mask is None else row_mask != 0
    if rows is None or index.dim() == logits.dim() - 1:
        return detlogp.logp(logits, index, rows=rows, temperature=temperature, on_invalid="nan")
    # The mask is of the ids here: a row counts where one of its ids does.
    some = rows.any(-1)
    values = detlogp.logp(logits, index, rows=some, temperature=temperature, on_invalid="nan")
    return values.masked_fill(~rows, 0.0)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """TRL's function of this name: both from one read of the row, by `detlogp.logp`.

    Args, Returns, Raises: as `selective_log_softmax`, of index [...]; and the entropy of each row,
    of the same dtype, 0 where row_mask is 0, or where the id is outside [0, V).
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    rows = None if row_mask is None else row_mask != 0
    found = detlogp.logp(
        logits,
        index,
        rows=rows,
        temperature=temperature,
        return_entropy=True,
        on_invalid="nan",
    )
    return found.logp, found.entropy if entropy_requires_grad else found.entropy.detach()


def _entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    return entropy_of(logits)


class _ChunkedLogProb:
    """In place of TRL's autograd function of the head: the same arguments and results.

    The logits of TILE_ROWS rows exist at a time; the backward computes them again. Statistics
    beyond the entropy come from TRL's own function, which runs the head once more for them.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(
        self,
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", *_STATISTICS),
    ) -> tuple[Tensor | None, ...]:
        if hasattr(weight, "ds_id"):
            raise NotImplementedError("the head's weight is partitioned by DeepSpeed ZeRO-3")
        transform = (temperature, final_logit_softcapping, logit_scale)
        tiles = zip(hidden.split(TILE_ROWS), targets.split(TILE_ROWS), strict=True)
        # Nothing in a tile is random.
        once_more = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        with_entropy = "entropy" in outputs
        head = (weight, bias, *transform, with_entropy)
        results = [once_more(_score_tile, *tile, *head) for tile in tiles]
        values, entropies = zip(*results, strict=True)
        others: tuple[Tensor | None, ...] = (None,) * len(_STATISTICS)
        asked = tuple(name for name in outputs if name in _STATISTICS)
        if asked:
            arguments = (hidden, weight, bias, targets, temperature, chunk_size)
            others = self._original.apply(*arguments, *transform[1:], asked)[2:]
        return torch.cat(values), torch.cat(entropies) if with_entropy else None, *others


def _score_tile(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    # The head may be kept in another dtype than what comes in; under autocast `linear` casts both.
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias)
    if scale != 1.0:
        logits = _at_least_float32(logits) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(_at_least_float32(logits) / softcap)
    if not with_entropy:
        return detlogp.logp(logits, targets, temperature=temperature, on_invalid="nan"), None
    found = detlogp.logp(
        logits, targets, temperature=temperature, return_entropy=True, on_invalid="nan"
    )
    return found.logp, found.entropy


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _apply() -> Undo:
    utils = importlib.import_module("trl.trainer.utils")
    grpo = importlib.import_module("trl.trainer.grpo_trainer")
    selective = getattr(utils, "selective_log_softmax", None)
    with_entropy = getattr(utils, "selective_log_softmax_and_entropy", None)
    entropy = getattr(utils, "entropy_from_logits", None)
    chunked = getattr(utils, "_ChunkedLogProbFunction", None)
    where = f"trl {importlib.import_module('trl').__version__}, trl.trainer.utils"
    check_parameters(f"{where}.selective_log_softmax", selective, _SELECTIVE)
    check_parameters(f"{where}.selective_log_softmax_and_entropy", with_entropy, _WITH_ENTROPY)
    check_parameters(f"{where}.entropy_from_logits", entropy, _ENTROPY)
    forward = getattr(chunked, "forward", None)
    check_parameters(f"{where}._ChunkedLogProbFunction.forward", forward, _CHUNKED)
    head = getattr(grpo, "add_fused_lm_head", None)
    if not refers_to(head, "_ChunkedLogProbFunction"):
        raise RuntimeError(
            f"{where}: GRPOTrainer was expected to score tokens through add_fused_lm_head and "
            "_ChunkedLogProbFunction, and does not; detlogp has changed nothing"
        )
    pairs = [
        (selective, selective_log_softmax),
        (with_entropy, selective_log_softmax_and_entropy),
        (entropy, _entropy_from_logits),
        (chunked, _ChunkedLogProb(chunked)),
    ]
    return exchange("trl", pairs)


_patcher = Patcher(_apply)
