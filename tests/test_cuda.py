"""What only a GPU shows: streams, devices, graphs, memory, sizes past 2^31."""

import pytest
import torch
from calls import Problem, assert_same_answer, pick, random_problem, solve
from torch import Tensor

import detlogp
from detlogp.testing import assert_same_bits

pytestmark = pytest.mark.cuda


def test_side_stream(dtype: torch.dtype, generator: torch.Generator) -> None:
    """The logits arrive late on a side stream: a call on any other stream would read NaN."""
    problem = random_problem(13, 50257, dtype, "cuda", generator)
    expected = solve(problem)
    late = problem._replace(logits=torch.full_like(problem.logits, torch.nan))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.logits.copy_(problem.logits)
        leaf = late.logits.requires_grad_()
        result = detlogp.logp(leaf, late.token_ids)
        (gradient,) = torch.autograd.grad(result, leaf, late.grad_logp)
    torch.cuda.synchronize()
    assert_same_bits(result.detach(), expected.logp)
    alone = problem.logits.detach().requires_grad_()
    value = detlogp.logp(alone, problem.token_ids)
    assert_same_bits(gradient, torch.autograd.grad(value, alone, problem.grad_logp)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_current(dtype: torch.dtype, generator: torch.Generator) -> None:
    problem = random_problem(13, 4097, dtype, "cuda:0", generator)
    expected = solve(problem)
    elsewhere = Problem(*(part.to("cuda:1") for part in problem))
    with torch.cuda.device(0):
        answer = solve(elsewhere)
        assert torch.cuda.current_device() == 0
    assert answer.logp.device == torch.device("cuda:1")
    assert_same_answer(type(answer)(*(part.to("cuda:0") for part in answer)), expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_graph_capture_and_no_synchronisation(
    dtype: torch.dtype, generator: torch.Generator
) -> None:
    problem = random_problem(13, 4097, dtype, "cuda", generator)
    rows = torch.tensor([3, 5, 5, -1, 99], device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        leaf = torch.zeros_like(problem.logits).requires_grad_()

    def step() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        result = detlogp.logp(leaf, problem.token_ids, rows=rows, return_lse=True)
        loss = (result.logp, result.lse)
        grads = (problem.grad_logp, problem.grad_lse)
        (gradient,) = torch.autograd.grad(loss, leaf, grads, create_graph=True)
        (product,) = torch.autograd.grad(gradient, leaf, leaf.detach())
        return *loss, gradient, product

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(graph, stream=side):
            logp, lse, gradient, product = step()
    with torch.no_grad():
        leaf.copy_(problem.logits)
    graph.replay()
    torch.cuda.synchronize()
    expected = solve(problem, rows=rows)
    parts = (part.detach() for part in (logp, lse, gradient))
    assert_same_answer(type(expected)(*parts), expected)
    with torch.cuda.stream(side):
        again = step()[3]
    torch.cuda.synchronize()
    assert_same_bits(product, again)
    assert product[3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Forward: O(N). Backward: the gradient and O(N)."""
    problem = random_problem(256, 151936, dtype, "cuda", generator)
    leaf = problem.logits.requires_grad_()
    small = 256 * 64
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = detlogp.logp(leaf, problem.token_ids, return_lse=True)
    assert torch.cuda.max_memory_allocated() - before <= small
    outputs = (result.logp, result.lse)
    (gradient,) = torch.autograd.grad(outputs, leaf, (problem.grad_logp, problem.grad_lse))
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= gradient.numel() * gradient.element_size() + small


@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [(65536, 50257, torch.bfloat16), (18423, 131072, torch.float32), (2**31 + 9, 1, torch.float16)],
)
def test_past_two_to_the_31(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Case 20: forward and backward of the last rows equal those rows alone."""
    torch.cuda.empty_cache()
    logits = torch.empty(rows, vocab, dtype=dtype, device="cuda").normal_(0, 3)
    ids = torch.randint(vocab, (rows,), device="cuda")
    last = slice(rows - 5, rows)
    ones = torch.ones((), device="cuda")
    problem = Problem(logits, ids, ones.expand(rows), 0.5 * ones.expand(rows))
    leaf = logits.requires_grad_()
    result = detlogp.logp(leaf, ids, return_lse=True)
    (gradient,) = torch.autograd.grad(
        (result.logp, result.lse), leaf, (problem.grad_logp, problem.grad_lse)
    )
    expected = solve(Problem(*(part.detach()[last].clone() for part in problem)))
    actual = type(expected)(result.logp.detach(), result.lse.detach(), gradient)
    assert_same_answer(pick(actual, last), expected)
    first = slice(0, 5)
    expected = solve(Problem(*(part.detach()[first].clone() for part in problem)))
    assert_same_answer(pick(actual, first), expected)
