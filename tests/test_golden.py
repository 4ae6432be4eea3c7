"""The recorded bits of the locked contract: bitwise on CUDA, within 2 ulp on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

import detlogp
from detlogp.evidence.golden import (
    GOLDEN,
    case_name,
    expected,
    expected_output,
    inputs,
    special_inputs,
)
from detlogp.testing import assert_same_bits, ulp_distance


def _check(actual: Tensor, wanted: Tensor) -> None:
    if actual.device.type == "cuda":
        assert_same_bits(actual.cpu(), wanted)
        return
    assert actual.dtype == wanted.dtype
    assert ulp_distance(actual, wanted).max() <= 2


def test_the_table_is_whole() -> None:
    assert len(GOLDEN["cases"]) == 132
    assert len(GOLDEN["outputs"]) == 3
    assert len(GOLDEN["special"]) == 10


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_name)
def test_case(case: dict[str, Any], device: str) -> None:
    _check(detlogp.logp(*inputs(case, device)), expected(case))


@pytest.mark.parametrize("case", GOLDEN["outputs"], ids=lambda case: case["out_dtype"])
def test_output_type(case: dict[str, Any], device: str) -> None:
    logits, token_ids = inputs(case, device)
    wanted = expected_output(case)
    out = torch.full(token_ids.shape, torch.nan, dtype=wanted.dtype, device=device)
    detlogp.logp(logits, token_ids, out=out)
    _check(out, wanted)


@pytest.mark.parametrize("name", GOLDEN["special"])
def test_special_row(name: str, device: str) -> None:
    case = GOLDEN["special"][name]
    actual = detlogp.logp(*special_inputs(case, device))
    _check(actual, expected(case))
    assert torch.equal(actual.isfinite().cpu(), expected(case).isfinite())
