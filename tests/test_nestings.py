"""Random nestings of transforms with random options, beside the same nesting of PyTorch in float64.

The routes of detlogp.evidence are chosen; here nobody chooses, and every run draws anew.
"""

import math
import random
from collections.abc import Callable

import pytest
import torch
from calls import all_of, both_contracts
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

Function = Callable[[Tensor], Tensor]


def drawn(seed: int, like: Tensor) -> Tensor:
    """The same numbers for a shape, whatever the dtype; made of a list, which vmap lets pass."""
    source = random.Random(seed)
    numbers = [source.gauss(0, 1) for _ in range(math.prod(like.shape))]
    wide = torch.tensor(numbers, dtype=torch.float64).reshape(like.shape)
    return wide.to(like.device, like.dtype)


def contracted(jacobian: Tensor, x: Tensor, seed: int) -> Tensor:
    return (jacobian * drawn(seed, x)).sum(tuple(range(jacobian.dim() - x.dim(), jacobian.dim())))


def pulled(f: Function, x: Tensor, seed: int) -> Tensor:
    value, pull, *_ = vjp(f, x)
    result: Tensor = pull(drawn(seed, value))[0]
    return result


def total(f: Function, x: Tensor, seed: int) -> Tensor:
    value = f(x)
    return (value * drawn(seed, value)).sum()


Layer = Callable[[Function, Tensor, int], Tensor]
DERIVATIVES: dict[str, Layer] = {
    "grad": lambda f, x, seed: grad(lambda y: total(f, y, seed))(x),
    "vjp": pulled,
    "jvp": lambda f, x, seed: jvp(f, (x,), (drawn(seed, x),))[1],
    "jacrev": lambda f, x, seed: contracted(jacrev(f)(x), x, seed),
    "jacfwd": lambda f, x, seed: contracted(jacfwd(f)(x), x, seed),
}
OTHERS: dict[str, Layer] = {
    "vmap": lambda f, x, seed: vmap(f)(torch.stack([x, x * 0.5, x + drawn(seed, x)])).sum(0),
    "tanh inside": lambda f, x, seed: f(torch.tanh(x) * 1.5 + 0.3 * drawn(seed, x)),
    "product": lambda f, x, seed: f(x) * f(x * 0.7) * 0.3,
    "sin outside": lambda f, x, seed: torch.sin(f(x)),
    "weighted": lambda f, x, seed: f(x) * drawn(seed, f(x)),
}
LAYERS = DERIVATIVES | OTHERS


def nested(f: Function, names: list[str], seed: int) -> Function:
    """The first name innermost."""
    if not names:
        return f
    *inner, last = names
    inside = nested(f, inner, seed)
    return lambda x: LAYERS[last](inside, x, seed + len(names))


def results(f: Function, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The value, and its derivative by autograd outside of all transforms."""
    leaf = x.clone().requires_grad_()
    value = f(leaf)
    (gradient,) = torch.autograd.grad((value * drawn(seed, value)).sum(), leaf)
    return value.detach(), gradient


@both_contracts
@pytest.mark.parametrize("number", range(60))
def test_random_nesting(
    number: int, contract: str, device: str, generator: torch.Generator
) -> None:
    """Tight in double arithmetic; in float32, which the exact contract has alone, a loose bound."""
    seed = generator.initial_seed()
    chosen = random.Random(seed)
    leading = chosen.choice([(), (), (3,), (2, 2)])
    vocab = chosen.choice([1, 2, 5, 9])
    several = chosen.choice([None, None, 2])
    temperature = chosen.choice([1.0, 0.7, 2.5])
    names = chosen.choices(list(DERIVATIVES), k=chosen.choice([1, 2, 3, 3]))
    names += chosen.choices(list(OTHERS), k=chosen.choice([0, 1, 2]))
    chosen.shuffle(names)
    print("options:", leading, vocab, several, temperature, names)
    ids_shape = leading if several is None else (*leading, several)
    ids = torch.randint(-1, vocab, ids_shape, generator=generator).to(device)
    rows = (torch.rand(leading, generator=generator) < 0.8).to(device)
    valid = (ids >= 0) & (rows if several is None else rows.unsqueeze(-1))
    scored = valid if several is None else rows

    def combined(logp: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
        value = logp if several is None else logp.sum(-1)
        return value + 0.5 * torch.where(scored, lse, 0.0) + 0.25 * entropy

    def ours(x: Tensor) -> Tensor:
        return combined(*all_of(x, ids, contract=contract, temperature=temperature, rows=rows))

    def by_hand(x: Tensor) -> Tensor:
        x = x / temperature
        logp, lse = torch.log_softmax(x, -1), torch.logsumexp(x, -1)
        places = ids.clamp(min=0) if several is not None else ids.clamp(min=0).unsqueeze(-1)
        at_ids = torch.where(valid, logp.gather(-1, places).reshape(ids_shape), 0.0)
        entropy = -(logp.exp() * logp).sum(-1)
        return combined(at_ids, lse, torch.where(scored, entropy, 0.0))

    x = drawn(seed, torch.empty(*leading, vocab, dtype=torch.float64, device=device))
    expected = results(nested(by_hand, names, seed), x, seed)
    given = x if contract == "locked" else x.float()
    for found, right in zip(results(nested(ours, names, seed), given, seed), expected, strict=True):
        assert found.shape == right.shape
        error = (found.double() - right).abs().max()
        allowed = 1e-10 if contract == "locked" else 1e-2
        assert error <= allowed * max(1.0, right.abs().max().item())
