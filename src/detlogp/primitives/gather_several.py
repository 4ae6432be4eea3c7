"""gather_several: [..., V], ids [..., K] -> [..., K]; 0 where an id does not count.

    gather_several(a)[r, k] = a[r, t_k]

Linear in its first argument, so it is its own tangent; its transpose is scatter_several.
"""

from typing import Any

from torch import Tensor

from detlogp.primitives import scatter_several as transpose
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives._places import places


class GatherSeveral(Primitive):
    """values [..., V], token_ids [..., K], mask [...] or None -> [..., K]."""

    @staticmethod
    def forward(values: Tensor, token_ids: Tensor, mask: Tensor | None) -> Any:
        counts, column = places(token_ids, mask, values.shape[-1])
        return values.gather(-1, column).masked_fill(~counts, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values, token_ids, mask = inputs
        ctx.vocab = values.shape[-1]
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        if grad is None:
            return (None,) * 3
        return transpose.scatter_several(grad, token_ids, mask, ctx.vocab), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            return gather_several(tangent, token_ids, mask)


def gather_several(values: Tensor, token_ids: Tensor, mask: Tensor | None) -> Tensor:
    result: Tensor = GatherSeveral.apply(values, token_ids, mask)
    return result
