"""The exponentials of csrc/cuda/exp.h: each shorter way has the bits of the first.

The machine code is that of the header: its assembly is read from there and run by Triton.
"""

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton: Any = pytest.importorskip("triton")
tl: Any = pytest.importorskip("triton.language")

HEADER = Path(__file__).parents[1] / "csrc" / "cuda" / "exp.h"
MAGIC = 1.5 * 2.0**23
NEAR = -87.0  # above it exp(x) is not subnormal
pytestmark = pytest.mark.cuda


def constant(name: str, header: Path = HEADER) -> float:
    found = re.search(rf"constexpr (?:int|float) {name} = ([^;f]+)f?;", header.read_text())
    assert found is not None
    return float.fromhex(found[1]) if found[1].startswith("0x") else float(found[1])


def immediate(value: float) -> str:
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


LOG2_SCALE = int(constant("kLog2TermScale"))


def function(signature: str) -> str:
    """The text of a function of the header."""
    text = HEADER.read_text()
    begin = text.index(signature)
    return text[begin : text.index("\n}\n", begin)]


def assembly(signature: str, *operands: str) -> str:
    """Its assembly, with these operands."""
    lines = re.findall(r'^ +"(.*?)\\n"', function(signature), flags=re.MULTILINE)
    return re.sub(r"%(\d)", lambda match: operands[int(match[1])], " ".join(lines))


def of_parts(log2_scale: int) -> str:
    """fraction and power of $1."""
    low, high = (immediate(MAGIC + log2_scale + bits) for bits in (1, 127))
    return assembly("ExpParts exp_parts(float x)", "fraction", "power", "$1", low, high)


def of_near(signature: str) -> str:
    """term of $1, from `shifted` as that function of the header makes it."""
    text = function(signature)
    factor = immediate(float.fromhex(re.search(r"__fmaf_r[nd]\(x, (\S+)f,", text)[1]))  # type: ignore[index]
    scale = immediate(MAGIC + LOG2_SCALE)
    if "__saturatef" in text:
        assert "0.5f" in text
        assert "252.0f, kMagic + (kLog2TermScale - 126)" in text
        scaled = immediate(MAGIC + LOG2_SCALE - 126)
        first = f"fma.rn.sat.f32 shifted, $1, {factor}, {immediate(0.5)};"
        first += f"fma.rm.f32 shifted, shifted, {immediate(252.0)}, {scaled};"
    else:
        assert "kMagic + kLog2TermScale)" in text
        first = f"fma.rm.f32 shifted, $1, {factor}, {scale};"
    inner = assembly("near_term_of(float x, float shifted)", "term", "$1", "shifted", scale)
    return first + inner


def added(code: str, product: str) -> str:
    """Adds the product to $2."""
    registers = ".reg .f32 fraction, power, term, shifted;"
    return f"{{ {registers} {code} fma.rn.f32 $0, {product}, $2; }}"


UNSCALE = immediate(2.0**-LOG2_SCALE)
GOLDEN = added(of_parts(0), "fraction, power")
ANY = added(f"{of_parts(LOG2_SCALE)} mul.rn.f32 term, fraction, power;", f"term, {UNSCALE}")
NEARBY = added(of_near("near_term_of(float x) {"), f"term, {UNSCALE}")
BFLOAT16 = added(of_near("near_bfloat16_term_of(float x)"), f"term, {UNSCALE}")


@triton.jit
def compare_floats(out, last, start, golden: tl.constexpr, other: tl.constexpr):  # type: ignore[no-untyped-def]
    block: tl.constexpr = 1024
    bits = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    x = (bits.to(tl.int32) | -2147483648).to(tl.float32, bitcast=True)
    s = tl.zeros_like(x) + start
    a = tl.inline_asm_elementwise(golden, "=f,f,f", [x, s], tl.float32, True, 1)
    b = tl.inline_asm_elementwise(other, "=f,f,f", [x, s], tl.float32, True, 1)
    differ = (a.to(tl.int32, bitcast=True) != b.to(tl.int32, bitcast=True)) & (bits <= last)
    tl.atomic_add(out, tl.sum(differ.to(tl.int64), 0))


