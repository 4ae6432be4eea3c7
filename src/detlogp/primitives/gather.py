"""gather: [..., V], ids -> [...]; 0 in the rows that are not scored.

    gather(a)[r] = a[r, t]

Linear in its first argument, so it is its own tangent; its transpose is scatter.
"""

from typing import Any

from torch import Tensor

from detlogp.primitives import _exact
from detlogp.primitives import scatter as transpose
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.columns import Columns


class Gather(Primitive):
    """values [..., V], token_ids [...], mask [...] or None, columns -> [...]."""

    @staticmethod
    def forward(values: Tensor, token_ids: Tensor, mask: Tensor | None, columns: Columns) -> Any:
        return _exact.at_target(values, token_ids, mask, columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, token_ids, mask, ctx.columns = inputs
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        return transpose.scatter(grad, token_ids, mask, ctx.columns), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            return gather(tangent, token_ids, mask, ctx.columns)


def gather(values: Tensor, token_ids: Tensor, mask: Tensor | None, columns: Columns) -> Tensor:
    result: Tensor = Gather.apply(values, token_ids, mask, columns)
    return result
