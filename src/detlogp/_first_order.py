"""Ordinary training: the first derivative in reverse mode, by one fused kernel.

    d logp[r] = dx[r, t] - sum_v p[r, v] dx[r, v]
    d lse[r]  =            sum_v p[r, v] dx[r, v]

so that the gradient of a row is grad_logp (onehot(t) - p) + grad_lse p, where
p = exp((x - m) - log(s)). The logits, m and log(s) are kept; no [N, V] tensor is made besides the
gradient. A Function apart from primitives/score.py, because it costs half as much to call, and
because torch.compile takes a Function without a jvp rule alone.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp._checks import overlaps_itself, shape_text, share_storage
from detlogp._guards import call
from detlogp._native import (
    logp_backward_inplace_op,
    logp_backward_op,
    logp_with_entropy_op,
    logp_with_stats_op,
)
from detlogp.primitives._function import is_batched, is_plain
from detlogp.primitives.gradient import gradient
from detlogp.primitives.rows import Rows
from detlogp.primitives.weighted_log import entropy_gradient


class FirstOrder(torch.autograd.Function):
    """logp and lse [...] of the operator `logp_with_stats`, whose arguments it takes.

    With a temperature at the end, logp, lse and entropy of `logp_with_entropy`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, mask: Any, *options: Any) -> Any:
        ctx.temperature = options[4] if len(options) > 4 else None
        gap = None
        if ctx.temperature is None:
            outputs = call(logp_with_stats_op, logits, token_ids, mask, *options)
        else:
            *outputs, gap = call(logp_with_entropy_op, logits, token_ids, mask, *options)
        *results, row_max, log_sum = outputs
        ctx.save_for_backward(logits, token_ids, mask, row_max, log_sum, gap)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *saved, gap = ctx.saved_tensors
        grads = _cast(saved[3].dtype, *grads)
        if torch.compiler.is_compiling() or is_plain():
            more = _entropy_arguments(gap, grads, ctx.temperature)
            whole = (0, None) if more else ()  # of a part of the columns
            grad_logits = call(logp_backward_op, *saved, *_contiguous(grads[:2]), *whole, *more)
        else:
            # create_graph, or is_grads_batched, which maps over the cotangents.
            grad_logits = _differentiable_gradient(Rows(*saved), ctx.temperature, *grads)
        return grad_logits, *(None,) * (6 if ctx.temperature is None else 7)


def tempered(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """logits / temperature in `dtype`, with the kernels' bits; the logits where it is 1."""
    if temperature == 1.0:
        return logits
    # On the logits' device: by a number of the host CUDA's division is a product.
    divisor = torch.full((), temperature, dtype=dtype, device=logits.device)
    return logits.to(dtype) / divisor


def _differentiable_gradient(
    rows: Rows,
    temperature: float | None,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None = None,
) -> Tensor:
    chosen = 1.0 if temperature is None else temperature
    dtype = rows.row_max.dtype
    scaled = rows._replace(logits=tempered(rows.logits, chosen, dtype))
    result = gradient(scaled, grad_logp, grad_lse)
    if grad_entropy is not None:
        result = result + entropy_gradient(scaled, grad_entropy)
    return tempered(result, chosen, dtype).to(rows.logits.dtype)


def _cast(dtype: torch.dtype, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    # Asked first, because `to` costs a microsecond where it has nothing to do.
    return tuple(g if g is None or g.dtype is dtype else g.to(dtype) for g in grads)


def _contiguous(grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if grad is None else grad.contiguous() for grad in grads]


def _entropy_arguments(
    gap: Tensor | None, grads: tuple[Tensor | None, ...], temperature: float | None
) -> tuple[Any, ...]:
    """What the backward's operators are told beyond the plain rows."""
    return () if temperature is None else (gap, *_contiguous(grads[2:]), temperature)


class InPlace(FirstOrder):
    """FirstOrder whose gradient overwrites the logits' storage."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *args: Any) -> Any:
        ctx.logits = logits  # the caller's tensor: what is saved for the backward is another one
        return FirstOrder.forward(ctx, logits, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *saved, gap = ctx.saved_tensors  # raises when the logits were written to since
        logits = saved[0]
        batched = any(grad is not None and is_batched(grad) for grad in grads)
        if batched or not is_plain():
            raise NotImplementedError(
                "inplace_backward: create_graph and is_grads_batched need the logits again; "
                "call detlogp.logp without inplace_backward"
            )
        check_grad_is_not_retained(ctx.logits)
        # A cotangent in the logits' memory would be overwritten while it is read.
        own = tuple(
            grad.clone() if grad is not None and share_storage(grad, logits) else grad
            for grad in _cast(saved[3].dtype, *grads)
        )
        with torch.enable_grad():
            Overwritten.apply(ctx.logits)  # type: ignore[no-untyped-call]
        ctx.logits = None
        more = _entropy_arguments(gap, own, ctx.temperature)
        call(logp_backward_inplace_op, *saved, *_contiguous(own[:2]), *more)
        result = logits.detach()
        # While somebody else holds it, a leaf that it reaches as it is takes a copy: `.grad` of a
        # leaf must not lie in the memory of the logits.
        held = [result]
        torch.autograd.Variable._execution_engine.queue_callback(held.clear)
        return result, *(None,) * (6 if ctx.temperature is None else 7)


class Overwritten(torch.autograd.Function):
    """Tells autograd that a tensor was written to, and lets no gradient pass to what it was.

    A node that has saved the tensor raises in its backward, since the tensor's version has changed;
    a node that is made of it later raises there.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            "logits were overwritten by their gradient (detlogp.logp with inplace_backward=True), "
            "and what was computed from them since has no derivative"
        )


def check_grad_is_not_retained(logits: Tensor) -> None:
    base = logits._base
    if logits.retains_grad or (base is not None and base.retains_grad):
        raise ValueError("logits must not retain their gradient where inplace_backward=True")


def check_inplace_backward(logits: Tensor) -> None:
    """Whether the gradient may overwrite these logits, which require grad."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise NotImplementedError(
            "inplace_backward: not with saved-tensor hooks (torch.utils.checkpoint with "
            "use_reentrant=False, save_on_cpu), under which PyTorch does not notice an overwrite"
        )
    check_grad_is_not_retained(logits)
    base = logits._base if logits._is_view() else logits
    if base is not None and base.is_leaf:
        raise ValueError(
            "logits must be the result of an operation where inplace_backward=True, got a leaf, or "
            "a view of one: its gradient would overwrite it"
        )
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        raise ValueError(
            "logits must have adjacent columns where inplace_backward=True, "
            f"got strides {logits.stride()}"
        )
    if overlaps_itself(logits):
        raise ValueError(
            "logits must not share memory among their elements where inplace_backward=True, "
            f"got strides {logits.stride()} for {shape_text(logits)}"
        )
