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
from detlogp.primitives.row_expand import row_expand
from detlogp.primitives.row_sum import row_sum
from detlogp.primitives.rows import Rows, widen


def centered(p: Tensor, u: Tensor) -> Tensor:
    """p (u - sum_v p u), [..., V]; both in the arithmetic's dtype."""
    return p * (u - row_expand(row_sum(p * u), p.shape[-1]))


class Probability(Primitive):
    """Rows -> [..., V]. m and log(s) are constants here: the rule accounts for them."""

    @staticmethod
    def forward(*rows: Any) -> Any:
        return call(probability_op, *Rows(*rows).contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, *inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * 5
        *rows, p = ctx.saved_tensors
        grad_logits = centered(p, widen(Rows(*rows), grad)).to(rows[0].dtype)
        return grad_logits, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (*rows, p):
            return centered(p, widen(Rows(*rows), tangent))


def probability(rows: Rows) -> Tensor:
    result: Tensor = Probability.apply(*rows)  # type: ignore[no-untyped-call]
    return result
