"""probability: the softmax p of each row, in the arithmetic's dtype; 0 in rows that are not scored.

    p[v] = exp((x[v] - m) - log(s))
    dp[v] = p[v] (dx[v] - sum_w p[w] dx[w])

The derivative's matrix, diag(p) - p p^T, is symmetric: the transpose is the same formula. It is
written with p itself, the saved output, so that its own derivatives follow from this rule again.
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import probability_op
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.columns import Columns
from detlogp.primitives.row_expand import row_expand
from detlogp.primitives.row_sum import row_sum
from detlogp.primitives.rows import Rows, kept_rows, widen


def centered(p: Tensor, u: Tensor, columns: Columns) -> Tensor:
    """p (u - sum_v p u), [..., V]; both in the arithmetic's dtype."""
    return p * (u - row_expand(row_sum(p * u, columns), columns))


class Probability(Primitive):
    """Rows -> [..., V]. m and log(s) are constants here: the rule accounts for them."""

    @staticmethod
    def forward(*rows: Any) -> Any:
        chosen = Rows(*rows).contiguous()
        return call(probability_op, *chosen.tensors, *chosen.place)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.part = inputs[5]
        keep(ctx, *inputs[:5], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 6
        rows, p = kept_rows(ctx, ctx.saved_tensors)
        grad_logits = centered(p, widen(rows, grad), rows.columns).to(rows.logits.dtype)
        return grad_logits, *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as saved:
            rows, p = kept_rows(ctx, saved)
            return centered(p, widen(rows, tangent), rows.columns)


def probability(rows: Rows) -> Tensor:
    result: Tensor = Probability.apply(*rows)
    return result
