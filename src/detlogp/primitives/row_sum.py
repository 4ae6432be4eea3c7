"""row_sum: [..., V] -> [...], in the locked order; and row_expand, its transpose.

Both are linear, so each is its own tangent, and the other its own transpose:

    row_sum(a)[r] = sum_v a[r, v]        row_expand(b)[r, v] = b[r]
"""

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from detlogp._guards import call
from detlogp._native import row_sum_op
from detlogp.primitives._function import Primitive, pushing


class RowSum(Primitive):
    """values [..., V], float32 or float64 -> [...]."""

    @staticmethod
    def forward(values: Tensor) -> Any:
        return call(row_sum_op, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (values,) = inputs
        ctx.vocab = values.shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return row_expand(grad, ctx.vocab)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        with pushing(ctx):
            return row_sum(tangent)


class RowExpand(Primitive):
    """values [...] -> [..., V], a view of stride 0 where forward mode allows it."""

    @staticmethod
    def forward(values: Tensor, vocab: int) -> Any:
        expanded = values.unsqueeze(-1).expand(*values.shape, vocab)
        # Forward mode wants the tangent of a view to be a view, which it is not under every vmap.
        return expanded.clone() if forward_ad._current_level >= 0 else expanded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.vocab = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return row_sum(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        with pushing(ctx):
            return row_expand(tangent, ctx.vocab)


def row_sum(values: Tensor) -> Tensor:
    result: Tensor = RowSum.apply(values)  # type: ignore[no-untyped-call]
    return result


def row_expand(values: Tensor, vocab: int) -> Tensor:
    result: Tensor = RowExpand.apply(values, vocab)  # type: ignore[no-untyped-call]
    return result
