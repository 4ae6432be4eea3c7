"""row_sum: [..., V] -> [...], in the locked order; in the exact contract, by whole numbers.

    row_sum(a)[r] = sum_v a[r, v]

Linear, so it is its own tangent; its transpose is row_expand.
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._native import row_sum_op
from detlogp.primitives import _exact
from detlogp.primitives import row_expand as transpose
from detlogp.primitives._function import Primitive, pushing
from detlogp.primitives.columns import Columns


class RowSum(Primitive):
    """values [..., V], float32 or float64, columns -> [...]."""

    @staticmethod
    def forward(values: Tensor, columns: Columns) -> Any:
        if columns.is_exact:  # other processes may have columns where this one has none
            return _exact.row_sum(values, columns)
        if values.shape[-1] == 0:
            return values.new_zeros(values.shape[:-1])
        return call(row_sum_op, values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.columns = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return transpose.row_expand(grad, ctx.columns), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        with pushing(ctx):
            return row_sum(tangent, ctx.columns)


def row_sum(values: Tensor, columns: Columns) -> Tensor:
    result: Tensor = RowSum.apply(values, columns)
    return result
