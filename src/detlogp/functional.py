"""The public function, and its first-order gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from detlogp import _checks
from detlogp._guards import below_autograd
from detlogp._native import logp_backward_op, logp_op, logp_out_op


class LogpResult(NamedTuple):
    """What `logp` returns when more than the log-probability was asked for."""

    logp: Tensor
    """[...], log-probability of the token, in nats."""
    lse: Tensor
    """[...], logarithm of the sum of the exponentials of the row's logits, in nats."""


class _Call(NamedTuple):
    """A checked call, as the operators want it."""

    logits: Tensor  # [..., V]
    token_ids: Tensor  # [...], int64, contiguous
    mask: Tensor | None  # [...], bool, contiguous
    dtype: torch.dtype
    compute_dtype: torch.dtype
    return_lse: bool
    nan_for_invalid: bool


def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    contract: str = "locked",
    return_lse: bool = False,
    on_invalid: str = "zero",
) -> Tensor | LogpResult:
    """Log-probability that each row's softmax gives to its token.

        logp[r] = (x[r, t] - m) - log(s),  m = max_v x[r, v],  s = sum_v exp(x[r, v] - m)

    The additions of s follow a fixed order that depends on V alone (the contract page of the
    documentation), so the bits of a row's result depend on that row alone: not on the batch, the
    position in it, strides, alignment, threads, or streams. This holds for the gradient too.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64, on the CPU or a CUDA device; any
            strides, any alignment, up to 12 leading dimensions that cannot be merged. Never written.
        token_ids: [...], any integer dtype, on logits' device. An id outside [0, V), such as -100,
            gives logp 0, lse -inf, and a gradient of exactly 0 in its row (see `on_invalid`).
        rows: which rows to score: flat row numbers (integer; those out of range are ignored), or a
            boolean mask of shape [...]. The result keeps the full shape; a row that is not selected
            is not read, and has logp 0, lse -inf and gradient 0. Default: all rows.
        out: [...], a buffer of any supported dtype that receives logp, whose storage is kept and whose
            unselected rows keep their values. It sets the rounding of the result alone. Not yet
            differentiable.
        dtype: float64 asks for arithmetic and a result in double precision; float32, float16 and
            bfloat16 for float32 arithmetic and one rounding (float64 logits are then rounded to
            float32 first). Default: double arithmetic for float64 logits, float32 otherwise, and a
            result of that type.
        contract: the order of additions; "locked" is the only one so far.
        return_lse: also return lse[r] = m + log(s), of the dtype that `dtype` says.
        on_invalid: what a bad id in a selected row gives: "zero"; "nan", a NaN logp with the same lse
            and gradient; or "raise", a ValueError before anything is written, which costs a
            synchronisation of the device. Nothing else synchronises.

    Returns:
        logp [...], in nats, or LogpResult(logp, lse). Differentiable once, by backward() or
        torch.autograd.grad; the gradient has logits' dtype.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, device or choice that does not fit; with on_invalid="raise", a bad id.
        NotImplementedError: a second derivative, forward mode, a torch.func transform, or `out` with
            logits that require grad.

    Source: the locked contract is the order of RL-Kernel's public deterministic logp kernel.
    """
    return score(
        logits,
        token_ids,
        rows=rows,
        out=out,
        dtype=dtype,
        contract=contract,
        return_lse=return_lse,
        on_invalid=on_invalid,
    )


def score(
    logits: Tensor,
    token_ids: Tensor,
    *,
    compute_dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    contract: str = "locked",
    return_lse: bool = False,
    on_invalid: str = "zero",
) -> Tensor | LogpResult:
    """`logp`, whose arithmetic's type, float32 or float64, may be stated apart from the result's."""
    _checks.check_logits(logits)
    _checks.check_dtype(dtype)
    _checks.check_choice("contract", contract, _checks.CONTRACTS)
    _checks.check_choice("on_invalid", on_invalid, _checks.ON_INVALID)
    _checks.check_plain_call(logits)
    ids = _checks.check_token_ids(token_ids, logits)
    mask = None if rows is None else _checks.check_rows(rows, logits)
    needs_grad = logits.requires_grad and torch.is_grad_enabled()
    if out is not None:
        inputs = (token_ids,) if rows is None else (token_ids, rows)
        _checks.check_out(out, dtype, logits, *inputs)
        if needs_grad:
            raise NotImplementedError(
                "out: a call whose logits require grad cannot write into a buffer yet; "
                "leave out out=, or call under torch.no_grad()"
            )
    if on_invalid == "raise":
        _checks.check_ids_in_range(ids, mask, logits.shape[-1])
    if compute_dtype is None:
        wanted = logits.dtype if dtype is None else dtype
        compute_dtype = torch.float64 if wanted == torch.float64 else torch.float32
    result_dtype = dtype or compute_dtype
    nan_for_invalid = on_invalid == "nan"
    call = _Call(logits, ids, mask, result_dtype, compute_dtype, return_lse, nan_for_invalid)
    if out is not None:
        lse = _score_into(call, out)
        return LogpResult(out, lse) if return_lse else out
    if needs_grad:
        outputs = _Logp.apply(logits, call)
        return LogpResult(*outputs) if return_lse else outputs
    value, lse, _, _ = _run(call, with_stats=False)
    return LogpResult(value, lse) if return_lse else value


def _run(call: _Call, with_stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with below_autograd():
        result: tuple[Tensor, Tensor, Tensor, Tensor] = logp_op(
            call.logits,
            call.token_ids,
            call.mask,
            call.dtype,
            call.compute_dtype,
            call.return_lse,
            with_stats,
            call.nan_for_invalid,
        )
    return result


def _score_into(call: _Call, out: Tensor) -> Tensor:
    """Writes logp into `out`, of any strides; returns the lse."""
    buffer = out.contiguous()
    with below_autograd():
        lse: Tensor
        lse, _, _ = logp_out_op(
            call.logits,
            call.token_ids,
            call.mask,
            call.dtype,
            call.compute_dtype,
            call.return_lse,
            False,
            call.nan_for_invalid,
            buffer,
        )
    if buffer is out:
        # So that autograd notices when an earlier value of the buffer was saved for a backward.
        torch.autograd.graph.increment_version(out)
    else:
        out.copy_(buffer)
    return lse


class _Logp(torch.autograd.Function):
    """First order, reverse mode: one fused kernel, grad_logp (onehot - p) + grad_lse p.

    It keeps the logits, the row maximum m and log(s); no [N, V] tensor besides the gradient is made.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call) -> Any:
        value, lse, row_max, log_sum = _run(call, with_stats=True)
        ctx.save_for_backward(logits, call.token_ids, call.mask, row_max, log_sum)
        ctx.set_materialize_grads(False)
        return (value, lse) if call.return_lse else value

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph: detlogp.logp does not support a second derivative yet; "
                "call backward() or torch.autograd.grad without create_graph=True"
            )
        logits, token_ids, mask, row_max, log_sum = ctx.saved_tensors
        if grad_logp is None and grad_lse is None:
            return None, None
        grads = (
            None if grad is None else grad.to(row_max.dtype).contiguous()
            for grad in (grad_logp, grad_lse)
        )
        with below_autograd():
            return logp_backward_op(logits, token_ids, mask, row_max, log_sum, *grads), None
