"""The public function."""

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from detlogp import _checks, _several
from detlogp._first_order import FirstOrder, InPlace, check_inplace_backward, tempered
from detlogp._guards import call, is_transformed
from detlogp._native import (
    DTYPE_NUMBERS,
    EXACT,
    FLOAT32,
    FLOAT64,
    logp_op,
    logp_with_entropy_op,
    logp_with_stats_op,
)
from detlogp._out import check_out, copy_out, write_out
from detlogp.primitives.score import Score, ScoreEntropy

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LogpResult(NamedTuple):
    """What `logp` returns when more than the log-probability was asked for."""

    logp: Tensor
    """[...] or [..., K], as token_ids: log-probability of each, in nats."""
    lse: Tensor
    """[...], logarithm of the sum of the exponentials of the row's logits, in nats."""


class LogpEntropyResult(NamedTuple):
    """What `logp` returns with `return_entropy`."""

    logp: Tensor
    """[...] or [..., K], as token_ids: log-probability of each, in nats."""
    entropy: Tensor
    """[...], entropy of the row's softmax, in nats."""


class LogpLseEntropyResult(NamedTuple):
    """What `logp` returns with `return_lse` and `return_entropy`."""

    logp: Tensor
    """[...] or [..., K], as token_ids: log-probability of each, in nats."""
    lse: Tensor
    """[...], logarithm of the sum of the exponentials of the row's logits, in nats."""
    entropy: Tensor
    """[...], entropy of the row's softmax, in nats."""


Result = Tensor | LogpResult | LogpEntropyResult | LogpLseEntropyResult


if TYPE_CHECKING:

    class _Options(TypedDict, total=False):
        rows: Tensor | None
        out: Tensor | None
        dtype: torch.dtype | None
        contract: str
        temperature: float
        on_invalid: str
        inplace_backward: bool


@overload
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: "Unpack[_Options]",
) -> Tensor: ...


@overload
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[False] = False,
    **options: "Unpack[_Options]",
) -> LogpResult: ...


@overload
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: "Unpack[_Options]",
) -> LogpEntropyResult: ...


@overload
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    return_lse: Literal[True],
    return_entropy: Literal[True],
    **options: "Unpack[_Options]",
) -> LogpLseEntropyResult: ...


@overload
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    return_lse: bool = False,
    return_entropy: Literal[False] = False,
    **options: "Unpack[_Options]",
) -> Tensor | LogpResult: ...


@overload
def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: "Unpack[_Options]",
) -> Result: ...


