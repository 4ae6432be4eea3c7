"""inplace_backward: the gradient in the logits' storage, and errors in place of wrong gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from calls import Problem, random_problem
from torch import Tensor

import detlogp
from detlogp.testing import assert_same_bits

Layout = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, Layout] = {
    "contiguous": torch.clone,
    "slice of a padded vocabulary": lambda x: torch.nn.functional.pad(x, (0, 37))[:, :-37],
    "misaligned": lambda x: torch.nn.functional.pad(x, (3, 0))[:, 3:],
    "three dimensions, transposed": lambda x: (
        x.view(2, 3, -1).transpose(0, 1).clone().transpose(0, 1)
    ),
}


def _leaf(problem: Problem) -> Tensor:
    return problem.logits.detach().clone().requires_grad_()


def _ids_like(problem: Problem, logits: Tensor) -> Tensor:
    return problem.token_ids.view(logits.shape[:-1])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("vocab", [5, 517, 5003])
def test_gradient(
    layout: Layout, vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """The bits of the ordinary gradient, in the same memory, also for rows that do not count."""
    problem = random_problem(6, vocab, dtype, device, generator)
    problem.token_ids[1] = -100
    gradients = []
    for inplace in (False, True):
        leaf = _leaf(problem)
        logits = layout(leaf)
        ids = _ids_like(problem, logits)
        rows = torch.arange(6, device=device).view(ids.shape) != 4
        result = detlogp.logp(logits, ids, rows=rows, return_lse=True, inplace_backward=inplace)
        kept: list[Tensor] = []
        logits.register_hook(kept.append)
        grads = (problem.grad_logp.view(ids.shape), problem.grad_lse.view(ids.shape))
        torch.autograd.backward((result.logp, result.lse), grads)
        assert (kept[0].data_ptr() == logits.data_ptr()) is inplace
        gradients.append((kept[0].clone(), leaf.grad))
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        assert actual is not None
        assert expected is not None
        assert_same_bits(actual, expected)


def _scored(problem: Problem, layout: Layout = torch.clone) -> tuple[Tensor, Tensor, Tensor]:
    leaf = _leaf(problem)
    logits = layout(leaf)
    ids = _ids_like(problem, logits)
    return leaf, logits, detlogp.logp(logits, ids, inplace_backward=True)


@pytest.fixture
def problem(device: str, generator: torch.Generator) -> Problem:
    return random_problem(6, 517, torch.float32, device, generator)


def test_second_backward(problem: Problem) -> None:
    leaf, _, result = _scored(problem)
    result.sum().backward(retain_graph=True)
    assert leaf.grad is not None
    before = leaf.grad.clone()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    assert_same_bits(leaf.grad, before)


def test_two_calls_on_the_same_logits(problem: Problem) -> None:
    _, logits, result = _scored(problem)
    other = detlogp.logp(logits, problem.token_ids, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (result + other).sum().backward()


CONSUMERS: dict[str, Callable[[Tensor], Tensor]] = {
    "saves its result": lambda x: x.softmax(-1)[:, 0],
    "saves nothing": lambda x: x.sum(-1),
    "saves the logits": torch.sin,
}


@pytest.mark.parametrize("also", CONSUMERS.values(), ids=CONSUMERS)
@pytest.mark.parametrize("is_first", [False, True])
def test_other_consumers(
    also: Callable[[Tensor], Tensor], is_first: bool, problem: Problem
) -> None:
    """Right, but for a consumer that has saved the logits and whose backward comes after ours."""
    reference = _leaf(problem)
    wanted = detlogp.logp(reference, problem.token_ids).sum() + also(reference).sum()
    wanted.backward()
    leaf = _leaf(problem)
    logits = leaf.clone()
    # Autograd runs the backward of what was made last first.
    other = also(logits).sum() if is_first else None
    value = detlogp.logp(logits, problem.token_ids, inplace_backward=True).sum()
    other = also(logits).sum() if other is None else other
    if is_first and also is torch.sin:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (value + other).backward()
        return
    (value + other).backward()
    torch.testing.assert_close(leaf.grad, reference.grad)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_later_use(layout: Layout, problem: Problem) -> None:
    """Of the logits, and of the tensor that they are a view of."""
    _, logits, result = _scored(problem, layout)
    result.sum().backward()
    for tensor in (logits, logits._base):
        if tensor is None:
            continue
        with pytest.raises(RuntimeError, match="overwritten by their gradient"):
            detlogp.logp(
                tensor, torch.zeros_like(tensor[..., 0], dtype=torch.int64)
            ).sum().backward()


def test_logits_that_changed_before(problem: Problem) -> None:
    _, logits, result = _scored(problem)
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_create_graph_and_batched_gradients(problem: Problem) -> None:
    leaf, logits, result = _scored(problem)
    before = logits.detach().clone()
    with pytest.raises(NotImplementedError, match="inplace_backward"):
        torch.autograd.grad(result.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="inplace_backward"):
        torch.autograd.grad(result, leaf, torch.eye(6, device=leaf.device), is_grads_batched=True)
    assert_same_bits(logits.detach(), before)


def test_views_that_autograd_does_not_follow(problem: Problem) -> None:
    """A part of chunk: autograd refuses to write to it, and nothing is written."""
    leaf = _leaf(problem)
    logits = (2 * leaf).chunk(2)[0]
    before = logits.detach().clone()
    result = detlogp.logp(logits, problem.token_ids[:3], inplace_backward=True)
    with pytest.raises(RuntimeError, match="multiple views"):
        result.sum().backward()
    assert_same_bits(logits.detach(), before)


def test_saved_tensor_hooks(problem: Problem) -> None:
    """Under them PyTorch checks no version: an overwrite would give wrong gradients silently."""
    leaf = _leaf(problem)

    def score(x: Tensor) -> Tensor:
        return detlogp.logp(2 * x, problem.token_ids, inplace_backward=True)

    with pytest.raises(NotImplementedError, match="saved-tensor hooks"):
        torch.utils.checkpoint.checkpoint(score, leaf, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu(), pytest.raises(NotImplementedError, match="hooks"):
        score(leaf)
    reference = _leaf(problem)
    detlogp.logp(2 * reference, problem.token_ids).sum().backward()
    torch.utils.checkpoint.checkpoint(score, leaf, use_reentrant=True).sum().backward()
    assert leaf.grad is not None
    assert reference.grad is not None
    assert_same_bits(leaf.grad, reference.grad)


def test_retained_gradient(problem: Problem) -> None:
    """It would be lost: the overwrite gives the logits another history."""
    leaf = _leaf(problem)
    base = 2 * leaf
    base.retain_grad()
    for logits in (base, base[:, 1:]):
        with pytest.raises(ValueError, match="must not retain their gradient"):
            detlogp.logp(logits, problem.token_ids, inplace_backward=True)
    logits = 2 * leaf
    before = logits.detach().clone()
    result = detlogp.logp(logits, problem.token_ids, inplace_backward=True)
    logits.retain_grad()
    with pytest.raises(ValueError, match="must not retain their gradient"):
        result.sum().backward()
    assert_same_bits(logits.detach(), before)


def test_gradient_of_a_leaf_is_its_own(problem: Problem) -> None:
    """Where the gradient reaches a leaf as it is, the leaf must not share the logits' memory."""
    leaf = _leaf(problem)
    logits = leaf + 0.0
    detlogp.logp(logits, problem.token_ids, inplace_backward=True).sum().backward()
    assert leaf.grad is not None
    before = leaf.grad.clone()
    with torch.no_grad():
        logits.zero_()
    assert_same_bits(leaf.grad, before)


