"""The gradient of logp alone: one read of the logits, one write of the gradient."""

import torch
from cases import Case, Inputs, Work

import detlogp


def _gradient_of(logp: torch.Tensor, leaf: torch.Tensor, case: Case, inputs: Inputs) -> Work:
    seed = inputs.grad.to(logp.dtype)

    def call() -> object:
        return torch.autograd.grad(logp, leaf, seed, retain_graph=True)

    return Work(call, 2 * case.logits_bytes())


def _detlogp(case: Case, inputs: Inputs) -> Work:
    leaf = inputs.logits.detach().requires_grad_()
    logp = detlogp.logp(leaf, inputs.token_ids)
    assert isinstance(logp, torch.Tensor)
    return _gradient_of(logp, leaf, case, inputs)


def _torch(case: Case, inputs: Inputs) -> Work:
    leaf = inputs.logits.detach().requires_grad_()
    ids = inputs.token_ids.unsqueeze(-1)
    logp = torch.log_softmax(leaf, -1).gather(-1, ids).squeeze(-1)
    return _gradient_of(logp, leaf, case, inputs)


VARIANTS = {"detlogp": _detlogp, "torch": _torch}
