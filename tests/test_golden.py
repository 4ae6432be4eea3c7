"""The recorded bits of the locked contract: bitwise on CUDA, within 2 ulp on the CPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import detlogp
from detlogp import evidence
from detlogp.testing import assert_same_bits, portable_ids, portable_logits, ulp_distance

GOLDEN = json.loads((Path(evidence.__file__).parent / "data" / "locked-golden.json").read_text())


def _name(case: dict[str, Any]) -> str:
    return f"{case['dtype']}-{case['rows']}x{case['vocab']}-scale{case['scale']}"


def _inputs(case: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    dtype = getattr(torch, case["dtype"])
    logits = portable_logits(case["seed"], case["rows"], case["vocab"], case["scale"], dtype)
    return logits.to(device), portable_ids(case["seed"], case["rows"], case["vocab"]).to(device)


def _from_bits(words: list[str]) -> Tensor:
    return torch.from_numpy(np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32))


def _check(actual: Tensor, expected: Tensor) -> None:
    if actual.device.type == "cuda":
        assert_same_bits(actual.cpu(), expected)
        return
    assert actual.dtype == expected.dtype
    assert ulp_distance(actual, expected).max() <= 2


def test_the_table_is_whole() -> None:
    assert len(GOLDEN["cases"]) == 132
    assert len(GOLDEN["outputs"]) == 3
    assert len(GOLDEN["special"]) == 10


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=_name)
def test_case(case: dict[str, Any], device: str) -> None:
    _check(detlogp.logp(*_inputs(case, device)), _from_bits(case["bits"]))


@pytest.mark.parametrize("case", GOLDEN["outputs"], ids=lambda case: case["out_dtype"])
def test_output_type(case: dict[str, Any], device: str) -> None:
    logits, token_ids = _inputs(case, device)
    dtype = getattr(torch, case["out_dtype"])
    out = torch.full(token_ids.shape, torch.nan, dtype=dtype, device=device)
    detlogp.logp(logits, token_ids, out=out)
    values = [float.fromhex(v) for v in case["values"]]
    _check(out, torch.tensor(values, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("name", GOLDEN["special"])
def test_special_row(name: str, device: str) -> None:
    case = GOLDEN["special"][name]
    token_ids = torch.tensor(case.get("ids", [case.get("target")]), device=device)
    words = case["bits"] if isinstance(case["bits"], list) else [case["bits"]]
    row = torch.tensor([float(x) for x in case["row"]], device=device)
    actual = detlogp.logp(row.expand(len(token_ids), -1), token_ids)
    expected = _from_bits(words)
    _check(actual, expected)
    assert torch.equal(actual.isfinite().cpu(), expected.isfinite())
