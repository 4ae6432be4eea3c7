"""scatter_several: [..., K], ids [..., K] -> [..., V]; ids that do not count give nothing.

    scatter_several(b)[r, v] = sum over k with t_k = v of b[r, k], in the order of the ids

Linear in its first argument, so it is its own tangent; its transpose is gather_several.
"""

from typing import Any

from torch import Tensor

from detlogp.primitives import gather_several as transpose
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives._places import places, sum_of_equals


class ScatterSeveral(Primitive):
    """values [..., K], token_ids [..., K], mask [...] or None, V -> [..., V]."""

    @staticmethod
    def forward(values: Tensor, token_ids: Tensor, mask: Tensor | None, vocab: int) -> Any:
        counts, column = places(token_ids, mask, vocab)
        source = sum_of_equals(values.masked_fill(~counts, 0), column)
        return values.new_zeros(*values.shape[:-1], vocab).scatter_(-1, column, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, token_ids, mask, ctx.vocab = inputs
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        return transpose.gather_several(grad, token_ids, mask), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            return scatter_several(tangent, token_ids, mask, ctx.vocab)


def scatter_several(values: Tensor, token_ids: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    args = (values, token_ids, mask, vocab)
    result: Tensor = ScatterSeveral.apply(*args)
    return result
