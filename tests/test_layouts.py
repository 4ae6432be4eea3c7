"""Every layout of the CUDA forward gives the same bits: blocks a row, and one read or two."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import detlogp
from detlogp.testing import CUDA_LAYOUTS, assert_same_bits, cuda_layout

OTHERS = CUDA_LAYOUTS[1:]

pytestmark = pytest.mark.cuda


def score(layout: str, logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """logp, lse, m and log(s) of every row."""
    with cuda_layout(layout):
        return list(torch.ops.detlogp.logp_with_stats(logits, ids, mask, 2, 2, False, False))


def assert_all_layouts_agree(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> None:
    expected = score("rows", logits, ids, mask)
    for layout in (*OTHERS, "auto"):
        for actual, wanted in zip(score(layout, logits, ids, mask), expected, strict=True):
            assert_same_bits(actual, wanted)


def random_rows(
    rows: int, vocab: int, dtype: torch.dtype, generator: torch.Generator, *, start: int = 0
) -> tuple[Tensor, Tensor]:
    """N(0, 3) logits whose first row begins `start` elements behind an aligned address, and ids."""
    cells = torch.randn(rows * vocab + start, generator=generator).mul_(3).to("cuda", dtype)
    ids = torch.randint(vocab, (rows,), generator=generator).cuda()
    return cells[start:].view(rows, vocab), ids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [4097, 8191, 8192, 8193, 12345, 32000, 50257, 151936])
def test_widths(vocab: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Also more rows than fit on the device at a time, so that every slot of a ring comes round."""
    logits, ids = random_rows(31, vocab, dtype, generator)
    rows = 600 if vocab > 50257 else 1200
    logits = logits.repeat(40, 1)[:rows]
    assert_all_layouts_agree(logits, ids.repeat(40)[:rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("start", range(1, 8))
def test_alignments(start: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    assert_all_layouts_agree(*random_rows(9, 20480, dtype, generator, start=start))
    assert_all_layouts_agree(*random_rows(9, 20481, dtype, generator, start=start))


def test_slices_of_a_padded_vocabulary(generator: torch.Generator) -> None:
    logits, ids = random_rows(40, 152064, torch.bfloat16, generator)
    assert_all_layouts_agree(logits[:, :151936], ids % 151936)
    assert_all_layouts_agree(
        logits.view(4, 10, -1).transpose(0, 1)[..., 3:60003], ids.view(10, 4) % 60000
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_are_not_scored(dtype: torch.dtype, generator: torch.Generator) -> None:
    logits, ids = random_rows(700, 10240, dtype, generator)
    ids[::7] = -100
    ids[3::11] = 10240
    mask = (torch.rand(700, generator=generator) < 0.1).cuda()
    assert_all_layouts_agree(logits, ids, mask)
    assert_all_layouts_agree(logits, ids, torch.zeros_like(mask))
    assert_all_layouts_agree(logits, torch.full_like(ids, -1))


def _one_nan(row: Tensor) -> None:
    row[12345] = torch.nan


def _one_infinity(row: Tensor) -> None:
    row[7] = torch.inf


def _leading_tiles(row: Tensor) -> None:
    row[:30000] = -torch.inf


def _all_but_one(row: Tensor) -> None:
    row.fill_(-torch.inf)
    row[40000] = 1.5


def _all(row: Tensor) -> None:
    row.fill_(-torch.inf)


def _far_below_the_max(row: Tensor) -> None:
    """Terms whose exp is subnormal, or nearly."""
    row.uniform_(-104, -84)
    row[-1] = 0


def _common_offset(row: Tensor) -> None:
    row.sub_(1e4)


def _parts_far_below(row: Tensor) -> None:
    """Stages with and without such terms, and the bound between."""
    row[8::4096] = -120
    row[20000:30000] = -88
    row[-9000:].uniform_(-78, -68)


def _tiny(row: Tensor) -> None:
    """Differences that only the lowest bits of 2^f show."""
    row.mul_(1e-5)


def _largest(row: Tensor) -> None:
    row.copy_(torch.finfo(row.dtype).max * torch.rand_like(row, dtype=torch.float32).sub_(0.5))


def _zeros(row: Tensor) -> None:
    """Of either sign."""
    row.copy_(torch.zeros_like(row).copysign(row))


def _lowest(row: Tensor) -> None:
    row.fill_(torch.finfo(row.dtype).min)
    row[100:40000] = -torch.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "change",
    [
        _one_nan,
        _one_infinity,
        _leading_tiles,
        _all_but_one,
        _all,
        _far_below_the_max,
        _common_offset,
        _parts_far_below,
        _tiny,
        _largest,
        _zeros,
        _lowest,
    ],
)
def test_special_rows(
    change: Callable[[Tensor], None], dtype: torch.dtype, generator: torch.Generator
) -> None:
    logits, ids = random_rows(5, 50257, dtype, generator)
    change(logits[2])
    assert_all_layouts_agree(logits, ids)


def test_strided_columns(generator: torch.Generator) -> None:
    logits, ids = random_rows(5, 20481, torch.float32, generator)
    assert_all_layouts_agree(logits.t().contiguous().t(), ids)


def test_the_layouts_are_used(generator: torch.Generator) -> None:
    """Otherwise the tests above would compare one kernel with itself."""
    logits, ids = random_rows(200, 151936, torch.bfloat16, generator)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for layout, rows, name in (
        ("auto", 200, "forward_ring_kernel"),
        ("auto", 3, "few_rows_kernel"),
        ("few", 200, "few_rows_kernel"),
        ("rows", 200, "forward_kernel"),
    ):
        with cuda_layout(layout):
            detlogp.logp(logits[:rows], ids[:rows])
            with torch.profiler.profile(activities=activities, acc_events=True) as profile:
                detlogp.logp(logits[:rows], ids[:rows])
                torch.cuda.synchronize()
        assert any(name in event.key for event in profile.key_averages())


def test_wrong_name() -> None:
    with pytest.raises(RuntimeError, match="ring3"), cuda_layout("ring3"):
        pass
