"""Results into a supplied buffer: which buffers are refused, and the write itself.

A differentiable call computes a new vector and copies it with PyTorch's own `copy_`, so that the
buffer becomes part of the graph. Without derivatives the operator writes into the buffer.
"""

import torch
from torch import Tensor

from detlogp._checks import FLOAT_DTYPES, dtype_name, overlaps_itself, shape_text, share_storage
from detlogp._guards import call, has_tangent, in_transform
from detlogp._native import logp_out_op

_SHARED = "out must have a mapped axis of the vmap that writes it, got one buffer for all samples"


def check_out(
    out: Tensor,
    dtype: torch.dtype | None,
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor | None,
) -> None:
    if torch.compiler.is_compiling():
        raise NotImplementedError("out: a buffer is not supported inside a compiled function")
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a Tensor, got {type(out).__name__}")
    if out.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"out must be float16, bfloat16, float32 or float64, got {dtype_name(out.dtype)}"
        )
    if dtype is not None and dtype != out.dtype:
        raise ValueError(
            f"dtype must agree with out, {dtype_name(out.dtype)}, got {dtype_name(dtype)}"
        )
    if out.shape != token_ids.shape:
        whose = "token_ids' shape" if token_ids.dim() == logits.dim() else "logits' leading shape"
        raise ValueError(f"out must have {whose}, {tuple(token_ids.shape)}, got {shape_text(out)}")
    if out.device != logits.device:
        raise ValueError(f"out must be on logits' device, {logits.device}, got {out.device}")
    if overlaps_itself(out):
        raise ValueError(
            f"out must have one element a row, got strides {out.stride()} for {shape_text(out)}"
        )
    inputs = (logits, token_ids) if rows is None else (logits, token_ids, rows)
    if any(share_storage(out, tensor) for tensor in inputs):
        raise ValueError("out must not share storage with an input")
    _check_transform(out)
    if out.requires_grad:
        raise ValueError("out must not require grad; pass out.detach()")
    if has_tangent(out):
        raise ValueError("out must not carry a tangent; pass its primal")


def write_out(
    out: Tensor,
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    *options: int,
) -> tuple[Tensor, Tensor]:
    """Writes logp into `out`, of any strides; returns it, and the lse."""
    buffer = out.contiguous()
    lse, _, _ = call(logp_out_op, logits, token_ids, mask, *options, buffer)
    if buffer is out:
        # So that autograd notices when an earlier value of the buffer was saved for a backward.
        torch.autograd.graph.increment_version(out)
    else:
        out.copy_(buffer)
    return out, lse


def copy_out(out: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Copies the selected rows of a differentiable result into `out`, which joins the graph."""
    try:
        return out.copy_(value if mask is None else torch.where(mask, value, out))
    except RuntimeError as error:
        if in_transform() and "vmap" in str(error):
            raise ValueError(f"{_SHARED}: {error}") from error
        raise


def _check_transform(out: Tensor) -> None:
    """Under a transform, the buffer must belong to the innermost one."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter is None:
        return
    if torch._C._functorch.maybe_get_level(out) == interpreter.level():
        return
    if interpreter.key() == torch._C._functorch.TransformType.Vmap:
        raise ValueError(_SHARED)
    raise ValueError(
        "out must be made inside the transform that writes it, got a tensor captured from outside"
    )
