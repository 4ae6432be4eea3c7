"""The semantics table, line by line: value, lse and gradient."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import detlogp
from detlogp.evidence.accuracy import random_rows
from detlogp.evidence.sections._check import (
    DTYPES,
    Answer,
    Check,
    Options,
    Result,
    all_of,
    dtype_text,
    same_bits,
    solve,
)

INF, NAN = math.inf, math.nan
# name: row, id, logp, lse and the gradient for the cotangents 1 (logp) and 0.5 (lse), or one number
# for all of the row.
ROWS: dict[str, tuple[list[float], int, float, float, list[float] | float]] = {
    "id -100": ([1.0, 2.0, 4.0], -100, 0.0, -INF, 0.0),
    "id V": ([1.0, 2.0, 4.0], 3, 0.0, -INF, 0.0),
    "id 2^40": ([1.0, 2.0, 4.0], 2**40, 0.0, -INF, 0.0),
    "-inf, not the target": ([0.0, -INF], 0, 0.0, 0.0, [0.5, 0.0]),
    "-inf, the target": ([-INF, 0.0, 0.0], 0, -INF, math.log(2), [1.0, -0.25, -0.25]),
    "whole row -inf": ([-INF] * 3, 1, NAN, -INF, NAN),
    "a NaN in the row": ([1.0, NAN, 2.0], 0, NAN, NAN, NAN),
    "+inf in the row": ([1.0, INF, 2.0], 0, NAN, NAN, NAN),
    "bad id in a row of NaN": ([NAN, 1.0], -100, 0.0, -INF, 0.0),
    "bad id in a row of -inf": ([-INF, -INF], 7, 0.0, -INF, 0.0),
    "one column": ([3.0], 0, 0.0, 3.0, [0.5]),
}


def checks(options: Options) -> Iterator[Check]:
    for dtype in DTYPES:
        for name in ROWS:
            yield Check(name, dtype_text(dtype), partial(_row, name, dtype, options.device))
        for name, run in (("rows", _rows), ("neighbours", _neighbours), ("N = 0", _empty)):
            yield Check(name, dtype_text(dtype), partial(run, dtype, options.device))
    for name, run in (
        ("common offset of 1e7", _offset),
        ("on_invalid", _on_invalid),
        ("V = 0", _no_columns),
    ):
        yield Check(name, "float32", partial(run, torch.float32, options.device))


def _cotangents(rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    ones = torch.ones(rows, dtype=wide, device=device)
    return ones, ones / 2


def _row(name: str, dtype: torch.dtype, device: str) -> Result:
    row, token_id, logp, lse, gradient = ROWS[name]
    logits = torch.tensor([row], dtype=dtype, device=device)
    ids = torch.tensor([token_id], device=device)
    found = solve(logits, ids, _cotangents(1, dtype, device))
    whole = gradient if isinstance(gradient, list) else [gradient] * len(row)
    for part, expected in zip(found, ([logp], [lse], [whole]), strict=True):
        wanted = torch.tensor(expected, dtype=torch.float64)
        close = torch.allclose(part.double().cpu(), wanted, rtol=1e-6, atol=0, equal_nan=True)
        if not close:
            return Result("fail", f"got {part.tolist()}, expected {expected}")
    return Result("pass", f"logp {logp:g}, lse {lse:g}, gradient as the table says")


def _rows(dtype: torch.dtype, device: str) -> Result:
    """Not selected, selected twice, out of range; an unselected row is not read."""
    logits, ids = random_rows(5, 100, dtype, device, 0)
    cotangents = _cotangents(5, dtype, device)
    expected = solve(logits, ids, cotangents)
    logits[0] = NAN
    chosen = torch.tensor([3, 1, 3, -1, 5, 2**40], device=device)
    found = solve(logits, ids, cotangents, rows=chosen)
    others = torch.tensor([0, 2, 4], device=device)
    silent = (found.logp[others] == 0) & (found.lse[others] == -INF)
    silent &= (found.gradient[others] == 0).all(-1)
    if not bool(silent.all()):
        return Result("fail", "a row that is not selected has a value or a gradient")
    return _same(found, expected, torch.tensor([1, 3], device=device), "selected")


def _same(found: Answer, expected: Answer, rows: Tensor, what: str) -> Result:
    pairs = zip(Answer._fields, found, expected, strict=True)
    return all_of([same_bits(a[rows], b[rows], f"{what}, {name}") for name, a, b in pairs])


def _neighbours(dtype: torch.dtype, device: str) -> Result:
    """A NaN stays in its row."""
    logits, ids = random_rows(64, 517, dtype, device, 1)
    cotangents = _cotangents(64, dtype, device)
    expected = solve(logits, ids, cotangents)
    logits[20, 300] = NAN
    found = solve(logits, ids, cotangents)
    others = (torch.arange(64, device=device) != 20).nonzero().flatten()
    return _same(found, expected, others, "beside a NaN")


def _empty(dtype: torch.dtype, device: str) -> Result:
    found = solve(
        torch.zeros(0, 7, dtype=dtype, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        _cotangents(0, dtype, device),
    )
    shapes = [tuple(part.shape) for part in found]
    return Result("pass" if shapes == [(0,), (0,), (0, 7)] else "fail", f"shapes {shapes}")


def _offset(dtype: torch.dtype, device: str) -> Result:
    x = torch.tensor([[1.0, 2.0, 3.0]], device=device)
    ids = torch.tensor([1], device=device)
    cotangents = _cotangents(1, dtype, device)
    near, far = solve(x, ids, cotangents), solve(x - 1e7, ids, cotangents)
    return all_of(
        [
            same_bits(far.logp, near.logp, "[1, 2, 3] - 1e7, logp"),
            same_bits(far.gradient, near.gradient, "gradient"),
        ]
    )


def _on_invalid(dtype: torch.dtype, device: str) -> Result:
    logits = torch.zeros(2, 5, device=device)
    ids = torch.tensor([0, 7], device=device)
    if not bool(detlogp.logp(logits, ids, on_invalid="nan")[1].isnan()):
        return Result("fail", 'on_invalid="nan" gave no NaN')
    try:
        detlogp.logp(logits, ids, on_invalid="raise")
    except ValueError as error:
        return Result("pass", f"NaN; and ValueError: {error}")
    return Result("fail", 'on_invalid="raise" did not raise')


def _no_columns(dtype: torch.dtype, device: str) -> Result:
    try:
        detlogp.logp(torch.zeros(3, 0, device=device), torch.zeros(3, dtype=torch.int64).to(device))
    except ValueError as error:
        return Result("pass", f"ValueError: {error}")
    return Result("fail", "V = 0 did not raise")
