"""targets: the log-probabilities of several ids a row, from the statistics of the row.

    targets(x, lse)[r, k] = (x[r, t_k] - m) - log(s)
    d targets[r, k] = dx[r, t_k] - d lse[r]

m and log(s) are constants here, and give the bits; `lse`, which is m + log(s), gives the
derivative. The rule is linear, so its own derivatives are those of the primitives that it is
made of.
"""

from typing import Any

from torch import Tensor

from detlogp._guards import call
from detlogp._targets import targets_op
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives._places import places
from detlogp.primitives.columns import Columns
from detlogp.primitives.gather_several import gather_several
from detlogp.primitives.row_expand import row_expand
from detlogp.primitives.row_sum import row_sum
from detlogp.primitives.scatter_several import scatter_several


def targets_vjp(
    grad: Tensor, token_ids: Tensor, mask: Tensor | None, vocab: int
) -> tuple[Tensor, Tensor]:
    """The cotangents of x, [..., V], and of lse, [...], from those of the values, [..., K]."""
    counts, _ = places(token_ids, mask, vocab)
    counted = grad.masked_fill(~counts, 0)
    ids = Columns(grad.shape[-1], grad.shape[-1])
    return scatter_several(counted, token_ids, mask, vocab), -row_sum(counted, ids)


class Targets(Primitive):
    """x [..., V] and lse [...] of the arithmetic's dtype, token_ids [..., K], mask [...] or None,

    m [...], log(s) [...], the number of the result's dtype, nan_for_invalid -> [..., K].
    """

    @staticmethod
    def forward(x: Tensor, lse: Tensor, *args: Any) -> Any:
        return call(targets_op, x, *args, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, _, token_ids, mask, *_ = inputs
        ctx.vocab = x.shape[-1]
        ctx.dtypes = (x.dtype, output.dtype)
        keep(ctx, token_ids, mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        token_ids, mask = ctx.saved_tensors
        if grad is None:
            return (None,) * 8
        wide = grad.to(ctx.dtypes[0])
        return *targets_vjp(wide, token_ids, mask, ctx.vocab), *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, of_lse: Tensor | None, *_: None) -> Any:
        with pushing(ctx) as (token_ids, mask):
            counts = places(token_ids, mask, ctx.vocab)[0]
            result = token_ids.new_zeros(token_ids.shape, dtype=ctx.dtypes[0])
            if dx is not None:
                result = gather_several(dx, token_ids, mask)
            if of_lse is not None:
                count = token_ids.shape[-1]
                result = result - row_expand(of_lse, Columns(count, count))
            return result.masked_fill(~counts, 0).to(ctx.dtypes[1])


def targets(x: Tensor, lse: Tensor, *args: Any) -> Tensor:
    result: Tensor = Targets.apply(x, lse, *args)
    return result
