"""What a route is applied to: problems, the forms of a call, detlogp and its float64 reference.

Logits, directions and weights are small multiples of 1/16, so that they are the same numbers in
every dtype. The reference is made of PyTorch's own exp, sum, log and gather.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import detlogp
from detlogp.testing import lanes

Function = Callable[[Tensor], Tensor]
Directions = tuple[Tensor, ...]


class Problem(NamedTuple):
    logits: Tensor  # [N, V], multiples of 1/16 in (-8, 8)
    token_ids: Tensor  # [N], a bad one among them
    directions: Directions  # 10 of [N, V], multiples of 1/16 in [-1, 1]

    def to(self, dtype: torch.dtype) -> "Problem":
        directions = tuple(direction.to(dtype) for direction in self.directions)
        return Problem(self.logits.to(dtype), self.token_ids, directions)


class Form(NamedTuple):
    """What is asked of `logp`. The row numbers repeat themselves, and one is out of range."""

    indexed: str  # "dense", "mask" or "numbers"
    lse: bool

    @property
    def name(self) -> str:
        return self.indexed + ("+lse" if self.lse else "")


Runner = Callable[[Function, Tensor, Directions], Tensor]


class Route(NamedTuple):
    run: Runner
    order: int
    # "raised": PyTorch itself refuses. "skipped": PyTorch itself is wrong (see `_is_unsupported`).
    expected: str = "right"
    float64_only: bool = False
    one_form: bool = False  # the cost grows with the order: the dense form alone
    reference: Runner | None = None  # the same derivative by another route


FORMS = [Form("dense", False), Form("dense", True), Form("mask", True), Form("numbers", False)]


def make_problem(rows: int, vocab: int, device: str, seed: int) -> Problem:
    """float64; the last row but one has a bad id, and the last is not selected by `row_numbers`."""
    random = torch.Generator().manual_seed(seed)
    logits = (randn(random, rows, vocab) * 24).round().clamp(-127, 127) / 16
    directions = (randn(random, 10, rows, vocab) * 8).round().clamp(-16, 16) / 16
    ids = torch.randint(vocab, (rows,), generator=random)
    ids[-2] = -100 if seed % 2 else vocab
    return Problem(logits.to(device), ids.to(device), tuple(directions.to(device)))


def randn(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def row_numbers(rows: int, device: torch.device) -> Tensor:
    return torch.tensor([*range(rows - 1), 0, rows + 5, -1], device=device)


def row_mask(rows: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device) < rows - 1


def detlogp_function(form: Form, token_ids: Tensor) -> Function:
    """[N, V] -> [N]: a smooth function of logp, and of lse where the form has it."""
    rows = None
    if form.indexed != "dense":
        select = row_mask if form.indexed == "mask" else row_numbers
        rows = select(len(token_ids), token_ids.device)

    def function(x: Tensor) -> Tensor:
        result = detlogp.logp(x, token_ids, rows=rows, return_lse=form.lse)
        if isinstance(result, Tensor):
            return result.sin()
        lse = torch.where(result.lse.isinf(), 0.0, result.lse)
        return (result.logp + 2.0 * lse).sin()

    return function


def reference_function(form: Form, token_ids: Tensor) -> Function:
    """The same in PyTorch's own operators."""

    def function(x: Tensor) -> Tensor:
        kept = (token_ids >= 0) & (token_ids < x.shape[-1])
        if form.indexed != "dense":
            kept = kept & row_mask(len(token_ids), token_ids.device)
        shift = x.detach().amax(-1)
        lse = (x - shift.unsqueeze(-1)).exp().sum(-1).log() + shift
        column = torch.where(kept, token_ids, 0).unsqueeze(-1)
        logp = torch.where(kept, x.gather(-1, column).squeeze(-1) - lse, 0.0)
        return (logp + 2.0 * torch.where(kept, lse, 0.0) if form.lse else logp).sin()

    return function


def tolerance(reference: Tensor, order: int, dtype: torch.dtype, vocab: int) -> float:
    """Largest error that rounding explains, for a derivative of this order.

    A result is a sum of products of probabilities, directions and cotangents, all of them below 1,
    so that the products are of order 1 even where they cancel to less. Each is off by one unit of
    roundoff for every addition of its row sum (V/B + 9 of the tree), by 4 more in exp, log and the
    function around logp, by 16 for the rounding of a logp that is 16 at most, and by one for each
    order's factor. In float64 the reference has the same error. A half type rounds the gradients
    and the cotangents of the logits besides, at every order: by half an eps each, of numbers up to
    twice the largest element of the result.
    """
    largest = float(reference.abs().max()) if reference.numel() else 0.0
    unit = 2.0**-52 if dtype == torch.float64 else 2.0**-24
    bound = unit * (math.ceil(vocab / lanes(vocab)) + 29 + order) * max(1.0, largest)
    if dtype in (torch.float16, torch.bfloat16):
        bound += 2 * (order + 1) * torch.finfo(dtype).eps * largest
    return bound
