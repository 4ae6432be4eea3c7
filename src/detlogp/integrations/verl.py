"""verl: `logprobs_from_logits` with its variants, and `entropy_from_logits`, by detlogp.

Vocabularies that Megatron shards (`vocab_parallel_log_probs_from_logits`) are not touched.

Source: verl 0.9.1, verl/utils/torch_functional.py.
"""

import importlib
from collections.abc import Callable
from functools import partial

from torch import Tensor

import detlogp
from detlogp.integrations._patch import (
    Patch,
    Patcher,
    Undo,
    check_parameters,
    entropy_of,
    exchange,
)

_MODULE = "verl.utils.torch_functional"


def enable() -> Patch:
    """Makes verl score tokens with detlogp until the returned Patch is undone.

    Raises:
        ImportError: verl is not installed.
        RuntimeError: a verl whose functions have other names or parameters.
    """
    return _patcher.enable()


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """verl's function of this name, and its flash-attn variant, by `detlogp.logp`.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64.
        labels: [...], ids.
        inplace_backward: as in `detlogp.logp`: the gradient overwrites the logits, and where that
            could be wrong (a leaf, saved-tensor hooks, a second derivative) it raises.

    Returns:
        [...], float64 for float64 logits, otherwise float32. NaN for a label outside [0, V).

    Raises: what `detlogp.logp` raises.
    """
    return detlogp.logp(logits, labels, on_invalid="nan", inplace_backward=inplace_backward)


def _without_inplace(logits: Tensor, labels: Tensor) -> Tensor:
    return logprobs_from_logits(logits, labels, inplace_backward=False)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """verl's function of this name, by `detlogp.logp`: one read of the row, no [N, V] tensor.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64.

    Returns:
        [...], in nats, float64 for float64 logits, otherwise float32.
    """
    return entropy_of(logits)


def _with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    return entropy_of(logits)


_OURS: dict[str, Callable[..., Tensor]] = {
    "logprobs_from_logits": logprobs_from_logits,
    "logprobs_from_logits_flash_attn": logprobs_from_logits,
    "logprobs_from_logits_torch_npu": _without_inplace,
    "logprobs_from_logits_naive": _without_inplace,
    "logprobs_from_logits_v2": _without_inplace,
    "entropy_from_logits": entropy_from_logits,
    "entropy_from_logits_with_chunking": _with_chunking,
}
_PARAMETERS: dict[Callable[..., Tensor], tuple[str, ...]] = {
    logprobs_from_logits: ("logits", "labels", "inplace_backward"),
    _without_inplace: ("logits", "labels"),
    entropy_from_logits: ("logits",),
    _with_chunking: ("logits", "chunk_size"),
}


def _apply() -> Undo:
    module = importlib.import_module(_MODULE)
    where = f"verl {importlib.import_module('verl').__version__}, {_MODULE}"
    pairs = []
    for name, ours in _OURS.items():
        theirs = getattr(module, name, None)
        check_parameters(f"{where}.{name}", theirs, _PARAMETERS[ours])
        # A partial, because each needs an object of its own.
        pairs.append((theirs, partial(ours)))
    return exchange("verl", pairs)


_patcher = Patcher(_apply)
