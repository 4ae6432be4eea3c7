"""score: logp and lse of each row, and the statistics that their derivatives need.

    d logp = dx[t] - sum_v p dx      d lse = sum_v p dx

One level of reverse mode is `gradient`, one of forward mode is `tangent`: the fused kernels. With
the entropy, whose derivatives are those of weighted_log; and of a part of the columns.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp._guards import call
from detlogp._native import logp_with_entropy_op, logp_with_stats_op
from detlogp.primitives import _exact
from detlogp.primitives._function import Primitive, keep, pushing
from detlogp.primitives.columns import Columns
from detlogp.primitives.gradient import gradient
from detlogp.primitives.rows import Rows
from detlogp.primitives.tangent import tangent
from detlogp.primitives.weighted_log import entropy_gradient, entropy_tangent


def _with_ids(
    logits: Tensor, token_ids: Tensor | None, mask: Tensor | None, *options: Any
) -> tuple[Any, ...]:
    if token_ids is None:
        token_ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    mask = None if mask is None else mask.contiguous()
    return logits, token_ids.contiguous(), mask, *options


class Score(Primitive):
    """logits [..., V], token_ids [...] or None, mask [...] or None, options

    -> logp, lse, m, log(s). Without ids there is no target, and logp means nothing.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        return call(logp_with_stats_op, *_with_ids(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits, token_ids, mask, *_ = inputs
        logp, lse, row_max, log_sum = output
        rows = Rows(logits, token_ids, mask, row_max, log_sum)
        if token_ids is None:
            rows = rows.without_target()
        ctx.part = rows.part
        ctx.dtypes = (logp.dtype, lse.dtype)
        ctx.mark_non_differentiable(row_max, log_sum)
        keep(ctx, *rows.tensors)

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None, *_: Any) -> Any:
        rows = Rows(*ctx.saved_tensors)._replace(part=ctx.part)
        grads = (g if g is None else g.to(rows.row_max.dtype) for g in (grad_logp, grad_lse))
        grad_logits = gradient(rows, *grads)
        return grad_logits, *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Any:
        with pushing(ctx) as saved:
            of_logp, of_lse = tangent(Rows(*saved)._replace(part=ctx.part), dx)
            return of_logp.to(ctx.dtypes[0]), of_lse.to(ctx.dtypes[1]), None, None


class ScoreEntropy(Score):
    """The same, and the entropy: logp, lse, entropy, m, log(s)."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return call(logp_with_entropy_op, *_with_ids(*args), 1.0)[:5]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logp, lse, _, row_max, log_sum = output
        Score.setup_context(ctx, inputs, (logp, lse, row_max, log_sum))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad_logp, grad_lse, grad_entropy, *_ = grads
        of_logits, *nothing = Score.backward(ctx, grad_logp, grad_lse)
        if grad_entropy is not None:
            of_logits = of_logits + entropy_gradient(Rows(*ctx.saved_tensors), grad_entropy)
        return of_logits, *nothing

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *others: None) -> Any:
        of_logp, of_lse, *nothing = Score.jvp(ctx, dx, *others)
        with pushing(ctx) as saved:
            of_entropy = entropy_tangent(Rows(*saved), dx).to(ctx.dtypes[1])
            return of_logp, of_lse, of_entropy, *nothing


class ScorePart(Score):
    """The same where the logits are a part of the columns; every process of the group gets all."""

    @staticmethod
    def forward(
        logits: Tensor, token_ids: Tensor, mask: Tensor | None, columns: Columns, *options: Any
    ) -> Any:
        vectors = (token_ids.contiguous(), None if mask is None else mask.contiguous())
        return _exact.score(logits, *vectors, columns, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        Score.setup_context(ctx, inputs, output)
        ctx.part = inputs[3]
