"""contract="exact" with several ids a row: no derivative depends on the order of the columns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import all_of, nested_derivatives
from torch import Tensor
from torch.func import grad, vjp, vmap

from detlogp.testing import assert_same_bits

RESULTS = ("logp", "lse", "entropy")
USED = [[name for i, name in enumerate(RESULTS) if which >> i & 1] for which in range(1, 8)]
uses = pytest.mark.parametrize("used", USED, ids=" ".join)
temperatures = pytest.mark.parametrize("temperature", [1.0, 0.7])
V = 150

Function = Callable[[Tensor], Tensor]


def _problem(generator: torch.Generator, count: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, ids and a mask. Every second column is so far below the others that the care with

    which a target's p is computed shows, column 0 among them. Row 1 has bad ids alone.
    """
    x = torch.randn(6, V, generator=generator)
    x[:, ::2] -= 62 + 20 * torch.rand(6, V // 2, generator=generator)
    ids = torch.randint(V, (6, count), generator=generator)
    ids[1] = -1
    ids[2, ::2] = V
    ids[3] = ids[3, :1]
    return x, ids, torch.arange(6) != 4


def _derivatives(
    x: Tensor, ids: Tensor, mask: Tensor, moves: list[Tensor], used: list[str], temperature: float
) -> dict[str, Tensor]:
    """By every route; `moves` are two directions and the results' cotangents."""
    u, w, *weights = moves
    cotangents = [weights[RESULTS.index(name)] for name in used]

    def results(logits: Tensor, ids: Tensor = ids, mask: Tensor = mask) -> list[Tensor]:
        options: dict[str, Any] = {"temperature": temperature, "contract": "exact"}
        found = all_of(logits, ids, rows=mask, **options)
        return [getattr(found, name) for name in used]

    def weighted(logits: Tensor) -> Tensor:
        parts = zip(results(logits), cotangents, strict=True)
        return sum(((part * g).view(6, -1).sum(-1) for part, g in parts), torch.zeros(()).to(x))

    def of_row(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        return sum((part.sum() for part in results(logits, ids, mask)), torch.zeros(()).to(x))

    leaf = x.detach().requires_grad_()
    ones = torch.ones(6, device=x.device)
    return {
        "fused": torch.autograd.grad(results(leaf), leaf, cotangents)[0],
        "vjp": vjp(lambda logits: tuple(results(logits)), x)[1](tuple(cotangents))[0],
        "vmap": vmap(grad(of_row))(x, ids, mask),
        **nested_derivatives(weighted, x, u, w, ones),
    }


@uses
@temperatures
@pytest.mark.parametrize("count", [0, 4])
def test_derivatives_have_no_order(
    count: int, temperature: float, used: list[str], device: str, generator: torch.Generator
) -> None:
    x, ids, mask = (part.to(device) for part in _problem(generator, count))
    u, w = torch.randn(2, *x.shape, generator=generator).to(device)
    weights = [torch.randn(6, count, generator=generator), *torch.randn(2, 6, generator=generator)]
    order = torch.randperm(V, generator=generator).roll(1).to(device)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(V, device=device))
    good = (ids >= 0) & (ids < V)
    moved = torch.where(good, place[torch.where(good, ids, 0)], ids)
    cotangents = [weight.to(device) for weight in weights]
    one = _derivatives(x, ids, mask, [u, w, *cotangents], used, temperature)
    directions = [u[:, order], w[:, order], *cotangents]
    other = _derivatives(x[:, order], moved, mask, directions, used, temperature)
    for name, value in one.items():
        found = other[name][:, place] if value.dim() == 2 else other[name]
        try:
            assert_same_bits(found, value)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
