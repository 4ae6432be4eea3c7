"""A row's value, lse and gradient have the same bits however the row is presented."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from calls import Answer, Problem, assert_same_answer, pick, random_problem, solve
from torch import Tensor

import detlogp
from detlogp._native import build_info
from detlogp.evidence.layouts import LAYOUTS
from detlogp.testing import assert_same_bits, available_cpu_paths, cpu_path

VOCABS = [1, 31, 128, 129, 257, 4096, 4097, 32000, 50257]
ROWS = 13


def _rows(problem: Problem, order: Tensor | slice) -> Problem:
    return Problem(*(part[order] for part in problem))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(
    layout: str, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(ROWS, vocab, dtype, device, generator)
    expected = solve(problem)
    calls = list(LAYOUTS[layout](problem, generator))
    assert calls
    for call in calls:
        found = pick(solve(Problem(*call.parts)), call.take)
        assert_same_answer(found, pick(expected, call.rows))


def test_the_layouts_are_what_they_say() -> None:
    """A layout that handed on the rows as they are would show nothing."""
    parts = (torch.randn(ROWS, 300), torch.arange(ROWS))
    generator = torch.Generator().manual_seed(0)
    (call,) = LAYOUTS["misaligned by one element"](parts, generator)
    assert call.parts[0].data_ptr() % 16 == 4
    (call,) = LAYOUTS["a slice of a padded vocabulary"](parts, generator)
    assert call.parts[0].stride() == (512, 1)
    (call,) = LAYOUTS["transposed"](parts, generator)
    assert call.parts[0].stride() == (1, ROWS)
    for name in LAYOUTS:
        for call in LAYOUTS[name](parts, generator):
            # The vectors travel with the logits, and the rows come back where they belong.
            assert_same_bits(call.parts[0][call.take], parts[0][call.rows])
            assert torch.equal(call.parts[1][call.take], parts[1][call.rows])


@pytest.mark.parametrize("vocab", [31, 4097, 50257])
def test_leading_shapes(
    vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """Case 15: [S, B, V] transposed to [B, S, V]; and case 32: no leading dimension at all."""
    problem = random_problem(12, vocab, dtype, device, generator)
    expected = solve(problem)
    cube = Problem(*(part.view(3, 4, *part.shape[1:]).transpose(0, 1) for part in problem))
    turned = solve(cube)
    back = Answer(
        *(
            part.transpose(0, 1).reshape(expected_part.shape)
            for part, expected_part in zip(turned, expected, strict=True)
        )
    )
    assert_same_answer(back, expected)
    assert_same_answer(solve(_rows(problem, torch.tensor(5))), pick(expected, torch.tensor(5)))
    ten = Problem(*(part.view(1, 3, 1, 1, 2, 1, 2, 1, 1, *part.shape[1:]) for part in problem))
    flat = Answer(*(part.reshape(e.shape) for part, e in zip(solve(ten), expected, strict=True)))
    assert_same_answer(flat, expected)


def test_expanded_row(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """One row, addressed again and again with stride 0."""
    problem = random_problem(1, 4097, dtype, device, generator)
    expanded = Problem(*(part.expand(5, *part.shape[1:]) for part in problem))
    expected = Answer(*(part.expand(5, *part.shape[1:]) for part in solve(problem)))
    assert_same_answer(solve(expanded), expected)


@pytest.mark.parametrize("vocab", VOCABS)
def test_indexed_equals_dense(
    vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    problem = random_problem(ROWS, vocab, dtype, device, generator)
    numbers = torch.tensor([5, 0, 5, 12, -1, ROWS, 2**40], device=device)
    chosen = torch.tensor([0, 5, 12], device=device)
    expected = pick(solve(problem), chosen)
    assert_same_answer(pick(solve(problem, rows=numbers), chosen), expected)
    mask = torch.zeros(ROWS, dtype=torch.bool, device=device)
    mask[chosen] = True
    assert_same_answer(solve(problem, rows=mask), solve(problem, rows=numbers))


@pytest.mark.parametrize("path", available_cpu_paths())
@pytest.mark.parametrize("vocab", VOCABS)
def test_cpu_paths(path: str, vocab: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    problem = random_problem(3, vocab, dtype, "cpu", generator)
    with cpu_path("portable"):
        expected = solve(problem)
    with cpu_path(path):
        assert build_info()["cpu_path"] == path
        assert_same_answer(solve(problem), expected)


def test_threads(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Cases 1 and 2."""
    problem = random_problem(ROWS, 5000, dtype, "cpu", generator)
    threads = torch.get_num_threads()
    expected = solve(problem)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_same_answer(solve(problem), expected)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def float_environment(name: str) -> Iterator[None]:
    """What a program may have done to this thread: subnormals flushed, or rounding upward."""
    libm = ctypes.CDLL("libm.so.6")
    if name == "flush":
        assert torch.set_flush_denormal(True)
    else:
        upward_on_x86 = 0x800
        assert libm.fesetround(upward_on_x86) == 0
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        libm.fesetround(0)


