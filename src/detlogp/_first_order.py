"""Ordinary training: the first derivative in reverse mode, by one fused kernel.

    d logp[r] = dx[r, t] - sum_v p[r, v] dx[r, v]
    d lse[r]  =            sum_v p[r, v] dx[r, v]

so that the gradient of a row is grad_logp (onehot(t) - p) + grad_lse p, where
p = exp((x - m) - log(s)). The logits, m and log(s) are kept; no [N, V] tensor is made besides the
gradient.
"""

from typing import Any

import torch
from torch import Tensor

from detlogp._guards import below_autograd
from detlogp._native import logp_backward_op, logp_with_stats_op


class FirstOrder(torch.autograd.Function):
    """logp [...] and lse [...] of the operator `logp_with_stats`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        mask: Tensor | None,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        nan_for_invalid: bool,
    ) -> tuple[Tensor, Tensor]:
        with below_autograd():
            logp, lse, row_max, log_sum = logp_with_stats_op(
                logits, token_ids, mask, dtype, compute_dtype, nan_for_invalid
            )
        ctx.save_for_backward(logits, token_ids, mask, row_max, log_sum)
        ctx.set_materialize_grads(False)
        return logp, lse

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph: detlogp.logp does not support a second derivative yet; "
                "call backward() or torch.autograd.grad without create_graph=True"
            )
        logits, token_ids, mask, row_max, log_sum = ctx.saved_tensors
        grads = (
            None if grad is None else grad.to(row_max.dtype).contiguous()
            for grad in (grad_logp, grad_lse)
        )
        with below_autograd():
            grad_logits = logp_backward_op(logits, token_ids, mask, row_max, log_sum, *grads)
        return grad_logits, None, None, None, None, None
