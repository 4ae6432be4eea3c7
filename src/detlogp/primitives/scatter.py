"""scatter: [...], ids -> [..., V]; 0 in the rows that are not scored.

    scatter(b)[r, v] = b[r] where v = t, else 0

Linear in its first argument, so it is its own tangent; its transpose is gather.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp.primitives import gather as transpose
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.rows import scored


class Scatter(Primitive):
    """values [...], token_ids [...], mask [...] or None, V -> [..., V]."""

    @staticmethod
    def forward(values: Tensor, token_ids: Tensor, mask: Tensor | None, vocab: int) -> Any:
        kept = scored(token_ids, mask, vocab)
        column = torch.where(kept, token_ids, 0).unsqueeze(-1)
        source = values.masked_fill(~kept, 0).unsqueeze(-1)
        return values.new_zeros(*values.shape, vocab).scatter(-1, column, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, token_ids, mask, ctx.vocab = inputs
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        grad_values = None if grad is None else transpose.gather(grad, token_ids, mask)
        return grad_values, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            return scatter(tangent, token_ids, mask, ctx.vocab)


def scatter(values: Tensor, token_ids: Tensor, mask: Tensor | None, vocab: int) -> Tensor:
    result: Tensor = Scatter.apply(values, token_ids, mask, vocab)  # type: ignore[no-untyped-call]
    return result
