"""Bad input: the message names the argument, what was expected and what came."""

from typing import Any

import pytest
import torch

import detlogp

X = torch.zeros(3, 5)
IDS = torch.zeros(3, dtype=torch.int64)

CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": [1.0]}, TypeError, "logits must be a Tensor, got list"),
    ({"logits": X.long()}, TypeError, "logits must be float16, .*, got int64"),
    ({"logits": X.to(torch.complex64)}, TypeError, "logits must be float16, .*, got complex64"),
    ({"logits": torch.tensor(1.0)}, ValueError, r"logits must have shape \[\.\.\., V\]"),
    ({"logits": torch.zeros(3, 0)}, ValueError, r"V >= 1\), got shape \(3, 0\)"),
    ({"logits": torch.zeros(0, 0), "token_ids": IDS[:0]}, ValueError, "logits must have at least"),
    ({"token_ids": [0, 1, 2]}, TypeError, "token_ids must be a Tensor, got list"),
    ({"token_ids": IDS.float()}, TypeError, "token_ids must have an integer dtype, got float32"),
    ({"token_ids": IDS.bool()}, TypeError, "token_ids must have an integer dtype, got bool"),
    ({"token_ids": IDS[:2]}, ValueError, r"leading shape, \(3,\), or one more .* shape \(2,\)"),
    ({"token_ids": IDS[None]}, ValueError, r"leading shape, \(3,\), or .*, got shape \(1, 3\)"),
    ({"token_ids": IDS.to("meta")}, ValueError, "token_ids must be on logits' device, cpu, got m"),
    ({"rows": [1]}, TypeError, "rows must be a Tensor, got list"),
    ({"rows": X[0]}, TypeError, "rows must have an integer or bool dtype, got float32"),
    ({"rows": IDS[:2].bool()}, ValueError, r"boolean mask, .* \(3,\), got shape \(2,\)"),
    ({"rows": IDS.to("meta")}, ValueError, "rows must be on logits' device, cpu, got meta"),
    ({"dtype": torch.int32}, TypeError, "dtype must be float16, .* or None, got torch.int32"),
    ({"dtype": "float32"}, TypeError, "dtype must be float16, .* or None, got 'float32'"),
    ({"contract": "fast"}, ValueError, "contract must be .locked. or .exact., got .fast."),
    ({"on_invalid": "skip"}, ValueError, "on_invalid must be 'zero' or 'nan' or 'raise', got 'sk"),
    ({"out": [0.0]}, TypeError, "out must be a Tensor, got list"),
]


@pytest.mark.parametrize(("changes", "error", "message"), CASES)
def test_message(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"logits": X, "token_ids": IDS, **changes}
    with pytest.raises(error, match=message):
        detlogp.logp(**arguments)


@pytest.mark.cuda
def test_devices_that_differ() -> None:
    """Case 31."""
    with pytest.raises(ValueError, match="token_ids must be on logits' device, cuda:0, got cpu"):
        detlogp.logp(X.cuda(), IDS)


def test_too_many_leading_dimensions() -> None:
    """The stated limit: 13 leading dimensions of which no two can be merged."""
    logits = torch.zeros(*([3] * 13), 1)[(slice(None, None, 2),) * 13]
    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    with pytest.raises(RuntimeError, match="at most 12 leading dimensions"):
        detlogp.logp(logits, ids)
    assert not detlogp.logp(logits.contiguous(), ids).any()


def test_raw_operators_check_their_arguments() -> None:
    """Whoever calls them directly gets an error, never a read out of bounds."""
    operator = torch.ops.detlogp.logp
    flags = (2, False, False)
    for logits, ids, mask, message in (
        (X, IDS[:2], None, "token_ids must have logits' leading shape"),
        (X, IDS.int(), None, "token_ids must be Long"),
        (X, IDS, IDS[:2].bool(), "mask must have logits' leading shape"),
        (X.long(), IDS, None, "logits must be float16"),
        (torch.zeros(3, 0), IDS, None, "at least one column"),
    ):
        with pytest.raises(RuntimeError, match=message):
            operator(logits, ids, mask, *flags)
    with pytest.raises(RuntimeError, match="dtype must be the number of a dtype, 0 to 3, got 4"):
        operator(X, IDS, None, 4, False, False)
    with pytest.raises(RuntimeError, match="CPU path"):
        torch.ops.detlogp.select_cpu_path("sse9")
