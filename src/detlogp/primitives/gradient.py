"""gradient: the first derivative of logp and lse in reverse mode, fused; and its own derivatives.

    G[v] = grad_logp (onehot[v] - p[v]) + grad_lse p[v]
         = scatter(grad_logp)[v] + c p[v],                    c = grad_lse - grad_logp

vjp at u, with e = sum_v p u (one kernel where nothing differentiates it again):

    grad_logits = c p (u - e)      grad_grad_logp = u[t] - e      grad_grad_lse = e

jvp along (dx, dgrad_logp, dgrad_lse):

    dG = scatter(dgrad_logp) + dc p + c p (dx - sum_v p dx)
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import logp_backward_op, logp_second_order_op
from detlogp.primitives._function import Primitive, is_plain, keep, pushing
from detlogp.primitives.gather import gather, scatter
from detlogp.primitives.probability import centered, probability
from detlogp.primitives.row_sum import row_expand, row_sum
from detlogp.primitives.rows import Rows, widen


def difference(rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """c = grad_lse - grad_logp, [...], where a missing one is 0."""
    if grad_lse is None:
        return rows.row_max.new_zeros(rows.row_max.shape) if grad_logp is None else -grad_logp
    return grad_lse if grad_logp is None else grad_lse - grad_logp


def second_order(
    rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The vjp of the gradient at u [..., V]: (grad_logits, grad_grad_logp, grad_grad_lse)."""
    if is_plain():
        grads = (None if g is None else g.contiguous() for g in (grad_logp, grad_lse))
        fused: tuple[Tensor, Tensor, Tensor]
        fused = call(logp_second_order_op, *rows.contiguous(), *grads, u)
        return fused
    p = probability(rows)
    wide = widen(rows, u)
    mean = row_sum(p * wide)
    c = row_expand(difference(rows, grad_logp, grad_lse), p.shape[-1])
    grad_logits = c * (p * (wide - row_expand(mean, p.shape[-1])))
    of_logp = gather(wide, rows.token_ids, rows.mask) - mean
    return grad_logits.to(rows.logits.dtype), of_logp, mean


class Gradient(Primitive):
    """Rows, grad_logp [...] or None, grad_lse [...] or None -> [..., V] of logits' dtype."""

    @staticmethod
    def forward(*args: Any) -> Any:
        rows = Rows(*args[:5]).contiguous()
        return call(
            logp_backward_op, *rows, *(g if g is None else g.contiguous() for g in args[5:])
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, u: Tensor | None) -> Any:
        if u is None:
            return (None,) * 7
        *rows, grad_logp, grad_lse = ctx.saved_tensors
        of_logits, of_logp, of_lse = second_order(Rows(*rows), grad_logp, grad_lse, u)
        of_grads = (
            None if grad is None else of_grad
            for grad, of_grad in ((grad_logp, of_logp), (grad_lse, of_lse))
        )
        return of_logits, None, None, None, None, *of_grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        dx, d_logp, d_lse = tangents[0], tangents[5], tangents[6]
        with pushing(ctx) as (*saved, grad_logp, grad_lse):
            rows = Rows(*saved)
            vocab = rows.logits.shape[-1]
            p = probability(rows)
            result = row_expand(difference(rows, d_logp, d_lse), vocab) * p
            if d_logp is not None:
                result = result + scatter(d_logp, rows.token_ids, rows.mask, vocab)
            if dx is not None:
                c = row_expand(difference(rows, grad_logp, grad_lse), vocab)
                result = result + c * centered(p, widen(rows, dx))
            return result.to(rows.logits.dtype)


def gradient(rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    result: Tensor = Gradient.apply(*rows, grad_logp, grad_lse)  # type: ignore[no-untyped-call]
    return result
