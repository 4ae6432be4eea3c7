"""For tests of detlogp and of other implementations: portable inputs, bits, and error bounds."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from detlogp import reference
from detlogp._checks import CONTRACTS, check_choice
from detlogp._native import build_info, select_cpu_path, select_cuda_layout

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def lanes(vocab: int) -> int:
    """B, the number of lanes that the locked contract gives to a row of `vocab` columns."""
    return 128 if vocab <= 128 else 256 if vocab <= 4096 else 512


# ---- portable inputs: IEEE double arithmetic on a splitmix64 stream, the same bits everywhere ----


def uniform(seed: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1), from `seed` and their position alone."""
    with np.errstate(over="ignore"):
        start = _mix(np.array([seed], dtype=np.uint64))[0]
        counter = np.arange(count, dtype=np.uint64) * _GOLDEN_RATIO + start
        numbers: NDArray[np.float64] = (_mix(counter) >> np.uint64(11)).astype(np.float64)
    return numbers * 2.0**-53


def portable_logits(
    seed: int, rows: int, vocab: int, scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[rows, vocab] roughly normal logits of standard deviation `scale`, rounded to `dtype`."""
    u = uniform(seed, rows * vocab * 4).reshape(rows * vocab, 4)
    values = ((u[:, 0] + u[:, 1]) + (u[:, 2] + u[:, 3]) - 2.0) * 1.75 * scale
    return torch.from_numpy(values.astype(np.float32).reshape(rows, vocab)).to(dtype)


def portable_ids(seed: int, rows: int, vocab: int) -> Tensor:
    """[rows] token ids, int64."""
    ids = (uniform(seed ^ 0xABCDEF, rows) * vocab).astype(np.int64)
    return torch.from_numpy(np.minimum(ids, vocab - 1))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + _GOLDEN_RATIO
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# ---- bits ----------------------------------------------------------------------------------------


def bits(values: Tensor) -> Tensor:
    """The bit patterns as integers of the same size; every NaN counts as one and the same."""
    canonical = torch.where(values.isnan(), torch.nan, values)
    return canonical.contiguous().view(_BITS[values.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Raises AssertionError, naming the first coordinate and both bit patterns, unless equal."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{actual.dtype} {tuple(actual.shape)} is not {expected.dtype} {tuple(expected.shape)}"
        )
    differ = bits(actual) != bits(expected)
    if not bool(differ.any()):
        return
    where = tuple(differ.nonzero()[0].tolist())
    one, other = actual[where], expected[where]
    mask = (1 << 8 * actual.element_size()) - 1
    raise AssertionError(
        f"{int(differ.sum())} of {differ.numel()} differ, first at {where}: {one.item()!r} "
        f"({int(bits(one)) & mask:#x}) is not {other.item()!r} ({int(bits(other)) & mask:#x})"
    )


def ulp_distance(actual: Tensor, expected: Tensor) -> Tensor:
    """|actual - expected| in ulp of float32 at max(1, |expected|); equal values count as 0."""
    one_at_least = expected.double().abs().clamp_min(1.0)
    ulp = torch.exp2(one_at_least.log2().floor() - 23)
    distance = (actual.double() - expected.double()).abs() / ulp
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    return torch.where(same, 0.0, distance)


def available_cpu_paths() -> list[str]:
    """The CPU code paths that this build and this processor have, widest first."""
    paths = []
    for name in ("avx512", "avx2", "portable"):
        try:
            with cpu_path(name):
                paths.append(name)
        except RuntimeError:
            continue
    return paths


@contextmanager
def cpu_path(name: str) -> Iterator[None]:
    """The CPU kernels of one instruction set, in all threads; RuntimeError where there are none."""
    previous = build_info()["cpu_path"]
    select_cpu_path(name)
    try:
        yield
    finally:
        select_cpu_path(previous)


CUDA_LAYOUTS = ("rows", "few", "ring1", "ring2", "ring4", "ring8")


@contextmanager
def cuda_layout(name: str) -> Iterator[None]:
    """One layout of the CUDA forward, in all threads: "rows", a block a row that reads it twice;
    "few", 8 or 4 blocks a row that hold it in registers; or "ring1" to "ring8", so many blocks a
    row that read it once. The bits are the same.

    The others serve float16, bfloat16 and float32 logits with adjacent columns, V > 4096, on
    devices of capability 9 and 10: a ring where a row fits into it; "few" up to V = 163840, in the
    locked contract without temperature and entropy. "rows" serves the rest. RuntimeError for
    another name, or a build without CUDA.
    """
    select_cuda_layout(name)
    try:
        yield
    finally:
        select_cuda_layout("auto")


# ---- error bounds: proofs are on the contracts' pages of the documentation -----------------------

# The exact contract's exponential of a reduced argument, relative: measured over every float.
_EXACT_EXP_ERROR = 1.22 * 2.0**-24
# How much its log 2, a float, is too large.
_EXACT_LOG2_EXCESS = 1.9047e-9


def logp_error_bound(
    logits: Tensor,
    token_ids: Tensor,
    dtype: torch.dtype = torch.float32,
    contract: str = "locked",
) -> Tensor:
    """Largest |logp - exact| that a contract allows for each row, in nats.

    Holds on the CPU and on CUDA. Locked: exp may be off by 2 ulp, log by 1.

    Args:
        logits: [..., V], as the arithmetic reads them (float64 logits of a float32 call: rounded to
            float32 first); finite or -inf, with at least one finite logit a row.
        token_ids: [...], int64, in range.
        dtype: the result's; float64 stands for double arithmetic. The result must not overflow it.
        contract: "locked" or "exact".

    Returns:
        [...], float64.

    Raises: ValueError, for another contract, or the exact one with float64.
    """
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    _check_contract(contract, dtype)
    vocab = logits.shape[-1]
    x = logits.double()
    exact = reference.logp(logits, token_ids)
    row_max = x.amax(-1)
    log_sum = exact.lse - row_max
    probability = reference.probability(logits)
    of_target = (row_max - x.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)).abs()
    if contract == "exact":
        of_double = 2.0**-50 * (1.0 + of_target + log_sum)
        bound = unit * exact.logp.abs() + _exact_sum_error(probability) + of_double
    else:
        gap = (row_max.unsqueeze(-1) - x).nan_to_num(posinf=0.0)
        mean_gap = (probability * gap).sum(-1)
        # Rounded additions that a term meets: its lane's (the first is exact), 9 of the tree's 10.
        additions = -(-vocab // lanes(vocab)) + 8
        of_sum = unit * (additions + mean_gap + 4.0) + vocab * 2.0**-126
        bound = unit * (of_target + 2.0 * log_sum + exact.logp.abs()) + of_sum
    # 1%: products of two roundings.
    bound = 1.01 * bound.nan_to_num(posinf=0.0)
    return bound + rounding_bound(exact.logp.abs() + bound, dtype)


def entropy_error_bound(
    logits: Tensor, dtype: torch.dtype = torch.float32, contract: str = "locked"
) -> Tensor:
    """Largest |entropy - exact| that a contract allows for each row, in nats.

    Args:
        logits: [..., V], as the arithmetic reads them, divided by the temperature; finite or -inf,
            with at least one finite logit a row.
        dtype: the result's; float64 stands for double arithmetic.
        contract: "locked" or "exact".

    Returns:
        [...], float64.

    Raises: ValueError, for another contract, or the exact one with float64.
    """
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    _check_contract(contract, dtype)
    vocab = logits.shape[-1]
    x = logits.double()
    row_max = x.amax(-1, keepdim=True)
    p = reference.probability(logits)
    distance = (row_max - x).nan_to_num(posinf=0.0)
    weighted = p * distance
    gap = weighted.sum(-1)
    log_sum = (x - row_max).exp().sum(-1).log()
    if contract == "exact":
        # The same terms, each with two more roundings, and a second set of quanta.
        of_sum = _exact_sum_error(p)
        below = (p.amax(-1, keepdim=True) / p).log2() + 1.0
        of_exp = _EXACT_EXP_ERROR + 2.0 * unit + _EXACT_LOG2_EXCESS * below
        of_terms = (weighted * of_exp).nan_to_num().sum(-1) + _quanta_error(p)
        bound = of_terms + (1.0 + gap) * of_sum + unit * (log_sum + gap)
        bound = bound + 2.0**-50 * (1.0 + log_sum + gap)
    else:
        additions = -(-vocab // lanes(vocab)) + 8
        of_sum = unit * (additions + gap + 4.0) + vocab * 2.0**-126
        # A term is off by its exponential, distance and product, and meets as many additions.
        of_terms = unit * (weighted * (distance + additions + 6.0)).sum(-1) + vocab * 2.0**-126
        bound = of_terms + (1.0 + gap) * of_sum + unit * (2.0 * log_sum + 3.0 * gap)
    bound = 1.01 * bound
    return bound + rounding_bound(log_sum + gap + bound, dtype)


def gradient_error_bound(
    probability: Tensor,
    magnitude: Tensor,
    gradient: Tensor,
    dtype: torch.dtype,
    contract: str = "locked",
) -> Tensor:
    """Largest |gradient - exact| that a contract allows for each element.

    Args:
        probability: [..., V], float64, exact.
        magnitude: [...], |grad_logp| + |grad_lse|.
        gradient: [..., V], the exact gradient, for the rounding to a half type.
        dtype: the logits'; float64 stands for double arithmetic.
        contract: "locked" or "exact".

    Returns:
        [..., V], float64.

    Raises: ValueError, for another contract, or the exact one with float64.
    """
    _check_contract(contract, dtype)
    vocab = probability.shape[-1]
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    if contract == "exact":
        of_sum = _exact_sum_error(probability).unsqueeze(-1)
        binades = (probability.amax(-1, keepdim=True) / probability).log2() + 1.0
        of_exp = _EXACT_EXP_ERROR + 2.0 * unit + _EXACT_LOG2_EXCESS * binades
        relative = (probability * (of_exp + of_sum)).nan_to_num()  # 0 where p is
        per_unit = 1.01 * (4.0 * unit + relative) + 2.0**-124
    else:
        steps = -(-vocab // lanes(vocab)) + math.log(vocab) + 16
        per_unit = 1.01 * unit * (4.0 + probability * steps)
    # Two roundings to a subnormal of the arithmetic's type.
    bound = magnitude.double().unsqueeze(-1) * per_unit + 2.0**-149
    return bound + rounding_bound(gradient.abs() + bound, dtype)


def _check_contract(contract: str, dtype: torch.dtype) -> None:
    check_choice("contract", contract, CONTRACTS)
    if contract == "exact" and dtype == torch.float64:
        raise ValueError("dtype must not be float64, double arithmetic, with contract='exact'")


def _exact_sum_error(probability: Tensor) -> Tensor:
    """What log(s) may be off in the exact contract, [...], from the exact probabilities."""
    largest = probability.amax(-1)
    others = 1.0 - largest
    # sum_v p log2(p_max / p): how many powers of 2 the terms lie below the max, on average.
    below = (probability * (largest.unsqueeze(-1) / probability).log2()).nan_to_num().sum(-1)
    of_terms = _EXACT_EXP_ERROR * others + _EXACT_LOG2_EXCESS * (below + others)
    return of_terms + _quanta_error(probability)


def _quanta_error(probability: Tensor) -> Tensor:
    """Half a quantum a term, relative to s, [...]."""
    vocab = probability.shape[-1]
    quantum = 2.0 ** -min(43, 63 - (vocab - 1).bit_length())
    return 0.712 * vocab * quantum * probability.amax(-1)


def rounding_bound(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest error of one rounding of `values` to a half type; 0 for float32 and float64."""
    if dtype in (torch.float32, torch.float64):
        return torch.zeros_like(values, dtype=torch.float64)
    info = torch.finfo(dtype)
    finite = values.double().abs().nan_to_num(posinf=0.0)
    return (finite * info.eps).clamp_min(info.smallest_normal * info.eps) / 2
