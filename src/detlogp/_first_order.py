"""Ordinary training: the first derivative in reverse mode, by one fused kernel.

    d logp[r] = dx[r, t] - sum_v p[r, v] dx[r, v]
    d lse[r]  =            sum_v p[r, v] dx[r, v]

so that the gradient of a row is grad_logp (onehot(t) - p) + grad_lse p, where
p = exp((x - m) - log(s)). The logits, m and log(s) are kept; no [N, V] tensor is made besides the
gradient. A Function apart from primitives/score.py, because it costs half as much to call, and
because torch.compile takes a Function without a jvp rule alone.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp._guards import call
from detlogp._native import logp_backward_op, logp_with_stats_op
from detlogp.primitives._function import is_plain
from detlogp.primitives.gradient import gradient
from detlogp.primitives.rows import Rows


class FirstOrder(torch.autograd.Function):
    """logp [...] and lse [...] of the operator `logp_with_stats`, whose arguments it takes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, mask: Any, *options: Any) -> Any:
        logp, lse, row_max, log_sum = call(logp_with_stats_op, logits, token_ids, mask, *options)
        ctx.save_for_backward(logits, token_ids, mask, row_max, log_sum)
        ctx.set_materialize_grads(False)
        return logp, lse

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Any:
        rows = Rows(*ctx.saved_tensors)
        grads = [
            None if grad is None else grad.to(rows.row_max.dtype) for grad in (grad_logp, grad_lse)
        ]
        if torch.compiler.is_compiling() or is_plain():
            vectors = (None if grad is None else grad.contiguous() for grad in grads)
            grad_logits = call(logp_backward_op, *rows, *vectors)
        else:
            # create_graph, or is_grads_batched, which maps over the cotangents.
            grad_logits = gradient(rows, *grads)
        return grad_logits, *(None,) * 6
