"""contract="exact": the bits of docs/exact.md, from the page in whole numbers and fractions."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from calls import all_of
from exact_gradient import Cotangents, gradient, gradient_of_ids
from exact_reference import LOG2, entropy, f32, log_sum, logp, total
from torch import Tensor

import detlogp
from detlogp._guards import call
from detlogp._native import EXACT, logp_with_stats_op
from detlogp.testing import assert_same_bits

INF = torch.inf
TYPES = [torch.float16, torch.bfloat16, torch.float32]
RESULTS = ("logp", "lse", "entropy")
USED = [[name for i, name in enumerate(RESULTS) if which >> i & 1] for which in range(1, 8)]


def _rows(vocab: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows of several kinds: scales, offsets, masks, ties, zeros, one that takes all."""
    plain = torch.randn(9, vocab, generator=generator, dtype=torch.float64)
    scale = torch.tensor([0.1, 3, 30, 3, 3, 3, 0, 3, 0]).double().unsqueeze(-1)
    offset = torch.tensor([0, 0, 0, 1e3, -2e5, 3e7, 1.7, 0, 0]).double().unsqueeze(-1)
    rows = (scale * plain + offset).float()
    rows[7, ::2] = -INF
    rows[7, -1] = 40.0
    rows[8] = rows[8].copysign(plain[8])
    if dtype == torch.float16:
        rows = rows.where(rows.isneginf(), rows.clamp(-6e4, 6e4))
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [1, 2, 7, 129, 700])
def test_widths(vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Every result, log(s) as it is kept, and the gradient of logp and lse."""
    logits = _rows(vocab, dtype, generator)
    n = len(logits)
    ids = torch.randint(vocab, (n,), generator=generator)
    grads = torch.randn(2, n, generator=generator)
    on_device = logits.to(device).requires_grad_(), ids.to(device)
    found = all_of(*on_device, contract="exact")
    results = (found.logp, found.lse)
    (actual,) = torch.autograd.grad(results, on_device[0], tuple(grads.to(device)))
    kept = call(logp_with_stats_op, *on_device, None, 2, 2, EXACT, False)[3]
    for row, (numbers, token_id) in enumerate(zip(logits.tolist(), ids.tolist(), strict=True)):
        value, lse, log_s = logp(numbers, token_id)
        assert found.logp[row].item() == value, (row, numbers[:5])
        assert found.lse[row].item() == lse
        assert found.entropy[row].item() == entropy(numbers)[0]
        assert kept[row].item() == float(log_s)
        g = Cotangents(grads[0, row].item(), grads[1, row].item(), None)
        assert_same_bits(actual[row].cpu(), gradient(numbers, token_id, g).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("used", USED, ids=" ".join)
def test_gradient(
    used: list[str],
    temperature: float,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """Of one id and of several, some equal, some bad; the sign of a zero is compared too."""
    vocab = 13
    logits = _rows(vocab, dtype, generator)
    n = len(logits)
    one = torch.randint(vocab, (n,), generator=generator)
    several = torch.randint(-1, vocab + 1, (n, 5), generator=generator)
    several[0], several[1:, 1] = -100, several[1:, 0]
    divisor = float(f32(temperature))
    quotients = (logits.float() / divisor).tolist()
    for ids in (one, several):
        grads = {
            name: torch.randn(ids.shape[: 1 + (name == "logp")], generator=generator)
            for name in RESULTS
        }
        grads["entropy"][n // 2 :] = 0
        leaf = logits.to(device).requires_grad_()
        found: Any = all_of(leaf, ids.to(device), contract="exact", temperature=temperature)
        results = [getattr(found, name) for name in used]
        cotangents = [grads[name].to(device) for name in used]
        (actual,) = torch.autograd.grad(results, leaf, cotangents)
        for row in range(n):
            cotangents_of_row: list[Any] = [
                grads[name][row].tolist() if name in used else None for name in RESULTS
            ]
            of_logp, of_lse, of_entropy = cotangents_of_row
            which: Any = ids[row].tolist()
            if ids is several and of_logp is not None:
                g = Cotangents(None, of_lse, of_entropy)
                expected = gradient_of_ids(quotients[row], which, of_logp, g, divisor)
            else:
                g = Cotangents(of_logp, of_lse, of_entropy)
                token_id = which if ids is one else None
                expected = gradient(quotients[row], token_id, g, divisor)
            assert_same_bits(actual[row].cpu(), expected.to(dtype))


CORNERS: list[list[float]] = [
    [0.0, -125 * LOG2],  # where p is cut to 0
    [12 * LOG2, -32 * LOG2],  # half a quantum: a tie
    [0.0, -1e30, -3.4028234663852886e38],
    *([m, m - 0.5, m - 3.0, m - 20.0] for m in (262143.97, 262144.0, 262144.03, 5e5, 3e6)),
    *([m, m + 1.0, m - 3.0] for m in (-262143.97, -262144.0, -262144.03, -5e5, -3e6)),
    [-INF, -INF, 0.4, -INF],
    [-0.0],
    [1e-40, -1e-45, 0.0],
    [3.4028234663852886e38, 3.4028234663852886e38],
]


@pytest.mark.parametrize("row", CORNERS)
def test_corners(row: list[float], device: str) -> None:
    """Where the steps of the page change their ways, each column as the target."""
    for token_id in range(len(row)):
        leaf = torch.tensor(row, device=device, requires_grad=True)
        found = all_of(leaf, torch.tensor(token_id, device=device), contract="exact")
        numbers = leaf.tolist()
        value, lse, _ = logp(numbers, token_id)
        expected = (value, lse, entropy(numbers)[0])
        assert tuple(part.item() for part in found) == expected
        for g in ((1.0, 0.25, None), (None, None, 1.0), (1.0, 0.25, -3.0)):
            used = [i for i, part in enumerate(g) if part is not None]
            cotangents = [torch.tensor(g[i], device=device) for i in used]
            results = [found[i] for i in used]
            (actual,) = torch.autograd.grad(results, leaf, cotangents, retain_graph=True)
            assert_same_bits(actual.cpu(), gradient(numbers, token_id, Cotangents(*g)))


@pytest.mark.parametrize("vocab", [2**20, 2**20 + 1, 2**21 + 5])
def test_wide_rows(vocab: int, device: str) -> None:
    """Their quantum is coarser; all columns but one are equal, so the sum is one product."""
    logits = torch.full((1, vocab), -29.0, device=device)
    logits[0, 0] = 0.0
    found = detlogp.logp(logits, torch.zeros(1, dtype=torch.int64, device=device), contract="exact")
    zero, other = Fraction(0), Fraction(-29)
    whole = total([zero], zero, vocab) + (vocab - 1) * total([other], zero, vocab)
    assert found.item() == float(f32(-log_sum(zero, vocab, whole)))


def test_a_certain_token_has_no_gradient(device: str, generator: torch.Generator) -> None:
    """Exactly: also where it stands alone, and where the others vanish beside it."""
    x = torch.linspace(-30, 30, 2001, device=device)
    for rows in (x[:, None], torch.stack([x, x - 300, x - 400], -1)):
        ids = torch.zeros(2001, dtype=torch.int64, device=device)
        leaf = rows.clone().requires_grad_()
        detlogp.logp(leaf, ids, contract="exact").sum().backward()
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_parts_add_up(generator: torch.Generator) -> None:
    """A row cut anywhere: the whole numbers of its parts make its log(s)."""
    row = (3 * torch.randn(300, generator=generator)).tolist()
    numbers = [Fraction(x) for x in row]
    m = max(numbers)
    whole = total(numbers, m, 300)
    for cut in (0, 1, 77, 299, 300):
        parts = total(numbers[:cut], m, 300) + total(numbers[cut:], m, 300)
        assert log_sum(m, 300, parts % 2**64) == log_sum(m, 300, whole)
