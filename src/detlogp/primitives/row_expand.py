"""row_expand: [...] -> [..., V], the same number in every column.

    row_expand(b)[r, v] = b[r]

Linear, so it is its own tangent; its transpose is row_sum.
"""

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from detlogp.primitives import row_sum as transpose
from detlogp.primitives._function import Primitive, pushing
from detlogp.primitives.columns import Columns


class RowExpand(Primitive):
    """values [...], columns -> [..., V], a view of stride 0 where forward mode allows it."""

    @staticmethod
    def forward(values: Tensor, columns: Columns) -> Any:
        expanded = values.unsqueeze(-1).expand(*values.shape, columns.count)
        # Forward mode wants the tangent of a view to be a view, which it is not under every vmap.
        return expanded.clone() if forward_ad._current_level >= 0 else expanded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.columns = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return transpose.row_sum(grad, ctx.columns), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        with pushing(ctx):
            return row_expand(tangent, ctx.columns)


def row_expand(values: Tensor, columns: Columns) -> Tensor:
    result: Tensor = RowExpand.apply(values, columns)
    return result
