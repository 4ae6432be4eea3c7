"""What a benchmark is made of: a case, its inputs, and the work that a variant does on them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    rows: int
    vocab: int
    dtype: torch.dtype

    def name(self) -> str:
        return f"{self.rows} x {self.vocab} {str(self.dtype).removeprefix('torch.')}"

    def logits_bytes(self) -> int:
        return self.rows * self.vocab * self.dtype.itemsize


class Inputs(NamedTuple):
    logits: Tensor  # [N, V], N(0, 3)
    token_ids: Tensor  # [N]
    grad: Tensor  # [N], float32


class Work(NamedTuple):
    """One timed call, and the fewest bytes that it must move: each input once, each output once."""

    call: Callable[[], object]
    minimum_bytes: int


Setup = Callable[[Case, Inputs], Work]


def make_inputs(case: Case, device: str) -> Inputs:
    logits = torch.empty(case.rows, case.vocab, dtype=case.dtype, device=device).normal_(0, 3)
    token_ids = torch.randint(case.vocab, (case.rows,), device=device)
    return Inputs(logits, token_ids, torch.randn(case.rows, device=device))
