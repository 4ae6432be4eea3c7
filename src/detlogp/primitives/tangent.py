"""tangent: one level of forward mode, fused; and its own derivatives.

    lse_tangent = sum_v p dx      logp_tangent = dx[t] - lse_tangent

It is linear in dx, and its transpose there is the gradient. vjp at (a, b), with e = sum_v p dx:

    grad_dx = gradient(a, b)      grad_logits = (b - a) p (dx - e)

jvp along (y, ddx), y the tangent of the logits:

    d lse_tangent = sum_v p ddx + sum_v p (y - sum_w p y) dx
    d logp_tangent = ddx[t] - d lse_tangent
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import logp_tangent_op
from detlogp.primitives import _exact
from detlogp.primitives._function import Primitive, pushing
from detlogp.primitives.gradient import gradient
from detlogp.primitives.probability import centered, probability
from detlogp.primitives.row_sum import row_sum
from detlogp.primitives.rows import Rows, keep_rows, kept_rows, widen
from detlogp.primitives.second_order import second_order


class Tangent(Primitive):
    """Rows, dx [..., V] of logits' dtype -> logp_tangent [...], lse_tangent [...]."""

    @staticmethod
    def forward(*args: Any) -> Any:
        rows, dx = Rows(*args[:6]).contiguous(), args[6]
        if not rows.columns.is_exact:
            return call(logp_tangent_op, *rows.tensors, dx)
        of_lse = _exact.row_sum(dx, rows.columns, rows)
        of_target = _exact.at_target(dx, rows.token_ids, rows.mask, rows.columns)
        return of_target.to(of_lse.dtype) - of_lse, of_lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep_rows(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        rows, dx = kept_rows(ctx, ctx.saved_tensors)
        grad_logits, _, _ = second_order(rows, a, b, dx)
        return grad_logits, *(None,) * 5, gradient(rows, a, b)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        y, ddx = tangents[0], tangents[6]
        with pushing(ctx) as saved:
            rows, dx = kept_rows(ctx, saved)
            if ddx is None:
                of_logp = of_lse = rows.row_max.new_zeros(rows.row_max.shape)
            else:
                of_logp, of_lse = tangent(rows, ddx)
            if y is not None:
                p = probability(rows)
                dp = centered(p, widen(rows, y), rows.columns)
                more = row_sum(dp * widen(rows, dx), rows.columns)
                of_logp, of_lse = of_logp - more, of_lse + more
            return of_logp, of_lse


def tangent(rows: Rows, dx: Tensor) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = Tangent.apply(*rows, dx)
    return result
