"""Cotangents mapped by the older vmap, of is_grads_batched and vectorize=True, keep the graph."""

from collections.abc import Callable

import pytest
import torch
from calls import all_of, both_contracts
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad

import detlogp
from detlogp.testing import assert_same_bits

Function = Callable[[Tensor], Tensor]
N, V, COTANGENTS = 3, 6, 4
IDS = torch.tensor([2, -100, 5])
SEVERAL = torch.tensor([[2, 2], [-100, 1], [5, 0]])

# By name: ours of logits and contract, and the same composed of PyTorch's own operations.
OURS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "logp": lambda x, c: detlogp.logp(x, IDS.to(x.device), contract=c),
    "lse": lambda x, c: detlogp.logp(x, IDS.to(x.device), contract=c, return_lse=True).lse[[0, 2]],
    "entropy": lambda x, c: all_of(x, IDS.to(x.device), contract=c).entropy,
    "temperature": lambda x, c: detlogp.logp(x, IDS.to(x.device), contract=c, temperature=0.7),
    "several ids": lambda x, c: detlogp.logp(x, SEVERAL.to(x.device), contract=c).flatten(),
    "all of several ids": lambda x, c: torch.cat(
        [part.flatten() for part in all_of(x, SEVERAL.to(x.device), contract=c, temperature=0.7)]
    ),
}


def _at(ids: Tensor, logp: Tensor) -> Tensor:
    places = ids.to(logp.device).view(N, -1)
    found = logp.gather(-1, places.clamp(min=0))
    return torch.where(places >= 0, found, 0.0).flatten()


def _entropy(x: Tensor) -> Tensor:
    logp = torch.log_softmax(x, -1)
    return -(logp.exp() * logp).sum(-1)


def _all(x: Tensor) -> Tensor:
    return torch.cat([_at(SEVERAL, torch.log_softmax(x, -1)), x.logsumexp(-1), _entropy(x)])


COMPOSED: dict[str, Function] = {
    "logp": lambda x: _at(IDS, torch.log_softmax(x, -1)),
    "lse": lambda x: x.logsumexp(-1)[[0, 2]],
    # A row without an id is not scored.
    "entropy": lambda x: torch.where(IDS.to(x.device) >= 0, _entropy(x), 0.0),
    "temperature": lambda x: _at(IDS, torch.log_softmax(x / 0.7, -1)),
    "several ids": lambda x: _at(SEVERAL, torch.log_softmax(x, -1)),
    "all of several ids": lambda x: _all(x / 0.7),
}


def _problem(
    name: str, contract: str, device: str, generator: torch.Generator
) -> tuple[Function, Tensor, Tensor]:
    """Our function, a leaf and cotangents, in the widest arithmetic that the contract has."""
    dtype = torch.float64 if contract == "locked" else torch.float32
    leaf = torch.randn(N, V, generator=generator, dtype=dtype).to(device).requires_grad_()
    size = OURS[name](leaf.detach(), contract).numel()
    cotangents = torch.randn(COTANGENTS, size, generator=generator, dtype=dtype).to(device)
    return lambda x: OURS[name](x, contract), leaf, cotangents.requires_grad_()


def _batched(function: Function, leaf: Tensor, cotangents: Tensor) -> Tensor:
    value = function(leaf)
    return torch.autograd.grad(value, leaf, cotangents, True, True, is_grads_batched=True)[0]


def _loop(function: Function, leaf: Tensor, cotangents: Tensor) -> Tensor:
    value = function(leaf)
    return torch.stack([torch.autograd.grad(value, leaf, c, True, True)[0] for c in cotangents])


def _close(actual: Tensor, expected: Tensor, contract: str) -> None:
    assert actual.shape == expected.shape
    allowed = 1e-12 if contract == "locked" else 1e-4
    assert (actual.double() - expected.double()).abs().max() <= allowed * expected.abs().max()


@both_contracts
@pytest.mark.parametrize("name", OURS)
def test_differentiated_again(
    name: str, contract: str, device: str, generator: torch.Generator
) -> None:
    """Twice more, by the logits and by the cotangents."""
    function, leaf, cotangents = _problem(name, contract, device, generator)
    jacobians = _batched(function, leaf, cotangents)
    assert_same_bits(jacobians.detach(), _loop(function, leaf, cotangents).detach())

    def orders(jacobian: Tensor, leaf: Tensor, cotangents: Tensor) -> list[Tensor]:
        operands = (leaf, cotangents)
        second = torch.autograd.grad(jacobian.pow(3).sum(), operands, create_graph=True)
        third = torch.autograd.grad(second[0].pow(2).sum() + second[1].pow(2).sum(), operands)
        return [*second, *third]

    wide, wide_cotangents = (t.detach().double().requires_grad_() for t in (leaf, cotangents))
    expected = orders(_loop(COMPOSED[name], wide, wide_cotangents), wide, wide_cotangents)
    for found, right in zip(orders(jacobians, leaf, cotangents), expected, strict=True):
        _close(found, right, contract)


@both_contracts
@pytest.mark.parametrize("name", OURS)
def test_dual_cotangents(name: str, contract: str, device: str, generator: torch.Generator) -> None:
    """The gradient is linear in them, so that its tangent is the gradient of the tangent."""
    function, leaf, cotangents = _problem(name, contract, device, generator)
    value, tangent = function(leaf), cotangents.detach().cos()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(cotangents.detach(), tangent)
        (found,) = torch.autograd.grad(value, leaf, dual, is_grads_batched=True)
        found_tangent = forward_ad.unpack_dual(found).tangent
    assert found_tangent is not None
    _close(found_tangent, _loop(function, leaf, tangent).detach(), contract)


@both_contracts
@pytest.mark.parametrize("name", OURS)
def test_vectorized_hessian(
    name: str, contract: str, device: str, generator: torch.Generator
) -> None:
    """Of torch.autograd.functional, and its derivative."""
    function, leaf, cotangents = _problem(name, contract, device, generator)

    def hessian(function: Function, leaf: Tensor, weights: Tensor) -> list[Tensor]:
        found = torch.autograd.functional.hessian(
            lambda x: (function(x) * weights).sum().sin(), leaf, create_graph=True, vectorize=True
        )
        assert isinstance(found, Tensor)
        return [found, *torch.autograd.grad(found.pow(2).sum(), leaf)]

    wide, weights = leaf.detach().double().requires_grad_(), cotangents[0].detach()
    expected = hessian(COMPOSED[name], wide, weights.double())
    for found, right in zip(hessian(function, leaf, weights), expected, strict=True):
        _close(found.detach(), right.detach(), contract)


@both_contracts
@pytest.mark.parametrize("name", OURS)
def test_mapped_twice(name: str, contract: str, device: str, generator: torch.Generator) -> None:
    """Two levels, of cotangents that meet both."""
    function, leaf, cotangents = _problem(name, contract, device, generator)
    value, scales = function(leaf), torch.tensor([1.0, -0.5], device=device, dtype=leaf.dtype)

    def gradient(cotangent: Tensor, scale: Tensor) -> Tensor:
        return torch.autograd.grad(value, leaf, cotangent * scale, create_graph=True)[0]

    def by_operands(gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(gradients.pow(3).sum(), (leaf, cotangents), retain_graph=True)

    found = _vmap(lambda c: _vmap(lambda s: gradient(c, s))(scales))(cotangents)
    loop = torch.stack([torch.stack([gradient(c, s) for s in scales]) for c in cotangents])
    assert_same_bits(found.detach(), loop.detach())
    for actual, expected in zip(by_operands(found), by_operands(loop), strict=True):
        _close(actual, expected, contract)
