"""vmap equals the loop to the bit, with one call for the batch, and copies nothing."""

from typing import Any, NamedTuple

import pytest
import torch
from calls import Function, random_problem, with_tangents
from torch import Tensor
from torch.func import grad, vmap

import detlogp
from detlogp.evidence.kernels import Recorder
from detlogp.testing import assert_same_bits

B, N, V = 3, 4, 300


class Batch(NamedTuple):
    """What is mapped, and over which axis."""

    logits: Tensor
    token_ids: Tensor
    rows: Tensor | None
    in_dims: tuple[int | None, int | None, int | None]

    def loop(self, function: Function) -> Tensor:
        count = next(
            arg.shape[dim] for arg, dim in self._pairs() if arg is not None and dim is not None
        )
        samples = (
            function(*(arg if dim is None else arg.select(dim, b) for arg, dim in self._pairs()))
            for b in range(count)
        )
        return torch.stack(list(samples))

    def mapped(self, function: Function) -> Tensor:
        result: Tensor = vmap(function, in_dims=self.in_dims)(*self[:3])
        return result

    def _pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self[:3], self.in_dims, strict=True))


def _batches(dtype: torch.dtype, device: str, generator: torch.Generator) -> dict[str, Batch]:
    problem = random_problem(B * N, V, dtype, device, generator)
    x, ids = problem.logits.view(B, N, V), problem.token_ids.view(B, N)
    ids[1, 2], ids[2, 0] = -100, V
    numbers = torch.tensor([[0, 1, 9], [3, 3, -1], [2, 0, 1]], device=device)
    mask = torch.arange(B * N, device=device).view(B, N) % 3 != 1
    return {
        "logits and ids": Batch(x, ids, None, (0, 0, None)),
        "logits": Batch(x, ids[1], None, (0, None, None)),
        "ids of shared logits": Batch(x[0], ids, None, (None, 0, None)),
        "axis 1": Batch(x.movedim(0, 1), ids.T, None, (1, 1, None)),
        "axis -1": Batch(x.movedim(0, 2).contiguous(), ids, None, (-1, 0, None)),
        "row numbers": Batch(x, ids, numbers, (0, 0, 0)),
        "shared row numbers": Batch(x, ids, numbers[0], (0, 0, None)),
        "masks": Batch(x, ids, mask, (0, 0, 0)),
        "row numbers alone": Batch(x[0], ids[0], numbers, (None, None, 0)),
    }


BATCHES = list(_batches(torch.float32, "cpu", torch.Generator()))


def _sorted_names(recorder: Recorder) -> list[str]:
    """A plain value takes `logp`; under a transform the statistics are kept too."""
    names = ("logp_with_stats" if name == "logp" else name for name in recorder.names())
    return sorted(names)


def _value(x: Tensor, ids: Tensor, rows: Tensor | None) -> Tensor:
    return detlogp.logp(x, ids, rows=rows)


def _gradient(x: Tensor, ids: Tensor, rows: Tensor | None) -> Tensor:
    result: Tensor = grad(lambda y: detlogp.logp(y, ids, rows=rows).sin().sum())(x)
    return result


FUNCTIONS = with_tangents(_value, _gradient)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_the_loop(
    batch: str, function: str, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    chosen = _batches(dtype, device, generator)[batch]
    assert_same_bits(chosen.mapped(FUNCTIONS[function]), chosen.loop(FUNCTIONS[function]))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_one_call_for_the_batch(
    batch: str, function: str, device: str, generator: torch.Generator
) -> None:
    """As many calls of operators as one sample takes."""
    chosen = _batches(torch.float32, device, generator)[batch]
    with Recorder() as whole:
        chosen.mapped(FUNCTIONS[function])
    with Recorder() as loop:
        chosen.loop(FUNCTIONS[function])
    assert whole.calls
    assert sorted(B * whole.names()) == _sorted_names(loop)


@pytest.mark.parametrize("function", ["value", "gradient", "jvp"])
def test_shared_logits_are_not_copied(
    function: str, device: str, generator: torch.Generator
) -> None:
    """Case 17: the operator reads each sample's rows from the one tensor."""
    chosen = _batches(torch.bfloat16, device, generator)["ids of shared logits"]
    with Recorder() as recorder:
        chosen.mapped(FUNCTIONS[function])
    for _, arguments in recorder.calls:
        assert arguments[0].shape == (B, N, V)
        assert arguments[0].stride(0) == 0
        assert arguments[0].data_ptr() == chosen.logits.data_ptr()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_nested(function: str, device: str, generator: torch.Generator) -> None:
    """Ids mapped outside, logits inside, over another axis: one call for both."""
    x, ids, *_ = _batches(torch.float32, device, generator)["logits and ids"]
    chosen = FUNCTIONS[function]

    def inner(ids: Tensor) -> Tensor:
        result: Tensor = vmap(lambda y: chosen(y, ids, None), in_dims=1)(x.movedim(0, 1))
        return result

    with Recorder() as nested:
        actual = vmap(inner)(ids)
    with Recorder() as one:
        chosen(x[0], ids[0], None)
    assert sorted(nested.names()) == _sorted_names(one)
    expected = [torch.stack([chosen(sample, i, None) for sample in x]) for i in ids]
    assert_same_bits(actual, torch.stack(expected))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_size_zero(function: str, dtype: torch.dtype, device: str) -> None:
    """No sample, and samples without rows."""
    for samples, rows in ((0, N), (B, 0)):
        x = torch.zeros(samples, rows, V, dtype=dtype, device=device)
        ids = torch.zeros(samples, rows, dtype=torch.int64, device=device)
        result = vmap(lambda y, i: FUNCTIONS[function](y, i, None))(x, ids)
        one = FUNCTIONS[function](x.new_zeros(rows, V), ids.new_zeros(rows), None)
        assert result.shape == (samples, *one.shape)
        assert result.dtype == one.dtype


def test_chunks_and_several_results(device: str, generator: torch.Generator) -> None:
    """chunk_size, out_dims, a 0-d sample and both results."""
    problem = random_problem(7, V, torch.float32, device, generator)
    plain = detlogp.logp(problem.logits, problem.token_ids, return_lse=True)

    def both(x: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        result = detlogp.logp(x, i, return_lse=True)
        return result.logp, result.lse

    for actual in (
        vmap(both, chunk_size=3)(problem.logits, problem.token_ids),
        vmap(both, in_dims=(1, 0))(problem.logits.T, problem.token_ids),
    ):
        assert_same_bits(actual[0], plain.logp)
        assert_same_bits(actual[1], plain.lse)
