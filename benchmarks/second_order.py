"""A Hessian-vector product of sum_r g[r] logp[r]: forward, gradient and product in one call."""

from collections.abc import Callable

import torch
from cases import Case, Inputs, Work
from torch import Tensor

import detlogp

Logp = Callable[[Tensor, Tensor], Tensor]


def torch_logp(logits: Tensor, token_ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def _reverse_over_reverse(logp: Logp, case: Case, inputs: Inputs) -> Work:
    leaf = inputs.logits.detach().requires_grad_()
    direction = torch.randn_like(inputs.logits)

    def call() -> object:
        value = logp(leaf, inputs.token_ids)
        seed = inputs.grad.to(value.dtype)
        (gradient,) = torch.autograd.grad(value, leaf, seed, create_graph=True)
        return torch.autograd.grad(gradient, leaf, direction)

    return Work(call, 6 * case.logits_bytes())


def _forward_over_reverse(logp: Logp, case: Case, inputs: Inputs) -> Work:
    direction = torch.randn_like(inputs.logits)

    def loss(logits: Tensor) -> Tensor:
        value = logp(logits, inputs.token_ids)
        return (value * inputs.grad.to(value.dtype)).sum()

    def call() -> object:
        return torch.func.jvp(torch.func.grad(loss), (inputs.logits,), (direction,))

    return Work(call, 6 * case.logits_bytes())


REVERSE_OVER_REVERSE = {
    "detlogp": lambda case, inputs: _reverse_over_reverse(detlogp.logp, case, inputs),
    "torch": lambda c, inputs: _reverse_over_reverse(torch_logp, c, inputs),
}
FORWARD_OVER_REVERSE = {
    "detlogp": lambda case, inputs: _forward_over_reverse(detlogp.logp, case, inputs),
    "torch": lambda c, inputs: _forward_over_reverse(torch_logp, c, inputs),
}
