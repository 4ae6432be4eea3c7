"""Loads the native library, and gives every operator its fake (meta) implementation."""

from pathlib import Path

import torch
from torch import Tensor

from detlogp import _checks

_LIBRARY = Path(__file__).with_name("libdetlogp.so")


def _load() -> None:
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"detlogp could not load {_LIBRARY.name} under torch {torch.__version__}: {error}. "
            "It needs torch 2.10 or newer on Linux x86-64; elsewhere, build it from source."
        ) from error


_load()
logp_op = torch.ops.detlogp.logp.default
logp_with_stats_op = torch.ops.detlogp.logp_with_stats.default
logp_out_op = torch.ops.detlogp.logp_out.default
logp_backward_op = torch.ops.detlogp.logp_backward.default


def _per_row(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=dtype)


@torch.library.register_fake("detlogp::logp")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    nan_for_invalid: bool,
) -> Tensor:
    _checks.check_tensors(logits, token_ids)
    return _per_row(logits, dtype)


@torch.library.register_fake("detlogp::logp_with_stats")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    nan_for_invalid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _checks.check_tensors(logits, token_ids)
    types = (dtype, dtype, compute_dtype, compute_dtype)
    logp, lse, row_max, log_sum = (_per_row(logits, t) for t in types)
    return logp, lse, row_max, log_sum


@torch.library.register_fake("detlogp::logp_out")
def _(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    nan_for_invalid: bool,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    _checks.check_tensors(logits, token_ids)
    types = (dtype, compute_dtype, compute_dtype)
    lse, row_max, log_sum = (_per_row(logits, t) for t in types)
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
) -> Tensor:
    return logits.new_empty(logits.shape)


def build_info() -> dict[str, str]:
    """How the library was built, and the CPU path in use, as text by name."""
    lines = torch.ops.detlogp.build_info().splitlines()
    return dict(line.split("=", 1) for line in lines)


def select_cpu_path(name: str) -> str:
    """Selects a CPU code path, "auto" for the widest. Returns the name of the path in use."""
    path: str = torch.ops.detlogp.select_cpu_path(name)
    return path