def logp(
    logits: Tensor,
    token_ids: Tensor,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    contract: str = "locked",
    temperature: float = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    on_invalid: str = "zero",
    inplace_backward: bool = False,
) -> Result:
    """Log-probability that each row's softmax gives to its token, or to several.

        logp[r] = (x[r, t] - m) - log(s),  m = max_v x[r, v],  s = sum_v exp(x[r, v] - m)

    The additions of s follow a fixed order that depends on V alone (the contract page of the
    documentation), so the bits of a row's result depend on that row alone: not on the batch, the
    position in it, strides, alignment, threads, or streams. This holds for the gradient too.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64, on the CPU or a CUDA device; any
            strides and alignment, up to 12 leading dimensions that cannot be merged. Never written.
        token_ids: [...], any integer dtype, on logits' device. An id outside [0, V), such as -100,
            gives logp 0, lse -inf, and a gradient of exactly 0 in its row (see `on_invalid`). Or
            [..., K], several ids of each row, from one read of it: logp is then [..., K], each with
            the bits of the call with that id, and a bad id gives its own logp 0 and no gradient,
            while lse and entropy stay. K may be 0, and ids may repeat.
        rows: which rows to score: flat row numbers (integer; those out of range are ignored), or a
            boolean mask of shape [...]. The result keeps the full shape; a row that is not
            selected is not read, and has logp 0, lse -inf and gradient 0. Default: all rows.
        out: a buffer like token_ids, of any supported dtype, that receives logp; its storage is
            kept, and its unselected rows keep their values. It sets the rounding of the result
            alone. In training it joins the graph; under a transform it must be made inside, or
            mapped by vmap. Refused: one that requires grad, overlaps itself or shares memory with
            an input.
        dtype: float64 asks for arithmetic and a result in double precision; float32, float16 and
            bfloat16 for float32 arithmetic and one rounding (float64 logits are then rounded to
            float32 first). Default: double arithmetic for float64 logits, float32 otherwise, and a
            result of that type.
        contract: how the sum is taken. "locked": float32 additions in a fixed order; on CUDA the
            recorded bits. "exact": whole numbers, whose sum has no order; the same bits on the CPU
            and on every GPU, and a smaller error. Not in double arithmetic.
        temperature: a positive float that the logits are divided by, in the arithmetic's type,
            before anything else; the gradient is that of the logits. All results are of the
            quotients.
        return_lse: also return lse[r] = m + log(s), of the dtype that `dtype` says.
        return_entropy: also return the entropy of the row's softmax, log(s) + sum_v p (m - x), of
            the same dtype, from the same read of the row; 0 in a row that is not scored. A logit
            of -inf adds 0.
        on_invalid: what a bad id in a selected row gives: "zero"; "nan", a NaN logp with the same
            lse and gradient; or "raise", a ValueError before anything is written, which costs a
            synchronisation of the device. Nothing else synchronises.
        inplace_backward: the gradient overwrites the logits' storage, which saves its memory.
            Whoever needs the logits after that, autograd included, gets an error, not a wrong
            gradient; only first-order training is possible. The logits must be the result of an
            operation, with adjacent columns, and have one id a row. Without a gradient it changes
            nothing.

    Returns:
        logp, like token_ids, in nats; or a NamedTuple of logp, lse [...] and entropy [...], those
        that were asked for.
        All are differentiable to every order, in reverse and forward mode and under every
        torch.func transform; gradients have logits' dtype. First-order training runs one fused
        kernel and keeps no [N, V] tensor.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape, device, buffer or choice that does not fit; with on_invalid="raise", a
            bad id.
        NotImplementedError: inside torch.compile, a torch.func transform, `out` or
            `inplace_backward`; this one also under a transform, and with several ids a row.

    Source: the locked contract is the order of RL-Kernel's public deterministic logp kernel.
    """
    # By position: every eager call pays for this line.
    return score(
        logits,
        token_ids,
        None,
        rows,
        out,
        dtype,
        contract,
        return_lse,
        on_invalid,
        inplace_backward,
        temperature,
        return_entropy,
    )


def _arithmetic(source: torch.dtype, dtype: torch.dtype | None) -> tuple[int, int]:
    in_double = (dtype or source) is torch.float64
    result = dtype or (torch.float64 if in_double else torch.float32)
    return DTYPE_NUMBERS[result], FLOAT64 if in_double else FLOAT32


# From the logits' dtype and `dtype`: the result's dtype, and the locked contract's arithmetic. A
# table, because every eager call pays for it, and because what is not in it is an error.
_ARITHMETIC = {
    (source, dtype): _arithmetic(source, dtype)
    for source in _checks.FLOAT_DTYPES
    for dtype in (None, *_checks.FLOAT_DTYPES)
}
_DEFAULT_OPTIONS = (DTYPE_NUMBERS[torch.float32], FLOAT32, False)


def _exact(arithmetic: int) -> int:
    if arithmetic == FLOAT64:
        raise ValueError(
            "contract must be 'locked' in double arithmetic (float64 logits, or "
            "dtype=torch.float64), got 'exact'; dtype=torch.float32 asks for float32"
        )
    return EXACT


def exact_number(logits: Tensor, dtype: torch.dtype | None) -> int:
    """The number of the result's dtype in the exact contract."""
    try:
        number, arithmetic = _ARITHMETIC[logits.dtype, dtype]
    except (AttributeError, KeyError, TypeError):
        raise _checks.dtype_error(logits, dtype) from None
    _exact(arithmetic)
    return number


