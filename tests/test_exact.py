"""contract="exact": in any order, on any device, in every form; its error bounds."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import calls
import pytest
import torch
from calls import Answer, Problem, assert_same_answer, pick, random_problem
from torch import Tensor

import detlogp
from detlogp import reference
from detlogp.evidence.layouts import LAYOUTS
from detlogp.testing import (
    assert_same_bits,
    available_cpu_paths,
    cpu_path,
    cuda_layout,
    gradient_error_bound,
    logp_error_bound,
    ulp_distance,
)

INF = torch.inf
NAN = torch.nan
TYPES = [torch.float16, torch.bfloat16, torch.float32]


solve = partial(calls.solve, contract="exact")


# ---- any order, any device -----------------------------------------------------------------------

VOCABS = [1, 31, 128, 129, 4097, 10241, 32000, 50257]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_any_order_of_columns(
    vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(5, vocab, dtype, device, generator)
    expected = solve(problem)
    order = torch.randperm(vocab, generator=generator).to(device)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(vocab, device=device))
    shuffled = problem._replace(logits=problem.logits[:, order], token_ids=place[problem.token_ids])
    answer = solve(shuffled)
    assert_same_answer(answer._replace(gradient=answer.gradient[:, place]), expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(
    layout: str, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(13, vocab, dtype, device, generator)
    expected = solve(problem)
    for other in LAYOUTS[layout](problem, generator):
        found = pick(solve(Problem(*other.parts)), other.take)
        assert_same_answer(found, pick(expected, other.rows))


@pytest.mark.parametrize("path", available_cpu_paths())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_cpu_paths(vocab: int, dtype: torch.dtype, path: str, generator: torch.Generator) -> None:
    problem = random_problem(4, vocab, dtype, "cpu", generator)
    with cpu_path("portable"):
        expected = solve(problem)
    with cpu_path(path):
        assert_same_answer(solve(problem), expected)


def on_cpu(problem: Problem) -> Problem:
    return Problem(*(part.cpu() for part in problem))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["auto", "rows", "ring1", "ring2", "ring4", "ring8"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [*VOCABS, 151936])
def test_cuda_is_the_cpu(
    vocab: int, dtype: torch.dtype, layout: str, generator: torch.Generator
) -> None:
    problem = random_problem(300 if vocab < 20000 else 67, vocab, dtype, "cuda", generator)
    problem.logits[1::7] += 300
    problem.logits[2, 0] = NAN
    problem.logits[3, -1] = INF
    problem.logits[4] = -INF
    problem.logits[5, vocab // 3 :] = -INF
    problem.token_ids[6] = -100
    with cuda_layout(layout):
        answer = solve(problem)
    expected = solve(on_cpu(problem))
    assert_same_answer(Answer(*(part.cpu() for part in answer)), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES)
def test_ten_million_rows(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Value and lse of 3.5 million rows in each of three types, CPU against CUDA."""
    for step in range(7):
        vocab = int(torch.randint(2, 100, (1,), generator=generator))
        logits = torch.randn(500_000, vocab, device="cuda") * (0.3 + 2 * step)
        logits = logits.to(dtype)
        ids = torch.randint(vocab, (500_000,), device="cuda")
        found = detlogp.logp(logits, ids, contract="exact", return_lse=True)
        expected = detlogp.logp(logits.cpu(), ids.cpu(), contract="exact", return_lse=True)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one.cpu(), other)


# ---- the semantics table -------------------------------------------------------------------------

TABLE: list[tuple[list[float], int, float, float, list[float]]] = [
    ([0.0, 0.0], -100, 0.0, -INF, [0.0, 0.0]),
    ([NAN, 0.0], 7, 0.0, -INF, [0.0, 0.0]),
    ([NAN, 1.0, 2.0], 1, NAN, NAN, [NAN] * 3),
    ([1.0, 2.0, NAN], 1, NAN, NAN, [NAN] * 3),
    ([INF, 1.0, 2.0], 1, NAN, NAN, [NAN] * 3),
    ([INF, INF], 0, NAN, NAN, [NAN] * 2),
    ([-INF, -INF], 0, NAN, -INF, [NAN] * 2),
    ([-INF, 0.0, 0.0], 0, -INF, math.log(2), [1.0, -0.25, -0.25]),
    ([0.0, -INF], 0, 0.0, 0.0, [0.5, 0.0]),
    ([5.0], 0, 0.0, 5.0, [0.5]),
    ([-3e38, -3e38], 0, -math.log(2), -3e38, [0.75, -0.25]),
    ([3e38, -3e38], 0, 0.0, 3e38, [0.5, 0.0]),
]


