"""The order of additions, column by column, against a plain numpy loop over lanes."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_accuracy import exp_through_gradient

from detlogp._native import DTYPE_NUMBERS, logp_with_stats_op, row_sum_op
from detlogp.testing import assert_same_bits, available_cpu_paths, cpu_path

VOCABS = [1, 33, 127, 128, 129, 257, 4095, 4096, 4097, 9000, 50257]


def fold(group: NDArray[Any]) -> Any:
    """32 lanes: offset 16, 8, 4, 2, 1, lane i += lane i + offset."""
    group = group.copy()
    for offset in (16, 8, 4, 2, 1):
        group[:offset] += group[offset : 2 * offset]
    return group[0]


def locked_sum(terms: NDArray[Any]) -> Any:
    lanes = 128 if len(terms) <= 128 else 256 if len(terms) <= 4096 else 512
    lane = np.zeros(lanes, dtype=terms.dtype)
    for start in range(0, len(terms), lanes):
        block = terms[start : start + lanes]
        lane[: len(block)] += block
    groups = np.zeros(32, dtype=terms.dtype)
    groups[: lanes // 32] = [fold(g) for g in lane.reshape(-1, 32)]
    return fold(groups)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", VOCABS)
def test_row_sum(vocab: int, compute: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Both signs, so that another order gives other bits."""
    values = torch.randn(8, vocab, generator=generator, dtype=compute)
    expected = np.array([locked_sum(row) for row in values.numpy()])
    expected_bits = torch.from_numpy(expected).to(device)
    assert_same_bits(row_sum_op(values.to(device)), expected_bits)
    strided = torch.stack([values, values], -1).to(device)[..., 1]
    assert_same_bits(row_sum_op(strided), expected_bits)


@pytest.mark.parametrize("path", available_cpu_paths())
@pytest.mark.parametrize("vocab", VOCABS)
def test_forward(vocab: int, path: str, generator: torch.Generator) -> None:
    """s lies in [1, 2), so that every bit of it is a bit of log(s)."""
    x = torch.rand(16, vocab, generator=generator) * -2 - np.log(vocab) - 0.1
    x[:, vocab // 2] = 0.0  # the row's max: x - m is x
    ids = torch.zeros(16, dtype=torch.int64)
    with cpu_path(path):
        terms = exp_through_gradient(x).numpy()
        log_sum = logp_with_stats_op(x, ids, None, 2, 2, False, False)[3]
    sums = np.array([locked_sum(row) for row in terms])
    expected = np.log(sums.astype(np.float64)).astype(np.float32)
    assert_same_bits(log_sum, torch.from_numpy(expected))


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
@pytest.mark.parametrize("path", available_cpu_paths())
def test_exp_and_log_have_one_value_on_every_path(
    path: str, compute: torch.dtype, generator: torch.Generator
) -> None:
    x = -750 * torch.rand(20000, dtype=compute, generator=generator) ** 3
    pairs = torch.stack([torch.zeros_like(x), x / 10], 1)
    ids = torch.zeros(len(x), dtype=torch.int64)
    number = DTYPE_NUMBERS[compute]
    call = (pairs, ids, None, number, number, compute == torch.float64, False)
    with cpu_path("portable"):
        e, log = exp_through_gradient(x), logp_with_stats_op(*call)[3]
    with cpu_path(path):
        assert_same_bits(exp_through_gradient(x), e)
        assert_same_bits(logp_with_stats_op(*call)[3], log)
