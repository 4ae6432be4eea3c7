"""scatter: [...], ids -> [..., V]; 0 in the rows that are not scored.

    scatter(b)[r, v] = b[r] where v = t, else 0

Linear in its first argument, so it is its own tangent; its transpose is gather.
"""

from typing import Any

from torch import Tensor

from detlogp.primitives import gather as transpose
from detlogp.primitives._exact import target_here
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.columns import Columns


class Scatter(Primitive):
    """values [...], token_ids [...], mask [...] or None, columns -> [..., V]."""

    @staticmethod
    def forward(values: Tensor, token_ids: Tensor, mask: Tensor | None, columns: Columns) -> Any:
        zeros = values.new_zeros(*values.shape, columns.count)
        if columns.count == 0:
            return zeros
        is_here, column = target_here(token_ids, mask, columns)
        source = values.masked_fill(~is_here, 0).unsqueeze(-1)
        return zeros.scatter(-1, column.unsqueeze(-1), source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, token_ids, mask, ctx.columns = inputs
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        return transpose.gather(grad, token_ids, mask, ctx.columns), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            return scatter(tangent, token_ids, mask, ctx.columns)


def scatter(values: Tensor, token_ids: Tensor, mask: Tensor | None, columns: Columns) -> Tensor:
    args = (values, token_ids, mask, columns)
    result: Tensor = Scatter.apply(*args)
    return result