@pytest.mark.parametrize("name", ["flush", "upward"])
@pytest.mark.parametrize("path", ["auto", "portable"])
def test_float_environment(
    path: str, name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """One thread, so that it is this thread's environment that the kernels meet."""
    problem = random_problem(3, 5000, dtype, "cpu", generator)
    lowest = -740 if dtype == torch.float64 else -95
    problem.logits[-1] = torch.linspace(lowest, 0, 5000, dtype=torch.float64).to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cpu_path(path):
            expected = solve(problem)
            with float_environment(name):
                actual = solve(problem)
            assert_same_answer(actual, expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [70000, 131073])
def test_many_rows(rows: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Case 21: past 65535 in one leading dimension."""
    problem = random_problem(rows, 5, dtype, device, generator)
    last = slice(rows - 3, rows)
    answer = solve(
        problem._replace(
            logits=problem.logits.view(1, rows, 5),
            **{name: getattr(problem, name).view(1, rows) for name in Problem._fields[1:]},
        )
    )
    squeezed = Answer(*(part[0] for part in answer))
    assert_same_answer(pick(squeezed, last), solve(_rows(problem, last)))


def test_out_equals_new(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    problem = random_problem(ROWS, 4097, dtype, device, generator)
    expected = detlogp.logp(problem.logits, problem.token_ids)
    out = torch.full_like(expected, torch.nan)
    assert detlogp.logp(problem.logits, problem.token_ids, out=out) is out
    assert_same_bits(out, expected)


def test_past_two_to_the_31_on_the_cpu(generator: torch.Generator) -> None:
    """Case 20 with the smallest type: 4.3 GB of logits, and as much gradient."""
    vocab = 131072
    rows = 2**31 // vocab + 3
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free_bytes < 12e9:
        pytest.skip(f"needs 12 GB of free memory, there are {free_bytes / 1e9:.0f}")
    last = random_problem(2, vocab, torch.bfloat16, "cpu", generator)
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16)
    logits[-2:] = last.logits
    ids = torch.full((rows,), -100)
    ids[-2:] = last.token_ids
    grads = (torch.ones(()).expand(rows).clone() for _ in range(2))
    problem = Problem(logits, ids, *grads)
    problem.grad_logp[-2:] = last.grad_logp
    problem.grad_lse[-2:] = last.grad_lse
    leaf = logits.requires_grad_()
    result = detlogp.logp(leaf, ids, return_lse=True)
    outputs = (result.logp, result.lse)
    (gradient,) = torch.autograd.grad(outputs, leaf, (problem.grad_logp, problem.grad_lse))
    answer = Answer(result.logp.detach(), result.lse.detach(), gradient)
    assert_same_answer(pick(answer, slice(rows - 2, rows)), solve(last))
    assert not gradient[0].any()
