"""gradient: the first derivative of logp and lse in reverse mode, fused; and its own derivatives.

    G[v] = grad_logp (onehot[v] - p[v]) + grad_lse p[v]
         = scatter(grad_logp)[v] + c p[v],                    c = grad_lse - grad_logp

Its vjp at u is `second_order`, a fused kernel. Its jvp along (dx, dgrad_logp, dgrad_lse) is linear
in the cotangents, and has the same symmetric matrix in dx: both terms are fused kernels again.

    dG = gradient(dgrad_logp, dgrad_lse) + c p (dx - sum_v p dx)
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import logp_backward_op
from detlogp.primitives._function import Primitive, contiguous, pushing
from detlogp.primitives.rows import Rows, keep_rows, kept_rows
from detlogp.primitives.second_order import second_order


class Gradient(Primitive):
    """Rows, grad_logp [...] or None, grad_lse [...] or None -> [..., V] of logits' dtype."""

    @staticmethod
    def forward(*args: Any) -> Any:
        rows = Rows(*args[:6]).contiguous()
        grads = map(contiguous, args[6:])
        return call(logp_backward_op, *rows.tensors, *grads, *rows.place)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep_rows(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None) -> Any:
        if u is None:
            return (None,) * 8
        rows, grad_logp, grad_lse = kept_rows(ctx, ctx.saved_tensors)
        of_logits, of_logp, of_lse = second_order(rows, grad_logp, grad_lse, u)
        of_grads = (
            None if grad is None else of_grad
            for grad, of_grad in ((grad_logp, of_logp), (grad_lse, of_lse))
        )
        return of_logits, *(None,) * 5, *of_grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        dx, d_logp, d_lse = tangents[0], *tangents[6:]
        with pushing(ctx) as saved:
            rows, grad_logp, grad_lse = kept_rows(ctx, saved)
            if dx is None:
                return gradient(rows, d_logp, d_lse)
            along_logits, _, _ = second_order(rows, grad_logp, grad_lse, dx)
            if d_logp is None and d_lse is None:
                return along_logits
            return along_logits + gradient(rows, d_logp, d_lse)


def gradient(rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    result: Tensor = Gradient.apply(*rows, grad_logp, grad_lse)
    return result
