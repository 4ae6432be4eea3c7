"""logp of every row, without grad."""

import torch
from cases import Case, Inputs, Work

import detlogp


def _detlogp(case: Case, inputs: Inputs) -> Work:
    def call() -> object:
        return detlogp.logp(inputs.logits, inputs.token_ids)

    return Work(call, case.logits_bytes())


def _torch(case: Case, inputs: Inputs) -> Work:
    def call() -> object:
        log_probabilities = torch.log_softmax(inputs.logits, -1)
        return log_probabilities.gather(-1, inputs.token_ids.unsqueeze(-1))

    return Work(call, case.logits_bytes())


VARIANTS = {"detlogp": _detlogp, "torch": _torch}