@pytest.mark.parametrize(("row", "token_id", "value", "lse", "grad"), TABLE)
def test_semantics(
    row: list[float], token_id: int, value: float, lse: float, grad: list[float], device: str
) -> None:
    """With cotangents 1 and 0.5."""
    one = torch.tensor(1.0, device=device)
    logits = torch.tensor(row, device=device)
    answer = solve(Problem(logits, torch.tensor(token_id, device=device), one, one / 2))
    assert answer.logp.item() == pytest.approx(value, nan_ok=True)
    assert answer.lse.item() == pytest.approx(lse, nan_ok=True)
    assert answer.gradient.tolist() == pytest.approx(grad, nan_ok=True, abs=1e-7)


def test_forms(device: str, generator: torch.Generator) -> None:
    """rows, out, dtype, float64 logits, the object, on_invalid, inplace_backward."""
    problem = random_problem(6, 300, torch.float32, device, generator)
    x, ids = problem[:2]
    expected = detlogp.logp(x, ids, contract="exact")
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    indexed = detlogp.logp(x, ids, rows=mask, contract="exact")
    assert_same_bits(indexed, torch.where(mask, expected, 0.0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        out = torch.full((6,), 7.0, dtype=dtype, device=device)
        detlogp.logp(x, ids, rows=mask, out=out, contract="exact")
        assert_same_bits(out, torch.where(mask, expected.to(dtype), 7.0))
    half = detlogp.logp(x, ids, dtype=torch.bfloat16, contract="exact")
    assert_same_bits(half, expected.bfloat16())
    wide = detlogp.logp(x.double(), ids, dtype=torch.float32, contract="exact")
    assert_same_bits(wide, expected)
    op = detlogp.DeterministicLogp(contract="exact")
    assert_same_bits(op(x, ids), expected)
    bad = ids.clone()
    bad[2] = 300
    marked = detlogp.logp(x, bad, contract="exact", on_invalid="nan")
    assert marked.isnan().tolist() == [row == 2 for row in range(6)]
    leaf = x.clone().requires_grad_()
    detlogp.logp(leaf * 1, ids, contract="exact", inplace_backward=True).sum().backward()
    plain = x.clone().requires_grad_()
    detlogp.logp(plain, ids, contract="exact").sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert_same_bits(leaf.grad, plain.grad)


def test_double_arithmetic_is_refused(device: str) -> None:
    x, ids = torch.zeros(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    message = "contract must be 'locked' in double arithmetic .*, got 'exact'"
    for arguments in ((x.double(), None), (x, torch.float64)):
        with pytest.raises(ValueError, match=message):
            detlogp.logp(arguments[0], ids, dtype=arguments[1], contract="exact")
    with pytest.raises(ValueError, match=message):
        detlogp.DeterministicLogp(contract="exact").apply_fp64(x, ids)


# ---- derivatives ---------------------------------------------------------------------------------


def test_derivatives(device: str, generator: torch.Generator) -> None:
    """A transform's value has the plain call's bits, and so has a gradient that has a graph."""
    problem = random_problem(4, 60, torch.float32, device, generator)
    x, ids = problem[:2]
    expected = solve(problem._replace(grad_lse=torch.zeros_like(problem.grad_lse)))

    def f(logits: Tensor) -> Tensor:
        return detlogp.logp(logits, ids, contract="exact")

    value, pullback, *_ = torch.func.vjp(f, x)
    assert_same_bits(value, expected.logp)
    (grad,) = pullback(problem.grad_logp)
    leaf = x.clone().requires_grad_()
    (with_graph,) = torch.autograd.grad(f(leaf), leaf, problem.grad_logp, create_graph=True)
    plain = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(plain), plain, problem.grad_logp)
    assert_same_bits(grad, first)
    assert_same_bits(with_graph.detach(), first)
    loop = torch.stack(
        [detlogp.logp(row, i, contract="exact") for row, i in zip(x, ids, strict=True)]
    )
    mapped = torch.func.vmap(lambda row, i: detlogp.logp(row, i, contract="exact"))(x, ids)
    assert_same_bits(mapped, loop)
    assert_same_bits(mapped, expected.logp)

    def reference_logp(logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True).detach()
        total = shifted.exp().sum(-1).log()
        return shifted.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - total

    u, w = (torch.randn(4, 60, generator=generator).to(device) for _ in range(2))
    for order in (1, 2, 3):
        found = nested_jvp(f, x, u, order)
        exact = nested_jvp(reference_logp, x.double(), u.double(), order)
        assert torch.allclose(found.double(), exact, atol=2e-5, rtol=1e-4)
    hvp = hessian_product(f, x, w)
    exact = hessian_product(reference_logp, x.double(), w.double())
    assert torch.allclose(hvp.double(), exact, atol=1e-6, rtol=1e-5)


def hessian_product(f: Any, x: Tensor, u: Tensor) -> Tensor:
    def total(t: Tensor) -> Tensor:
        result: Tensor = f(t).sum()
        return result

    product: Tensor = torch.func.jvp(torch.func.grad(total), (x,), (u,))[1]
    return product


def nested_jvp(f: Any, x: Tensor, u: Tensor, order: int) -> Tensor:
    if order == 0:
        result: Tensor = f(x)
        return result
    tangent: Tensor = torch.func.jvp(lambda t: nested_jvp(f, t, u, order - 1), (x,), (u,))[1]
    return tangent


# ---- accuracy ------------------------------------------------------------------------------------


def _adversaries(vocab: int) -> dict[str, Tensor]:
    """A row each: all mass in one token; equal logits; equal tiny terms beside one large."""
    alone = torch.full((vocab,), -30.0)
    alone[vocab // 2] = 5.0
    beside = torch.full((vocab,), 0.3)
    beside[0] = 0.3 + math.log(vocab)
    rows = {"alone": alone, "beside": beside}
    for value in (0.0, 7.0, 0.3466, -100.3, 1e7):
        rows[f"equal {value}"] = torch.full((vocab,), value)
    return rows


@pytest.mark.parametrize("vocab", [3, 1000, 2**20, 2**20 + 1, 2**21])
def test_adversarial_rows(vocab: int, device: str) -> None:
    for name, row in _adversaries(vocab).items():
        for token_id in (0, vocab // 2):
            x = row[None].to(device)
            ids = torch.tensor([token_id], device=device)
            error = detlogp.logp(x, ids, contract="exact").double() - reference.logp(x, ids).logp
            bound = logp_error_bound(x, ids, contract="exact")
            assert error.abs().item() <= bound.item(), (name, token_id)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [2, 3, 31, 1000, 50257, 2**20])
def test_error(vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Random rows: within 1 ulp; value and gradient within the bounds for any row."""
    rows = max(4, 200_000 // vocab)
    for scale in (0.5, 3.0, 20.0):
        problem = random_problem(rows, vocab, dtype, device, generator)
        problem = problem._replace(logits=(problem.logits * (scale / 3)).to(dtype))
        answer = solve(problem)
        exact = reference.logp(*problem[:2]).logp
        assert ulp_distance(answer.logp, exact).max() <= 1
        error = (answer.logp.double() - exact).abs()
        assert (error <= logp_error_bound(*problem[:2], contract="exact")).all()
        grad = reference.gradient(*problem)
        magnitude = problem.grad_logp.abs() + problem.grad_lse.abs()
        p = reference.probability(problem.logits)
        allowed = gradient_error_bound(p, magnitude, grad, dtype, contract="exact")
        assert ((answer.gradient.double() - grad).abs() <= allowed).all()


def test_near_certain(device: str) -> None:
    """At least 5 times closer than the locked contract; the floor is that of the quanta."""
    from near_certain import FLOOR, near_certain_rows

    logits = near_certain_rows(1)[:256].to(device)
    ids = torch.zeros(256, dtype=torch.int64, device=device)
    exact = reference.logp(logits, ids).logp
    assert ((exact < -0.9e-6) & (exact > -1.1e-3)).all()
    error = {
        contract: (detlogp.logp(logits, ids, contract=contract).double() - exact).abs()
        for contract in ("locked", "exact")
    }
    assert error["exact"].median() * 5 <= error["locked"].median()
    assert (error["exact"] <= FLOOR + 2.0**-22 * exact.abs()).all()


def test_real_rows(device: str) -> None:
    """The tiny model's logits of a text, at every position: within 1 ulp, in each type."""
    transformers = pytest.importorskip("transformers")
    root = Path(__file__).parents[1] / "examples"
    folder = root / "tiny-llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ids = tokenizer((root / "held-out.txt").read_text(), return_tensors="pt").input_ids[:, :256]
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].to(device)
    targets = ids[0, 1:].to(device)
    assert len(targets) >= 200
    for dtype in TYPES:
        x = logits.to(dtype)
        found = detlogp.logp(x, targets, contract="exact")
        assert ulp_distance(found, reference.logp(x, targets).logp).max() <= 1
