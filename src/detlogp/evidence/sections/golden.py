"""The recorded bits: all of them on CUDA, within 2 ulp on the CPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import detlogp
from detlogp.evidence import golden
from detlogp.evidence.sections._check import Check, Options, Result, same_bits
from detlogp.testing import ulp_distance


def checks(options: Options) -> Iterator[Check]:
    device = options.device
    for case in golden.GOLDEN["cases"]:
        yield Check(golden.case_name(case), case["dtype"], partial(_case, case, device))
    for case in golden.GOLDEN["outputs"]:
        name = f"{golden.case_name(case)} into {case['out_dtype']}"
        yield Check(name, case["dtype"], partial(_output, case, device))
    for name, case in golden.GOLDEN["special"].items():
        yield Check(name, "float32", partial(_special, case, device))


def _case(case: dict[str, Any], device: str) -> Result:
    return _judge(detlogp.logp(*golden.inputs(case, device)), golden.expected(case))


def _output(case: dict[str, Any], device: str) -> Result:
    logits, token_ids = golden.inputs(case, device)
    expected = golden.expected_output(case)
    out = torch.full(token_ids.shape, torch.nan, dtype=expected.dtype, device=device)
    return _judge(detlogp.logp(logits, token_ids, out=out), expected)


def _special(case: dict[str, Any], device: str) -> Result:
    return _judge(detlogp.logp(*golden.special_inputs(case, device)), golden.expected(case))


def _judge(actual: Tensor, expected: Tensor) -> Result:
    if actual.device.type == "cuda":
        return same_bits(actual.cpu(), expected, "recorded bits")
    distance = float(ulp_distance(actual, expected).max())
    outcome = "pass" if distance <= 2 else "fail"
    reason = f"{len(expected)} numbers, at most {distance:g} ulp from the recorded ones"
    return Result(outcome, reason, distance, 2.0)