def test_cotangent_in_the_logits_memory(problem: Problem) -> None:
    gradients = []
    for inplace in (False, True):
        leaf = _leaf(problem)
        logits = leaf.clone()
        cotangent = logits.detach()[0, :6]
        result = detlogp.logp(logits, problem.token_ids, inplace_backward=inplace)
        gradients.append(torch.autograd.grad(result, leaf, cotangent)[0].clone())
    assert_same_bits(gradients[1], gradients[0])


def test_refused(problem: Problem) -> None:
    leaf = _leaf(problem)
    ids = problem.token_ids

    def score(logits: Tensor) -> Tensor:
        return detlogp.logp(logits, ids, inplace_backward=True)

    for logits in (leaf, leaf[:, 1:]):
        with pytest.raises(ValueError, match="logits must be the result of an operation"):
            score(logits)
    with pytest.raises(ValueError, match="logits must have adjacent columns"):
        score(leaf.clone().T.contiguous().T)
    with pytest.raises(ValueError, match="logits must not share memory"):
        score((2 * leaf[:1]).expand(6, -1))
    with pytest.raises(NotImplementedError, match="inplace_backward"):
        torch.func.grad(lambda x: score(2 * x).sum())(leaf.detach())
    with pytest.raises(NotImplementedError, match="inplace_backward"):
        torch.func.vmap(lambda x, i: detlogp.logp(2 * x, i, inplace_backward=True))(leaf, ids)


def test_without_a_gradient(problem: Problem) -> None:
    expected = detlogp.logp(problem.logits, problem.token_ids)
    with torch.no_grad():
        actual = detlogp.logp(_leaf(problem), problem.token_ids, inplace_backward=True)
    assert_same_bits(actual, expected)
    detached = problem.logits.detach()
    assert_same_bits(detlogp.logp(detached, problem.token_ids, inplace_backward=True), expected)


@pytest.mark.cuda
def test_memory(generator: torch.Generator) -> None:
    """A training step needs the logits and O(N)."""
    problem = random_problem(256, 151936, torch.bfloat16, "cuda", generator)
    logits = problem.logits.requires_grad_().clone()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = detlogp.logp(logits, problem.token_ids, inplace_backward=True)
    torch.autograd.grad(result, logits, problem.grad_logp)
    assert torch.cuda.max_memory_allocated() - before <= 256 * 64
