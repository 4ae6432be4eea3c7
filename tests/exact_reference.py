"""The exact contract in whole numbers and fractions, from docs/exact.md alone.

Its constants are read from the page, and its steps are written as the page writes them. It knows
nothing of the library.
"""

import math
import re
from fractions import Fraction
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "exact.md").read_text()


def _constants(name: str) -> list[float]:
    """The hexadecimal numbers of the page's code block `name`, in their order."""
    block = re.search(rf"```text\n{name}\n(.*?)```", PAGE, re.DOTALL)
    assert block, name
    return [float.fromhex(number) for number in re.findall(r"-?0x[0-9a-f.]+p[+-]\d+", block[1])]


EXP_FLOAT = _constants("exp, float32")
EXP_DOUBLE = _constants("exp, float64")
LOG_DOUBLE = _constants("log, float64")
LOG2, LOG2_E, LARGE = _constants("constants, float32")
LOG2_E_DOUBLE, LOG2_HIGH, LOG2_LOW, LOG2_HEAD, LOG2_TAIL, ROOT_HALF = _constants(
    "constants, float64"
)


def rounded(value: Fraction, digits: int, lowest_exponent: int) -> Fraction:
    """To `digits` binary digits, to nearest, ties to even; subnormals from `lowest_exponent` on."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, lowest_exponent) - digits + 1)
    return round(value / unit) * unit


def f32(value: Fraction | float) -> Fraction:
    return rounded(Fraction(value), 24, -126)


def f64(value: Fraction | float) -> Fraction:
    return rounded(Fraction(value), 53, -1022)


def quanta_bits(vocab: int) -> int:
    bits = 0
    while 2**bits < vocab:
        bits += 1
    return 43 if bits <= 20 else 63 - bits


def split(x: Fraction, base: Fraction) -> tuple[int, Fraction]:
    """(k, e) of a finite logit: its exponential is 2^k e."""
    y = f32(x - base)
    k = round(y * Fraction(LOG2_E))
    r = f32(y - k * Fraction(LOG2))
    e = Fraction(EXP_FLOAT[0])
    for coefficient in EXP_FLOAT[1:]:
        e = f32(e * r + Fraction(coefficient))
    return k, e


def scale_of(m: Fraction) -> tuple[Fraction, int, Fraction]:
    """What a row's elements share: c, and K and r of the max."""
    base = Fraction(0) if abs(m) < Fraction(LARGE) else m
    largest_k, _ = split(m, base)
    return base, largest_k, f32(m - base) - largest_k * Fraction(LOG2)


def exp_double(x: Fraction) -> Fraction:
    k = round(x * Fraction(LOG2_E_DOUBLE))
    if k < -1022:
        return Fraction(0)
    r = f64(x - k * Fraction(LOG2_HIGH))
    r = f64(r - k * Fraction(LOG2_LOW))
    e = Fraction(EXP_DOUBLE[0])
    for coefficient in EXP_DOUBLE[1:]:
        e = f64(e * r + Fraction(coefficient))
    return f64(Fraction(2) ** k * e)


def log_double(x: Fraction) -> Fraction:
    """x >= 1."""
    k = 0
    while x / Fraction(2) ** k >= 2 * Fraction(ROOT_HALF):
        k += 1
    f = f64(x / Fraction(2) ** k - 1)
    s = f64(f / f64(2 + f))
    z = f64(s * s)
    poly = Fraction(LOG_DOUBLE[0])
    for coefficient in LOG_DOUBLE[1:]:
        poly = f64(poly * z + Fraction(coefficient))
    half_square = f64(f64(f / 2) * f)
    tail = f64(s * f64(half_square + f64(z * poly)))
    low = f64(k * Fraction(LOG2_TAIL) + tail)
    return f64(f64(k * Fraction(LOG2_HEAD)) - f64(f64(half_square - low) - f))


def term(x: Fraction, base: Fraction, largest_k: int, bits: int) -> int:
    if f32(x - base) <= f32((largest_k - 2 - bits) * Fraction(LOG2)):
        return 0
    k, e = split(x, base)
    return round(Fraction(2) ** (k - largest_k + bits) * e)


def total(row: list[Fraction], m: Fraction, vocab: int) -> int:
    """S of some of a row's columns: sums of parts add up."""
    base, largest_k, _ = scale_of(m)
    bits = quanta_bits(vocab)
    return sum(term(x, base, largest_k, bits) for x in row) % 2**64


def sum_of(m: Fraction, vocab: int, whole: int) -> tuple[Fraction, Fraction]:
    """(M, s') of the whole number S."""
    base, largest_k, r = scale_of(m)
    bits = quanta_bits(vocab)
    of_max = f64(exp_double(r) * Fraction(2) ** bits)
    of_others = f64((whole - term(m, base, largest_k, bits)) % 2**64)
    return of_max, f64(of_others / of_max)


def log_sum(m: Fraction, vocab: int, whole: int) -> Fraction:
    return log_double(f64(1 + sum_of(m, vocab, whole)[1]))


def logp(row: list[float], token_id: int) -> tuple[float, float, Fraction]:
    """logp and lse in float32, and log(s), of a row of finite logits or -inf."""
    finite = [Fraction(x) for x in row if x != float("-inf")]
    m = max(finite)
    log_s = log_sum(m, len(row), total(finite, m, len(row)))
    lse = float(f32(f64(m + log_s)))
    if row[token_id] == float("-inf"):
        return float("-inf"), lse, log_s
    return float(f32(f64(f64(Fraction(row[token_id]) - m) - log_s))), lse, log_s


def below(x: float, m: Fraction) -> float:
    """d[v]; of m, a fraction, a zero is +0."""
    if x == -math.inf:
        return 128.0
    difference = float(f32(Fraction(x) - m))
    return min(-math.copysign(difference, x - float(m)), 128.0)


def entropy(row: list[float]) -> tuple[float, Fraction]:
    """Entropy in float32, and gap, of a row of finite logits or -inf."""
    numbers = [Fraction(x) for x in row if x != float("-inf")]
    m, bits = max(numbers), quanta_bits(len(row))
    base, largest_k, _ = scale_of(m)
    lowest = f32((largest_k - 30 - bits) * Fraction(LOG2))
    whole = 0
    for x in row:
        if x != float("-inf") and f32(Fraction(x) - base) >= lowest:
            k, e = split(Fraction(x), base)
            term_of_x = Fraction(2) ** (k - largest_k + bits) * e
            whole += round(f32(term_of_x * Fraction(below(x, m))))
    of_max, s = sum_of(m, len(row), total(numbers, m, len(row)))
    gap = f64(f64(whole) / f64(of_max * f64(1 + s)))
    return float(f32(f64(log_double(f64(1 + s)) + gap))), gap


def row_sum(terms: list[float], vocab: int | None = None) -> float:
    """Of finite terms of either sign, in float32."""
    bits = 0
    while 2**bits < (vocab or len(terms)):
        bits += 1
    largest = max(abs(Fraction(a)) for a in terms)
    exponent = -80
    while Fraction(2) ** (exponent + 1) <= largest:
        exponent += 1
    unit = Fraction(2) ** (exponent - (42 if bits <= 19 else 61 - bits))
    whole = sum(round(Fraction(a) / unit) for a in terms)
    return float(f32(f64(whole) * unit))
