"""weighted_log: p log p of each row, in the arithmetic's dtype; 0 where p is 0.

    q[v] = p[v] log p[v], log p[v] = (x[v] - m) - log(s)
    dq[v] = (q[v] + p[v]) (dx[v] - sum_w p[w] dx[w])          because d log p = dx - sum_w p dx

The entropy is made of it, H = -sum_v q[v]. Since sum_v p d log p = 0,

    dH = -sum_v q (dx - sum_w p dx) = -sum_v (q[v] + H p[v]) dx[v]

whose gradient and tangent are written here with primitives, so that their derivatives follow.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp._guards import call
from detlogp._native import probability_op
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.probability import probability
from detlogp.primitives.row_expand import row_expand
from detlogp.primitives.row_sum import row_sum
from detlogp.primitives.rows import Rows, kept_rows, widen


class WeightedLog(Primitive):
    """Rows -> [..., V]. m and log(s) are constants here: the rule accounts for them."""

    @staticmethod
    def forward(*args: Any) -> Any:
        rows = Rows(*args).contiguous()
        p = call(probability_op, *rows.tensors, *rows.place)
        below_max = rows.logits.to(p.dtype) - rows.row_max.unsqueeze(-1)
        q = p * (below_max - rows.log_sum.to(p.dtype).unsqueeze(-1))
        return torch.where(p == 0, p, q)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.part = inputs[5]
        keep(ctx, *inputs[:5], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 6
        rows, q = kept_rows(ctx, ctx.saved_tensors)
        # The transpose of dx -> (q + p)(dx - sum p dx).
        p = probability(rows)
        weighted = widen(rows, grad) * (q + p)
        total = row_expand(row_sum(weighted, rows.columns), rows.columns)
        return (weighted - p * total).to(rows.logits.dtype), *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as saved:
            rows, q = kept_rows(ctx, saved)
            p = probability(rows)
            dx = widen(rows, tangent)
            mean = row_expand(row_sum(p * dx, rows.columns), rows.columns)
            return (q + p) * (dx - mean)


def weighted_log(rows: Rows) -> Tensor:
    result: Tensor = WeightedLog.apply(*rows)
    return result


def _direction(rows: Rows) -> Tensor:
    """-(q + H p), [..., V]: the gradient of the entropy."""
    q = weighted_log(rows)
    entropy = -row_sum(q, rows.columns)
    return -(q + probability(rows) * row_expand(entropy, rows.columns))


def entropy_gradient(rows: Rows, grad: Tensor) -> Tensor:
    """The entropy's vjp, [..., V] of logits' dtype; 0 in the rows that are not scored."""
    spread = row_expand(grad.to(rows.row_max.dtype), rows.columns)
    return widen(rows, spread * _direction(rows)).to(rows.logits.dtype)


def entropy_tangent(rows: Rows, dx: Tensor) -> Tensor:
    """The entropy's jvp, [...], in the arithmetic's dtype; 0 in the rows that are not scored."""
    return row_sum(widen(rows, dx) * widen(rows, _direction(rows)), rows.columns)