def score(
    logits: Tensor,
    token_ids: Tensor,
    compute_dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    contract: str = "locked",
    return_lse: bool = False,
    on_invalid: str = "zero",
    inplace_backward: bool = False,
    temperature: float = 1.0,
    return_entropy: bool = False,
) -> Result:
    """`logp`, whose arithmetic's type, float32 or float64, may be stated in place of `dtype`."""
    try:
        lse_number, arithmetic = _ARITHMETIC[compute_dtype or logits.dtype, dtype]
    except (AttributeError, KeyError, TypeError):
        raise _checks.dtype_error(logits, dtype) from None
    if contract != "locked" or on_invalid != "zero":
        _checks.check_options(contract, on_invalid)
        if contract == "exact":
            arithmetic = _exact(arithmetic)
    options = (lse_number, arithmetic, on_invalid == "nan")
    ids = _checks.to_ids(token_ids)
    mask = None if rows is None else _checks.to_mask(rows, logits)
    transformed = is_transformed(logits)
    differentiable = transformed or (logits.requires_grad and torch.is_grad_enabled())
    if inplace_backward and differentiable:
        if transformed or is_compiling():
            raise NotImplementedError(
                "inplace_backward: not under a transform, in forward mode or in a compiled function"
            )
        _checks.check_tensors(logits, token_ids)
        if ids.dim() == logits.dim():
            raise NotImplementedError("inplace_backward: not with several token ids a row")
        check_inplace_backward(logits)
    if on_invalid == "raise":
        _checks.check_tensors(logits, token_ids)
        several = ids.dim() == logits.dim()
        _checks.check_ids_in_range(ids, mask, logits.shape[-1], several=several)
    if out is not None:
        _checks.check_tensors(logits, token_ids)
        check_out(out, dtype, logits, token_ids, rows)
    # What the plain operators do not do: they serve every call that does not ask for it.
    more: tuple[float, ...] = ()
    if return_entropy or temperature != 1.0:
        is_double = arithmetic == FLOAT64
        more = (_checks.checked_temperature(temperature, in_double=is_double),)
    if ids.dim() == logits.dim():
        found = _several.score(logits, ids, mask, out, options, more, transformed=transformed)
        return _result(*found, return_lse, return_entropy)
    entropy = None
    try:
        if differentiable or (more and out is not None):
            number = lse_number if out is None else DTYPE_NUMBERS[out.dtype]
            args = (ids, mask, number, *options)
            if transformed:
                value, lse, entropy = _transformed(logits, args, *more)
            else:
                function = InPlace if inplace_backward else FirstOrder
                value, lse, *rest = function.apply(logits, *args, *more)  # type: ignore[no-untyped-call]
                entropy = rest[0] if rest else None
            if out is not None:
                value = copy_out(out, value, mask)
        elif out is not None:
            value, lse = write_out(out, logits, ids, mask, *options)
        elif more:
            args = (ids, mask, lse_number, *options)
            value, lse, entropy, *_ = call(logp_with_entropy_op, logits, *args, *more)
        elif return_lse:
            value, lse, _, _ = call(logp_with_stats_op, logits, ids, mask, lse_number, *options)
        else:
            # The operator's defaults, left out: passing an argument costs 0.2 microseconds.
            is_default = mask is None and options == _DEFAULT_OPTIONS
            value = call(logp_op, logits, ids, *(() if is_default else (mask, *options)))
    except RuntimeError:
        # The operators check everything before they write; this finds the argument to name.
        _checks.check_tensors(logits, token_ids)
        raise
    if return_lse or return_entropy:
        return _result(value, lse, entropy, return_lse, return_entropy)
    return value


def _result(
    value: Tensor, lse: Tensor, entropy: Tensor | None, return_lse: bool, return_entropy: bool
) -> Result:
    if return_entropy:
        assert entropy is not None
        if return_lse:
            return LogpLseEntropyResult(value, lse, entropy)
        return LogpEntropyResult(value, entropy)
    return LogpResult(value, lse) if return_lse else value


def _transformed(
    logits: Tensor, args: tuple[Any, ...], temperature: float | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logp, lse and, with a temperature, the entropy, under a transform or in forward mode."""
    if temperature is None:
        value, lse, _, _ = Score.apply(logits, *args)
        return value, lse, None
    dtype = torch.float64 if args[4] == FLOAT64 else torch.float32
    quotients = tempered(logits, temperature, dtype)
    value, lse, entropy, _, _ = ScoreEntropy.apply(quotients, *args)
    return value, lse, entropy
