"""Loads the native library, and gives every operator its fake (meta) implementation."""

from pathlib import Path

import torch
from torch import Tensor

from detlogp import _checks
from detlogp._checks import FLOAT_DTYPES

LIBRARY = Path(__file__).with_name("libdetlogp.so")


def _load() -> None:
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"detlogp could not load {LIBRARY.name} under torch {torch.__version__}: {error}. "
            "It needs torch 2.10 or newer on Linux x86-64; elsewhere, build it from source."
        ) from error


_load()
logp_op = torch.ops.detlogp.logp.default
logp_with_stats_op = torch.ops.detlogp.logp_with_stats.default
logp_with_entropy_op = torch.ops.detlogp.logp_with_entropy.default
logp_out_op = torch.ops.detlogp.logp_out.default
logp_backward_op = torch.ops.detlogp.logp_backward.default
logp_backward_inplace_op = torch.ops.detlogp.logp_backward_inplace.default
logp_second_order_op = torch.ops.detlogp.logp_second_order.default
logp_tangent_op = torch.ops.detlogp.logp_tangent.default
probability_op = torch.ops.detlogp.probability.default
row_sum_op = torch.ops.detlogp.row_sum.default
exact_max_op = torch.ops.detlogp.exact_max.default
exact_sum_op = torch.ops.detlogp.exact_sum.default
exact_finish_op = torch.ops.detlogp.exact_finish.default
exact_extremes_op = torch.ops.detlogp.exact_extremes.default
exact_row_sum_op = torch.ops.detlogp.exact_row_sum.default
exact_total_op = torch.ops.detlogp.exact_total.default


# How the operators are told a dtype: a number, which is cheaper to pass than a torch.dtype.
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(FLOAT_DTYPES)}

# And an arithmetic: Arithmetic of csrc/core/args.h. Statistics tell theirs by their dtypes: the
# exact contract keeps m in float32 and log(s) in float64.
FLOAT32, FLOAT64, EXACT = range(3)


def _per_row(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=dtype)


def _stats(logits: Tensor, lse_dtype: int, arithmetic: int) -> list[Tensor]:
    row_max = torch.float64 if arithmetic == FLOAT64 else torch.float32
    log_sum = torch.float32 if arithmetic == FLOAT32 else torch.float64
    return [_per_row(logits, t) for t in (FLOAT_DTYPES[lse_dtype], row_max, log_sum)]


@torch.library.register_fake("detlogp::logp")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None = None,
    dtype: int = DTYPE_NUMBERS[torch.float32],
    arithmetic: int = FLOAT32,
    nan_for_invalid: bool = False,
) -> Tensor:
    _checks.check_tensors(logits, token_ids)
    return _per_row(logits, FLOAT_DTYPES[dtype])


@torch.library.register_fake("detlogp::logp_with_stats")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    dtype: int,
    lse_dtype: int,
    arithmetic: int,
    nan_for_invalid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checks.check_tensors(logits, token_ids)
    lse, row_max, log_sum = _stats(logits, lse_dtype, arithmetic)
    return _per_row(logits, FLOAT_DTYPES[dtype]), lse, row_max, log_sum


@torch.library.register_fake("detlogp::logp_with_entropy")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    dtype: int,
    lse_dtype: int,
    arithmetic: int,
    nan_for_invalid: bool,
    temperature: float,
) -> tuple[Tensor, ...]:
    _checks.check_tensors(logits, token_ids)
    lse, row_max, log_sum = _stats(logits, lse_dtype, arithmetic)
    entropy, gap = torch.empty_like(lse), torch.empty_like(row_max)
    return _per_row(logits, FLOAT_DTYPES[dtype]), lse, entropy, row_max, log_sum, gap


@torch.library.register_fake("detlogp::logp_out")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    lse_dtype: int,
    arithmetic: int,
    nan_for_invalid: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_tensors(logits, token_ids)
    lse, row_max, log_sum = _stats(logits, lse_dtype, arithmetic)
    return lse, row_max, log_sum


@torch.library.register_fake("detlogp::logp_backward")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    first_column: int = 0,
    vocab_size: int | None = None,
    gap: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("detlogp::logp_backward_inplace")
def _(*_: Tensor | float | None) -> None:
    return None


@torch.library.register_fake("detlogp::logp_second_order")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    grad_logp: Tensor | None,
    grad_lse: Tensor | None,
    cotangent: Tensor,
    mean: Tensor | None = None,
    first_column: int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_logp, of_lse = (_per_row(logits, row_max.dtype) for _ in range(2))
    return logits.new_empty(logits.shape), of_logp, of_lse


@torch.library.register_fake("detlogp::logp_tangent")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    tangent: Tensor,
) -> tuple[Tensor, Tensor]:
    of_logp, of_lse = (_per_row(logits, row_max.dtype) for _ in range(2))
    return of_logp, of_lse


@torch.library.register_fake("detlogp::probability")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    first_column: int = 0,
    vocab_size: int | None = None,
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=row_max.dtype)


@torch.library.register_fake("detlogp::row_sum")
def _(values: Tensor) -> Tensor:
    return _per_row(values, values.dtype)


@torch.library.register_fake("detlogp::exact_max")
@torch.library.register_fake("detlogp::exact_sum")
@torch.library.register_fake("detlogp::exact_extremes")
@torch.library.register_fake("detlogp::exact_row_sum")
def _(*_: Tensor | int | None) -> None:
    return None


@torch.library.register_fake("detlogp::exact_finish")
def _(
    keys: Tensor,
    sums: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    vocab_size: int,
    dtype: int,
    lse_dtype: int,
    nan_for_invalid: bool,
) -> tuple[Tensor, ...]:
    dtypes = (FLOAT_DTYPES[dtype], FLOAT_DTYPES[lse_dtype], torch.float32, torch.float64)
    return tuple(sums.new_empty(sums.shape, dtype=t) for t in dtypes)


@torch.library.register_fake("detlogp::exact_total")
def _(keys: Tensor, sums: Tensor, vocab_size: int) -> Tensor:
    return sums.new_empty(sums.shape, dtype=torch.float32)


def build_info() -> dict[str, str]:
    """How the library was built, and the CPU path in use, as text by name."""
    lines = torch.ops.detlogp.build_info().splitlines()
    return dict(line.split("=", 1) for line in lines)


def select_cpu_path(name: str) -> str:
    """Selects a CPU code path, "auto" for the widest. Returns the name of the path in use."""
    path: str = torch.ops.detlogp.select_cpu_path(name)
    return path


def select_cuda_layout(name: str) -> str:
    """Selects how the CUDA forward lays out its work, "auto" for what is fastest."""
    layout: str = torch.ops.detlogp.select_cuda_layout(name)
    return layout
