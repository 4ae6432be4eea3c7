"""second_order: the vjp of the gradient at a cotangent u, fused; and its own derivatives.

With c = grad_lse - grad_logp and e = sum_v p u,

    of_logits = c p (u - e)      of_grad_logp = u[t] - e      of_grad_lse = e

The matrix c (diag(p) - p p^T) is symmetric, so of_logits is also the tangent of the gradient along
u: one kernel serves reverse over reverse and forward over reverse.

jvp along (dx, dc, du), with dp = p (dx - sum_v p dx):

    de = sum_v dp u + sum_v p du
    d of_logits = dc p (u - e) + c (dp (u - e) + p (du - de))
    d of_grad_logp = du[t] - de      d of_grad_lse = de

vjp at (w, a, b), from L = sum_v w c p (u - e) + a (u[t] - e) + b e, with dL/de = q:

    q = b - a - c sum_v p w
    grad_u = c p w + a onehot + q p
    grad_c = sum_v w p (u - e)
    grad_p = c w (u - e) + q u, and through p's own rule, grad_x = p (grad_p - sum_v p grad_p)
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import logp_second_order_op
from detlogp.primitives import _exact
from detlogp.primitives._function import Primitive, contiguous, pushing
from detlogp.primitives.gather import gather
from detlogp.primitives.probability import centered, probability
from detlogp.primitives.row_expand import row_expand
from detlogp.primitives.row_sum import row_sum
from detlogp.primitives.rows import Rows, difference, keep_rows, kept_rows, widen
from detlogp.primitives.scatter import scatter


class SecondOrder(Primitive):
    """Rows, grad_logp [...] or None, grad_lse [...] or None, u [..., V] of logits' dtype."""

    @staticmethod
    def forward(*args: Any) -> Any:
        rows, u = Rows(*args[:6]).contiguous(), args[8]
        grads = map(contiguous, args[6:8])
        if not rows.columns.is_exact:
            return call(logp_second_order_op, *rows.tensors, *grads, u)
        mean = _exact.row_sum(u, rows.columns, rows)
        terms = (*rows.tensors, *grads, u, mean)
        of_logits, _, _ = call(logp_second_order_op, *terms, *rows.place)
        of_target = _exact.at_target(u, rows.token_ids, rows.mask, rows.columns)
        return of_logits, of_target.to(mean.dtype) - mean, mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep_rows(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, w: Tensor | None, a: Tensor | None, b: Tensor | None) -> Any:
        rows, grad_logp, grad_lse, u = kept_rows(ctx, ctx.saved_tensors)
        columns = rows.columns
        p = probability(rows)
        wide_u = widen(rows, u)
        q = difference(rows, a, b)
        grad_x = grad_u = grad_c = None
        if w is not None:
            c = difference(rows, grad_logp, grad_lse)
            wide_w = widen(rows, w)
            q = q - c * row_sum(p * wide_w, columns)
            mean = row_sum(p * wide_u, columns)
            apart = wide_w * (wide_u - row_expand(mean, columns))
            grad_c = row_sum(p * apart, columns)
            grad_x = row_expand(c, columns) * apart
            grad_u = row_expand(c, columns) * (p * wide_w)
        of_e = row_expand(q, columns)
        grad_x = of_e * wide_u if grad_x is None else grad_x + of_e * wide_u
        grad_u = of_e * p if grad_u is None else grad_u + of_e * p
        if a is not None:
            grad_u = grad_u + scatter(a, rows.token_ids, rows.mask, columns)
        grad_logits = centered(p, grad_x, columns).to(rows.logits.dtype)
        of_grad_logp = None if grad_c is None or grad_logp is None else -grad_c
        of_grad_lse = None if grad_lse is None else grad_c
        return grad_logits, *(None,) * 5, of_grad_logp, of_grad_lse, grad_u.to(u.dtype)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        dx, d_logp, d_lse, du = tangents[0], *tangents[6:]
        with pushing(ctx) as saved:
            rows, grad_logp, grad_lse, u = kept_rows(ctx, saved)
            columns = rows.columns
            p = probability(rows)
            wide = widen(rows, u)
            apart = wide - row_expand(row_sum(p * wide, columns), columns)
            c = row_expand(difference(rows, grad_logp, grad_lse), columns)
            de = rows.row_max.new_zeros(rows.row_max.shape)
            of_logits = row_expand(difference(rows, d_logp, d_lse), columns) * (p * apart)
            of_logp = de
            if du is not None:
                wide_du = widen(rows, du)
                de = de + row_sum(p * wide_du, columns)
                of_logits = of_logits + c * (p * wide_du)
                of_logp = gather(wide_du, rows.token_ids, rows.mask, columns)
            if dx is not None:
                dp = centered(p, widen(rows, dx), columns)
                de = de + row_sum(dp * wide, columns)
                of_logits = of_logits + c * (dp * apart)
            of_logits = of_logits - c * (p * row_expand(de, columns))
            return of_logits.to(rows.logits.dtype), of_logp - de, de


def second_order(
    rows: Rows, grad_logp: Tensor | None, grad_lse: Tensor | None, u: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(of_logits [..., V], of_grad_logp [...], of_grad_lse [...])."""
    result: tuple[Tensor, Tensor, Tensor]
    result = SecondOrder.apply(*rows, grad_logp, grad_lse, u)
    return result
