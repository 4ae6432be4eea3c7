"""row_sum: [..., V] -> [...], in the locked order.

    row_sum(a)[r] = sum_v a[r, v]

Linear, so it is its own tangent; its transpose is row_expand.
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import row_sum_op
from detlogp.primitives import row_expand as transpose
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
        return transpose.row_expand(grad, ctx.vocab)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        with pushing(ctx):
            return row_sum(tangent)


def row_sum(values: Tensor) -> Tensor:
    result: Tensor = RowSum.apply(values)  # type: ignore[no-untyped-call]
    return result
