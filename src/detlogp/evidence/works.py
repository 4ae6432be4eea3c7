"""What is timed: each benchmark makes a call on given inputs, with the fewest bytes that it must
move and the arithmetic that it must do."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from detlogp.evidence.peers import Implementation


class Case(NamedTuple):
    rows: int
    vocab: int
    dtype: torch.dtype

    def name(self) -> str:
        return f"{self.rows} x {self.vocab} {str(self.dtype).removeprefix('torch.')}"

    def elements(self) -> int:
        return self.rows * self.vocab

    def logits_bytes(self) -> int:
        return self.elements() * self.dtype.itemsize


class Inputs(NamedTuple):
    logits: Tensor  # [N, V], N(0, 3)
    token_ids: Tensor  # [N]
    cotangent: Tensor  # [N], float32


class Work(NamedTuple):
    """One timed call. `minimum_bytes`: each input once, each output once. `operations`: additions,
    multiplications, comparisons and exponentials, one each."""

    call: Callable[[], object]
    minimum_bytes: int
    operations: int


Benchmark = Callable[[Implementation, Case, Inputs], Work]


def make_inputs(case: Case, device: str, seed: int = 0) -> Inputs:
    # A generator of their own: a failed graph capture, such as that of a call that synchronises,
    # leaves PyTorch's default one unusable.
    random = torch.Generator(device).manual_seed(seed)
    logits = torch.empty(case.rows, case.vocab, dtype=case.dtype, device=device)
    token_ids = torch.randint(case.vocab, (case.rows,), device=device, generator=random)
    cotangent = torch.randn(case.rows, device=device, generator=random)
    return Inputs(logits.normal_(0, 3, generator=random), token_ids, cotangent)


def forward(run: Implementation, case: Case, inputs: Inputs) -> Work:
    """logp without grad: a maximum, a subtraction, an exponential and an addition an element."""

    def call() -> object:
        with torch.no_grad():
            return run(inputs.logits, inputs.token_ids)

    return Work(call, case.logits_bytes(), 4 * case.elements())


def backward(run: Implementation, case: Case, inputs: Inputs) -> Work:
    """The gradient alone, the forward done before: two subtractions, an exponential, a product."""
    leaf = inputs.logits.detach().requires_grad_()
    value = run(leaf, inputs.token_ids)
    seed = inputs.cotangent.to(value.dtype)

    def call() -> object:
        return torch.autograd.grad(value, leaf, seed, retain_graph=True)

    return Work(call, 2 * case.logits_bytes(), 4 * case.elements())


def forward_backward(run: Implementation, case: Case, inputs: Inputs) -> Work:
    """A training step's share: the logits read twice, the gradient written."""
    leaf = inputs.logits.detach().requires_grad_()

    def call() -> object:
        value = run(leaf, inputs.token_ids)
        return torch.autograd.grad(value, leaf, inputs.cotangent.to(value.dtype))

    return Work(call, 3 * case.logits_bytes(), 8 * case.elements())


def training_step(run: Implementation, case: Case, inputs: Inputs) -> Work:
    """As in training, where the logits are the result of an operation: a copy stands for the head.
    What it allocates holds the logits too."""
    leaf = inputs.logits.detach().requires_grad_()

    def call() -> object:
        value = run(leaf.clone(), inputs.token_ids)
        return torch.autograd.grad(value, leaf, inputs.cotangent.to(value.dtype))

    return Work(call, 5 * case.logits_bytes(), 8 * case.elements())


def reverse_over_reverse(run: Implementation, case: Case, inputs: Inputs) -> Work:
    """A Hessian-vector product of sum_r g[r] logp[r]: forward, gradient and product."""
    leaf = inputs.logits.detach().requires_grad_()
    direction = inputs.logits.flip(0)

    def call() -> object:
        value = run(leaf, inputs.token_ids)
        seed = inputs.cotangent.to(value.dtype)
        (gradient,) = torch.autograd.grad(value, leaf, seed, create_graph=True)
        return torch.autograd.grad(gradient, leaf, direction)

    return Work(call, 6 * case.logits_bytes(), 16 * case.elements())


def forward_over_reverse(run: Implementation, case: Case, inputs: Inputs) -> Work:
    """The same product by torch.func.jvp of torch.func.grad."""
    direction = inputs.logits.flip(0)

    def loss(logits: Tensor) -> Tensor:
        value = run(logits, inputs.token_ids)
        return (value * inputs.cotangent.to(value.dtype)).sum()

    def call() -> object:
        return torch.func.jvp(torch.func.grad(loss), (inputs.logits,), (direction,))

    return Work(call, 6 * case.logits_bytes(), 16 * case.elements())


TRAINING_STEP = "training step"
FIRST_ORDER: dict[str, Benchmark] = {
    "forward": forward,
    "backward": backward,
    "forward + backward": forward_backward,
    TRAINING_STEP: training_step,
}
SECOND_ORDER: dict[str, Benchmark] = {
    "hvp, reverse over reverse": reverse_over_reverse,
    "hvp, forward over reverse": forward_over_reverse,
}
