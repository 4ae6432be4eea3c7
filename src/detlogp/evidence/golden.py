"""The recorded bits of the locked contract: their inputs, and what must come out."""

import json
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from detlogp.testing import portable_ids, portable_logits

GOLDEN: dict[str, Any] = json.loads(
    files("detlogp.evidence").joinpath("data/locked-golden.json").read_text()
)
"""132 cases, 3 output types and 10 special rows, recorded on an H200 with CUDA 13.0."""


def case_name(case: dict[str, Any]) -> str:
    return f"{case['dtype']}-{case['rows']}x{case['vocab']}-scale{case['scale']}"


def inputs(case: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    """logits [N, V] and token_ids [N]."""
    dtype = getattr(torch, case["dtype"])
    logits = portable_logits(case["seed"], case["rows"], case["vocab"], case["scale"], dtype)
    return logits.to(device), portable_ids(case["seed"], case["rows"], case["vocab"]).to(device)


def special_inputs(case: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    """One row, expanded for each of its ids."""
    token_ids = torch.tensor(case.get("ids", [case.get("target")]), device=device)
    row = torch.tensor([float(x) for x in case["row"]], device=device)
    return row.expand(len(token_ids), -1), token_ids


def expected(case: dict[str, Any]) -> Tensor:
    """[N], float32, on the CPU."""
    words = case["bits"] if isinstance(case["bits"], list) else [case["bits"]]
    return torch.from_numpy(np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32))


def expected_output(case: dict[str, Any]) -> Tensor:
    """[N], of the case's output type, on the CPU."""
    values = [float.fromhex(value) for value in case["values"]]
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, case["out_dtype"]))
