"""A row's derivatives of orders 1 to 4 have the same bits however the row is presented."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from calls import random_problem
from torch import Tensor
from torch.func import jvp

import detlogp
from detlogp.testing import assert_same_bits

ORDERS = 4
N = 5


class Problem(NamedTuple):
    """Everything that belongs to a row, so that all of it moves with the row."""

    logits: Tensor  # [N, V]
    token_ids: Tensor  # [N]
    cotangent: Tensor  # [N]
    directions: Tensor  # [N, ORDERS, V]


def _problem(vocab: int, dtype: torch.dtype, device: str, generator: torch.Generator) -> Problem:
    rows = random_problem(N, vocab, dtype, device, generator)
    rows.token_ids[3] = -100
    directions = torch.randn(N, ORDERS, vocab, generator=generator).to(device, dtype)
    return Problem(*rows[:3], directions)


def _reverse(problem: Problem) -> list[Tensor]:
    """The gradients of every order; a gradient's cotangent is a direction."""
    leaf = problem.logits.detach().requires_grad_()
    result = detlogp.logp(leaf, problem.token_ids, return_lse=True)
    y = result.logp * torch.where(result.lse.isinf(), 0.0, result.lse)
    cotangent, gradients = problem.cotangent, []
    for k in range(ORDERS):
        (y,) = torch.autograd.grad(y, leaf, cotangent, create_graph=k + 1 < ORDERS)
        gradients.append(y.detach())
        cotangent = problem.directions[:, k]
    return gradients


def _forward(problem: Problem) -> list[Tensor]:
    """The tangents of every order, [N]."""

    def function(x: Tensor) -> Tensor:
        result = detlogp.logp(x, problem.token_ids, return_lse=True)
        return result.logp * torch.where(result.lse.isinf(), 0.0, result.lse)

    tangents: list[Tensor] = []
    derivative: Callable[[Tensor], Tensor] = function
    for k in range(ORDERS):
        derivative = _along(derivative, problem.directions[:, k])
        tangents.append(derivative(problem.logits))
    return tangents


def _along(function: Callable[[Tensor], Tensor], v: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: jvp(function, (x,), (v,))[1]


def _take(problem: Problem, rows: Tensor | slice | list[int]) -> Problem:
    return Problem(*(part[rows] for part in problem))


def _join(*problems: Problem) -> Problem:
    return Problem(*(torch.cat(parts) for parts in zip(*problems, strict=True)))


def _filled(problem: Problem, value: float) -> Problem:
    """As many rows that are all this value, with finite directions."""
    return problem._replace(logits=torch.full_like(problem.logits, value))


Layout = Callable[[Problem], tuple[Problem, slice | list[int]]]


def _alone(problem: Problem) -> tuple[Problem, list[int]]:
    return _take(problem, [2]), [0]


def _reversed(problem: Problem) -> tuple[Problem, list[int]]:
    order = [3, 0, 4, 2, 1]
    return _take(problem, order), [order.index(row) for row in range(N)]


def _padded(problem: Problem) -> tuple[Problem, slice]:
    return _join(problem, _filled(problem, 0.0)), slice(0, N)


def _after_noise(problem: Problem) -> tuple[Problem, slice]:
    noise = _filled(problem, 0.0)
    return _join(noise._replace(logits=problem.logits.flip(-1) * 4), problem), slice(N, None)


def _between_nans(problem: Problem) -> tuple[Problem, slice]:
    nans = _filled(problem, torch.nan)
    return _join(nans, problem, nans), slice(N, 2 * N)


def _wide_rows(problem: Problem) -> tuple[Problem, slice]:
    """A slice of a padded vocabulary, at an odd offset (case 15)."""
    memory = problem.logits.new_full((N, problem.logits.shape[1] + 7), torch.nan)
    memory[:, 3:-4] = problem.logits
    return problem._replace(logits=memory[:, 3:-4]), slice(None)


def _transposed(problem: Problem) -> tuple[Problem, slice]:
    moved = problem._replace(
        logits=problem.logits.T.contiguous().T,
        directions=problem.directions.transpose(0, 2).contiguous().transpose(0, 2),
    )
    return moved, slice(None)


LAYOUTS: dict[str, Layout] = {
    "repeated": lambda problem: (problem, slice(None)),
    "alone": _alone,
    "shuffled": _reversed,
    "padded": _padded,
    "after noise": _after_noise,
    "between NaN": _between_nans,
    "wide rows": _wide_rows,
    "transposed": _transposed,
}


@pytest.mark.parametrize("vocab", [5, 300, 4100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", [_reverse, _forward])
def test_same_bits(
    mode: Callable[[Problem], list[Tensor]],
    layout: str,
    vocab: int,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    problem = _problem(vocab, dtype, device, generator)
    moved, places = LAYOUTS[layout](problem)
    rows = [2] if layout == "alone" else slice(None)
    for actual, expected in zip(mode(moved), mode(problem), strict=True):
        assert_same_bits(actual[places], expected[rows])
        assert not expected.isnan().any()
        assert not expected[3].any(), "the row of a bad id has derivative 0"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("mode", [_reverse, _forward])
def test_nan_stays_in_its_row(
    mode: Callable[[Problem], list[Tensor]],
    value: float,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """Case 7: a row that has no derivative says so at every order, and no other row does."""
    problem = _problem(300, dtype, device, generator)
    spoilt = problem._replace(logits=problem.logits.clone())
    spoilt.logits[1] = value
    others = [0, 2, 3, 4]
    for actual, expected in zip(mode(spoilt), mode(problem), strict=True):
        assert actual[1].isnan().all()
        assert_same_bits(actual[others], expected[others])
