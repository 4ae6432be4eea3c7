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
from detlogp._native import logp_backward_inplace_op, logp_backward_op, logp_with_stats_op
from detlogp.primitives._function import is_plain
from detlogp.primitives.gradient import gradient
from detlogp.primitives.rows import Rows

# Of a backward with is_grads_batched, which maps over the cotangents in a way of its own.
is_batched = torch._C._functorch.is_legacy_batchedtensor


class FirstOrder(torch.autograd.Function):
    """logp [...] and lse [...] of the operator `logp_with_stats`, whose arguments it takes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, mask: Any, *options: Any) -> Any:
        logp, lse, row_max, log_sum = call(logp_with_stats_op, logits, token_ids, mask, *options)
        ctx.save_for_backward(logits, token_ids, mask, row_max, log_sum)
        ctx.set_materialize_grads(False)
        return logp, lse

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        grads = _cast(Rows(*saved), grad_logp, grad_lse)
        if torch.compiler.is_compiling() or is_plain():
            grad_logits = call(logp_backward_op, *saved, *_contiguous(grads))
        else:
            # create_graph, or is_grads_batched, which maps over the cotangents.
            grad_logits = gradient(Rows(*saved), *grads)
        return grad_logits, *(None,) * 6


def _cast(rows: Rows, *grads: Tensor | None) -> list[Tensor | None]:
    dtype = rows.row_max.dtype
    # Asked first, because `to` costs a microsecond where it has nothing to do.
    return [g if g is None or g.dtype is dtype else g.to(dtype) for g in grads]


def _contiguous(grads: list[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.contiguous() for grad in grads]


class InPlace(FirstOrder):
    """FirstOrder whose gradient overwrites the logits' storage."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *args: Any) -> Any:
        ctx.logits = logits  # the caller's tensor: what is saved for the backward is another one
        return FirstOrder.forward(ctx, logits, *args)

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Any:
        rows = Rows(*ctx.saved_tensors)  # raises when the logits were written to since
        batched = any(grad is not None and is_batched(grad) for grad in (grad_logp, grad_lse))
        if batched or not is_plain():
            raise NotImplementedError(
                "inplace_backward: create_graph and is_grads_batched need the logits again; "
                "call detlogp.logp without inplace_backward"
            )
        check_grad_is_not_retained(ctx.logits)
        vectors = _contiguous(_cast(rows, grad_logp, grad_lse))
        vectors = [
            v.clone() if v is not None and share_storage(v, rows.logits) else v for v in vectors
        ]
        with torch.enable_grad():
            Overwritten.apply(ctx.logits)  # type: ignore[no-untyped-call]
        ctx.logits = None
        call(logp_backward_inplace_op, *rows.tensors, *vectors)
        result = rows.logits.detach()
        # While somebody else holds it, a leaf that it reaches as it is takes a copy: `.grad` of a
        # leaf must not lie in the memory of the logits.
        held = [result]
        torch.autograd.Variable._execution_engine.queue_callback(held.clear)
        return result, *(None,) * 6


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