@triton.jit
def compare_pairs(out, seen, golden: tl.constexpr, other: tl.constexpr):  # type: ignore[no-untyped-def]
    block: tl.constexpr = 1024
    m = (tl.program_id(0) << 16).to(tl.float32, bitcast=True)
    for first in range(0, 65536, block):
        x = ((first + tl.arange(0, block)) << 16).to(tl.float32, bitcast=True)
        d = x - m
        is_pair = (d <= 0) & (d > -87.0) & (tl.abs(m) >= 0.0009765625)
        zero = tl.zeros_like(d)
        a = tl.inline_asm_elementwise(golden, "=f,f,f", [d, zero], tl.float32, True, 1)
        b = tl.inline_asm_elementwise(other, "=f,f,f", [d, zero], tl.float32, True, 1)
        differ = is_pair & (a.to(tl.int32, bitcast=True) != b.to(tl.int32, bitcast=True))
        tl.atomic_add(out, tl.sum(differ.to(tl.int64), 0))
        tl.atomic_add(seen, tl.sum(is_pair.to(tl.int64), 0))


def counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device="cuda")


def differing_floats(least: float, start: float, other: str) -> int:
    """How many x, least <= x <= -0, give another start + exp(x)."""
    last = struct.unpack("<I", struct.pack("<f", -least))[0]
    out = counter()
    compare_floats[(last // 1024 + 1,)](out, last, start, GOLDEN, other)
    return int(out)


def differing_pairs(other: str) -> tuple[int, int]:
    """How many pairs (x, m) of bfloat16 give another exp(x - m), and of how many."""
    out, seen = counter(), counter()
    compare_pairs[(65536,)](out, seen, GOLDEN, other)
    return int(out), int(seen)


def count_pairs() -> int:
    """The same number by torch."""
    bits = torch.arange(65536, dtype=torch.int32, device="cuda") << 16
    values = bits.view(torch.float32)
    count = 0
    for m in values[values.abs() >= 2.0**-10].split(1024):
        d = values - m[:, None]
        count += int(((d <= 0) & (d > NEAR)).sum())
    return count


@pytest.mark.parametrize("start", [0.0, 2.0**-149, 2.0**-126, 3e-30, 1.0, 1.75, 1000.3])
def test_terms_of_any_x_give_the_sum_its_bits(start: float) -> None:
    assert differing_floats(float("-inf"), start, ANY) == 0


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_terms_of_near_x_give_the_sum_its_bits(start: float) -> None:
    assert differing_floats(NEAR, start, NEARBY) == 0


def test_near_logits_are_near_enough_and_their_max_is_large_enough() -> None:
    """Than the bounds of the comparisons here; a quotient may be 1 further away."""
    assert constant("kNear", HEADER.parent / "ring" / "near.h") + 1 < -NEAR
    assert constant("kLeastMax") == 2.0**-10
    assert constant("kTermScale") == 2.0**LOG2_SCALE


def test_exp_of_the_smallest_is_one() -> None:
    """Where differences are subnormal, their products with it are exact at any scale."""
    assert differing_floats(-(2.0**-100), 0.0, "{ mov.f32 $0, 0f3F800000; }") == 0


def test_near_terms_are_not_for_all_x() -> None:
    assert differing_floats(float("-inf"), 0.0, NEARBY) > 0


def test_bfloat16_terms_are_those_of_every_pair() -> None:
    differing, seen = differing_pairs(BFLOAT16)
    assert seen == count_pairs()
    assert differing == 0


def test_bfloat16_terms_with_another_factor_differ() -> None:
    factor, other = (immediate(float.fromhex(f"0x1.7154{end}p+0")) for end in ("74", "70"))
    assert factor in BFLOAT16
    differing, _ = differing_pairs(BFLOAT16.replace(factor, other))
    assert differing > 0


def test_bfloat16_terms_are_not_for_all_x() -> None:
    assert differing_floats(NEAR, 0.0, BFLOAT16) > 0
