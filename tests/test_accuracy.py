"""Errors stay inside the bounds that the library exports, against float64 and against mpmath."""

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from calls import Problem, random_problem, solve
from torch import Tensor

import detlogp
from detlogp import reference
from detlogp._native import logp_backward_op
from detlogp.testing import (
    available_cpu_paths,
    cpu_path,
    gradient_error_bound,
    lanes,
    logp_error_bound,
    rounding_bound,
)

VOCABS = [1, 2, 31, 128, 129, 4096, 4097, 50257, 151936]


def assert_within(error: Tensor, bound: Tensor) -> None:
    excess = (error > bound) | error.isnan()
    if bool(excess.any()):
        where = tuple(excess.nonzero()[0].tolist())
        raise AssertionError(f"error {error[where]:.3e} > bound {bound[where]:.3e} at {where}")


def _sharp(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Rows in which one token takes nearly everything."""
    logits = torch.randn(rows, vocab, generator=generator)
    logits[torch.arange(rows), torch.randint(vocab, (rows,), generator=generator)] += 20.0
    return logits


FAMILIES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": lambda rows, vocab, g: 3 * torch.randn(rows, vocab, generator=g),
    "wide": lambda rows, vocab, g: 40 * torch.randn(rows, vocab, generator=g),
    "equal": lambda rows, vocab, g: torch.full((rows, vocab), 7.0),
    "offset": lambda rows, vocab, g: torch.randint(0, 9, (rows, vocab), generator=g) - 1e7,
    "sharp": _sharp,
    "masked": lambda rows, vocab, g: torch.randn(rows, vocab, generator=g).index_fill_(
        1, torch.arange(1, vocab, 2), -torch.inf
    ),
}


def _problem(
    family: str, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> Problem:
    """The ids are column 0 (finite in every family) in even rows, random where all are finite."""
    plain = random_problem(8, vocab, dtype, device, generator)
    logits = FAMILIES[family](8, vocab, generator)
    if family == "offset" and dtype == torch.float16:
        logits += 1e7 - 3e4
    logits = logits.to(dtype).to(device)
    token_ids = plain.token_ids.clone()
    token_ids[::2] = 0
    if family == "masked":
        token_ids -= token_ids % 2
    if family == "sharp":
        token_ids[1::2] = logits[1::2].argmax(-1)
    return plain._replace(logits=logits, token_ids=token_ids)


def _exact(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """logp and gradient of the same inputs; numpy's 80-bit floats where float64 is under test."""
    if problem.logits.dtype != torch.float64:
        logp = reference.logp(problem.logits, problem.token_ids).logp
        return logp, reference.probability(problem.logits), reference.gradient(*problem)
    x = problem.logits.cpu().numpy().astype(np.longdouble)
    ids = problem.token_ids.cpu().numpy()[:, None]
    shifted = x - x.max(-1, keepdims=True)
    e = np.exp(shifted)
    total = e.sum(-1, keepdims=True)
    logp = np.take_along_axis(shifted, ids, -1) - np.log(total)
    grad = problem.grad_logp.cpu().numpy()[:, None]
    onehot = np.arange(x.shape[-1])[None, :] == ids
    p = e / total
    gradient = grad * (onehot - p) + problem.grad_lse.cpu().numpy()[:, None] * p
    parts = (logp[:, 0], p, gradient)
    return tuple(torch.from_numpy(part.astype(np.float64)) for part in parts)  # type: ignore


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradient(
    family: str, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = _problem(family, vocab, dtype, device, generator)
    answer = solve(problem)
    logp, p, gradient = (part.to(device) for part in _exact(problem))
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    bound = logp_error_bound(problem.logits, problem.token_ids, compute)
    # The reference's own rounding to float64, where that is what is under test.
    own = 2.0**-52 if dtype == torch.float64 else 0.0
    assert_within((answer.logp.double() - logp).abs(), bound + own * logp.abs())
    magnitude = problem.grad_logp.abs() + problem.grad_lse.abs()
    error = (answer.gradient.double() - gradient).abs()
    allowed = gradient_error_bound(p, magnitude, gradient, dtype)
    assert_within(error, allowed + own * gradient.abs())
    # What these rows keep is tighter than what is proven for every row.
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    tight = magnitude.double().unsqueeze(-1) * unit * (4 + p * (vocab / lanes(vocab) + 12))
    tight = tight + rounding_bound(gradient.abs() + tight, dtype)
    assert_within(error, tight + own * gradient.abs())


def test_common_offset(device: str) -> None:
    """Case 4: [1, 2, 3] - 1e7 rounds to [-9999999, -9999998, -9999997], all of them exact."""
    base = torch.tensor([1.0, 2.0, 3.0], device=device)
    ids = torch.tensor(1, device=device)
    one = torch.tensor(1.0, device=device)
    near, far = (solve(Problem(x, ids, one, 0 * one)) for x in (base, base - 1e7))
    assert far.logp.item() == pytest.approx(-1.40760596, abs=2e-7)
    assert torch.equal(far.logp, near.logp)
    assert torch.equal(far.gradient, near.gradient)


def test_half_logits_have_float32_results(device: str) -> None:
    """Case 9: a bfloat16 result would be up to 0.03 off near -12."""
    logits = torch.zeros(1, 163000, dtype=torch.bfloat16, device=device)
    result = detlogp.logp(logits, torch.tensor([3], device=device))
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(-float(mpmath.log(163000)), abs=2e-6)


def test_float64_probabilities_sum_to_one(device: str, generator: torch.Generator) -> None:
    """Case 8: V = 517."""
    logits = torch.randn(1, 517, dtype=torch.float64, generator=generator).to(device)
    every = detlogp.logp(logits.expand(517, -1), torch.arange(517, device=device))
    assert every.exp().sum().item() == pytest.approx(1.0, abs=1e-15)


def test_near_certain_gradient(device: str) -> None:
    """onehot - p is formed before the rounding to bfloat16: 1 - 0.99995 is not 0."""
    logits = torch.tensor([[10.0, 0.0]], dtype=torch.bfloat16, device=device)
    one = torch.ones(1, device=device)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    gradient = solve(Problem(logits, ids, one, 0 * one)).gradient[0].double()
    expected = 1 / (1 + float(mpmath.exp(10)))
    assert gradient[0].item() == pytest.approx(expected, rel=2.0**-8)
    assert gradient[1].item() == pytest.approx(-expected, rel=2.0**-8)


# ---- the CPU's own exp and log -------------------------------------------------------------------


def exp_through_gradient(x: Tensor) -> Tensor:
    """exp of each element: the lse gradient p = exp((x - 0) - 0) of one row."""
    row = x.reshape(1, -1)
    zero = torch.zeros(1, dtype=x.dtype)
    ids = torch.zeros(1, dtype=torch.int64)
    p: Tensor = logp_backward_op(row, ids, None, zero, zero, None, zero + 1)
    return p.reshape(x.shape)


@pytest.mark.parametrize("path", available_cpu_paths())
def test_exp_float32(path: str) -> None:
    """Every 61st float from -0 to -87.3: at most 1 ulp. (Every one was checked once: 0.976.)"""
    patterns = torch.arange(0x80000000, 0xC2AE999A, 61 if path != "portable" else 6101)
    x = (patterns - 2**32).to(torch.int32).view(torch.float32)
    with cpu_path(path):
        actual = exp_through_gradient(x).double()
    exact = x.double().exp()
    ulp = torch.exp2(exact.log2().floor() - 23)
    assert ((actual - exact).abs() / ulp).max() <= 1.0


def test_exp_float64(generator: torch.Generator) -> None:
    """Against mpmath: at most 1 ulp."""
    x = -708.3 * torch.rand(4000, dtype=torch.float64, generator=generator) ** 3
    actual = exp_through_gradient(x)
    with mpmath.workprec(120):
        exact = [mpmath.exp(mpmath.mpf(v)) for v in x.tolist()]
        errors = [
            abs(mpmath.mpf(a) - e) / mpmath.ldexp(1, int(mpmath.floor(mpmath.log(e, 2))) - 52)
            for a, e in zip(actual.tolist(), exact, strict=True)
        ]
    assert max(errors) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_special(dtype: torch.dtype) -> None:
    infinity = torch.inf
    x = torch.tensor([0.0, -0.0, -infinity, -1e30, torch.nan, -88.0, -110.0, -750.0], dtype=dtype)
    for path in available_cpu_paths():
        with cpu_path(path):
            actual = exp_through_gradient(x)
        assert actual[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
        assert actual[4].isnan()
        smallest = torch.finfo(dtype).smallest_normal
        assert ((actual[5:] - x[5:].exp()).abs() <= smallest).all()


def test_log_float64(generator: torch.Generator) -> None:
    """log(s) of a row of n equal logits: s = n. At most 1 ulp."""
    counts = torch.tensor([2, 3, 5, 127, 129, 1000, 4097, 151936])
    for n in counts.tolist():
        lse = detlogp.logp(
            torch.zeros(n, dtype=torch.float64), torch.tensor(0), return_lse=True
        ).lse
        with mpmath.workprec(120):
            exact = mpmath.log(n)
            error = abs(mpmath.mpf(lse.item()) - exact)
        assert error <= np.spacing(float(exact))


# ---- widening and narrowing ----------------------------------------------------------------------


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_every_half_is_widened_exactly(half: torch.dtype, device: str) -> None:
    """lse of a row of one logit is that logit."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(half)
    every = every[every.isfinite()]
    ids = torch.zeros(len(every), dtype=torch.int64, device=device)
    lse = detlogp.logp(every.to(device).unsqueeze(1), ids, return_lse=True).lse
    assert torch.equal(lse.cpu(), every.float())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_narrowing_rounds_once(
    half: torch.dtype, wide: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """The gradient of a half logit in wide arithmetic, against numpy and exact midpoints.

    p = 1 for a row of one logit, so the lse gradient is the cotangent itself.
    """
    patterns = torch.arange(0, 2**15).to(torch.int16).view(half)
    patterns = patterns[patterns.isfinite()].to(torch.float64)
    midpoints = (patterns[1:] + patterns[:-1]) / 2
    step = 2.0**-40 if wide == torch.float64 else 2.0**-20
    values = torch.cat([patterns, midpoints, midpoints * (1 + step), midpoints * (1 - step)])
    values = torch.cat([values, -values]).to(wide)
    logits = torch.zeros(len(values), 1, dtype=half, device=device, requires_grad=True)
    ids = torch.zeros(len(values), dtype=torch.int64, device=device)
    lse = detlogp.logp(logits, ids, dtype=wide, return_lse=True).lse
    (gradient,) = torch.autograd.grad(lse, logits, values.to(device))
    actual = gradient.squeeze(1).cpu().double()
    exact = values.double()
    spacing = rounding_bound(exact, half)
    assert_within((actual - exact).abs(), spacing.clamp_min(2.0**-134))
    if half == torch.float16:
        expected = torch.from_numpy(values.numpy().astype(np.float16))
        assert torch.equal(gradient.squeeze(1).cpu(), expected)
        return
    where = torch.cat([torch.arange(len(midpoints)) + len(patterns)] * 2)
    where[len(midpoints) :] += len(values) // 2
    odd = gradient.squeeze(1).cpu()[where].view(torch.int16) & 1
    assert not odd.any(), "a tie goes to the even neighbour"
