"""The exact contract's first-order gradient, from docs/exact.md alone: a zero has a sign here."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from exact_reference import (
    LOG2,
    below,
    entropy,
    exp_double,
    f32,
    f64,
    logp,
    scale_of,
    split,
)
from torch import Tensor


class Cotangents(NamedTuple):
    """Of a row, in float32; None where the result is not used."""

    logp: float | None
    lse: float | None
    entropy: float | None


def _signed(value: Fraction, zero: float) -> float:
    """Rounded to float32; the sign is that of `zero` where the value is 0."""
    return math.copysign(float(f32(value)), zero if value == 0 else value)


def _subtract(a: float, b: float) -> float:
    return _signed(Fraction(a) - Fraction(b), a - b)


def _multiply(a: float, b: float) -> float:
    return _signed(Fraction(a) * Fraction(b), a * b)


def _fma(a: float, b: float, c: float) -> float:
    return _signed(Fraction(a) * Fraction(b) + Fraction(c), a * b + c)


def _divide(a: float, b: float) -> float:
    return _signed(Fraction(a) / Fraction(b), a)


def _sum_of_ids(values: Sequence[float]) -> float:
    """The locked order over at most 128 ids: a lane has one of them, or none."""
    lanes = [0.0 + value for value in values] + [0.0] * (128 - len(values))
    groups = [_tree(lanes[first : first + 32]) for first in range(0, 128, 32)]
    return _tree(groups + [0.0] * 28)


def _tree(lanes: list[float]) -> float:
    for offset in (16, 8, 4, 2, 1):
        lanes = [
            _subtract(lane, -lanes[i + offset]) if i < offset else lane
            for i, lane in enumerate(lanes)
        ]
    return lanes[0]


class _Columns(NamedTuple):
    """What each column of the row has: p, its score, and the entropy's factor."""

    p: list[float]
    score: list[float]
    of_entropy: list[float]


def _columns(row: list[float], targets: set[int]) -> _Columns:
    m = max(Fraction(x) for x in row if x != -math.inf)
    log_s = logp(row, 0)[2]
    gap = float(f32(entropy(row)[1]))
    base, largest_k, r = scale_of(m)
    w = f32(exp_double(-f64(r + log_s)))
    columns = _Columns([], [], [])
    for v, x in enumerate(row):
        p = Fraction(0)
        if x != -math.inf and f32(Fraction(x) - base) > f32((largest_k - 125) * Fraction(LOG2)):
            k, e = split(Fraction(x), base)
            p = f32(w * Fraction(2) ** (k - largest_k) * e)
        score = _subtract(0.0, float(p))
        if v in targets:
            of_target = Fraction(0)
            if x != -math.inf:
                of_target = exp_double(f64(f64(Fraction(x) - m) - log_s))
            p, score = f32(of_target), float(f32(f64(1 - of_target)))
        columns.p.append(float(p))
        columns.score.append(score)
        columns.of_entropy.append(_multiply(float(p), _subtract(below(x, m), gap)))
    return columns


def _element(columns: _Columns, v: int, g: Cotangents, temperature: float) -> float:
    by_temperature = [None if part is None else _divide(part, temperature) for part in g]
    g_logp, g_lse, g_entropy = by_temperature
    a = _multiply(g_logp or 0.0, columns.score[v])
    if g_lse is not None:
        a = _fma(g_lse, columns.p[v], a)
    if g_entropy is not None or temperature != 1:
        a = _fma(g_entropy or 0.0, columns.of_entropy[v], a)
    return a


def gradient(
    row: list[float], token_id: int | None, g: Cotangents, temperature: float = 1
) -> Tensor:
    """[V], float32, of a row of quotients that is scored, before the rounding to a half type."""
    columns = _columns(row, set() if token_id is None else {token_id})
    return torch.tensor([_element(columns, v, g, temperature) for v in range(len(row))])


def gradient_of_ids(
    row: list[float],
    token_ids: Sequence[int],
    of_ids: Sequence[float],
    g: Cotangents,
    temperature: float = 1,
) -> Tensor:
    """With several ids, whose logp has the cotangents `of_ids` and is used."""
    good = [0 <= t < len(row) for t in token_ids]
    used = [a if is_good else 0.0 for a, is_good in zip(of_ids, good, strict=True)]
    own: dict[int, float] = {}
    for t, a, is_good in zip(token_ids, used, good, strict=True):
        if is_good:
            own[t] = _subtract(own.get(t, 0.0), -a)
    c = _subtract(0.0 if g.lse is None else g.lse, _sum_of_ids(used))
    columns = _columns(row, set(own))
    result = []
    for v in range(len(row)):
        has = own.get(v)
        of_column = (0.0, c) if has is None else (has, _subtract(c, -has))
        result.append(_element(columns, v, Cotangents(*of_column, g.entropy), temperature))
    return torch.tensor(result)
