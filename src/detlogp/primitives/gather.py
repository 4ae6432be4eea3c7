"""gather: [..., V], ids -> [...]; 0 in the rows that are not scored.

    gather(a)[r] = a[r, t]

Linear in its first argument, so it is its own tangent; its transpose is scatter.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp.primitives import scatter as transpose
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.rows import scored


class Gather(Primitive):
    """values [..., V], token_ids [...], mask [...] or None -> [...]."""

    @staticmethod
    def forward(values: Tensor, token_ids: Tensor, mask: Tensor | None) -> Any:
        kept = scored(token_ids, mask, values.shape[-1])
        column = torch.where(kept, token_ids, 0).unsqueeze(-1)
        return values.gather(-1, column).squeeze(-1).masked_fill(~kept, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        values, token_ids, mask = inputs
        ctx.vocab = values.shape[-1]
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        grad_values = None if grad is None else transpose.scatter(grad, token_ids, mask, ctx.vocab)
        return grad_values, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            return gather(tangent, token_ids, mask)


def gather(values: Tensor, token_ids: Tensor, mask: Tensor | None) -> Tensor:
    result: Tensor = Gather.apply(values, token_ids, mask)  # type: ignore[no-untyped-call]
    return result
