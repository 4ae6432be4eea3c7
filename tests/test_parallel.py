"""detlogp.parallel: one process's bits, on any number of processes and any split of the columns."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from calls import nested_derivatives
from conftest import HAS_CUDA
from ranks import WORLDS, Ranks
from torch import Tensor
from torch import distributed as dist

import detlogp
from detlogp import reference
from detlogp.functional import LogpResult
from detlogp.testing import assert_same_bits

INF, NAN = torch.inf, torch.nan
SPLITS = ("even", "uneven", "empty", "padded")
GPUS = torch.cuda.device_count() if HAS_CUDA else 0


@pytest.fixture(scope="module")
def gloo() -> Iterator[Ranks]:
    ranks = Ranks(max(WORLDS), "gloo")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    ranks = Ranks(GPUS, "nccl")
    yield ranks
    ranks.close()


# ---- inputs, the same on every process -----------------------------------------------------------


def widths_of(split: str, vocab: int, world: int) -> list[int]:
    """Columns of each process, padding among them."""
    if world == 1:
        return [vocab]
    if split == "uneven":
        weights = [1 + 2 * (rank % 3) for rank in range(world)]
        widths = [vocab * weight // sum(weights) for weight in weights]
    elif split == "empty":
        widths = [0 if rank % 2 else vocab // ((world + 1) // 2) for rank in range(world)]
    elif split == "padded":
        return [-(-vocab // world)] * world
    else:
        widths = [vocab // world] * world
    widths[0] += vocab - sum(widths)
    return widths


class Problem:
    """Whole rows, and this process's part of them, with NaN in the padding."""

    def __init__(
        self, group: dist.ProcessGroup, split: str, vocab: int, dtype: torch.dtype, device: str
    ) -> None:
        generator = torch.Generator().manual_seed(vocab)
        x = 3 * torch.randn(12, vocab, generator=generator)
        x[1] += 300
        x[2, 0], x[3, -1] = NAN, INF
        x[4] = -INF
        x[5, : vocab - 1] = -INF
        x[6, vocab // 2] = 60.0
        self.group, self.vocab = group, vocab
        self.logits = x.to(dtype).to(device)
        ids = torch.randint(vocab, (12,), generator=generator)
        ids[7:10] = torch.tensor([-100, vocab, 2**40])
        self.ids = ids.to(device)
        self.rows = torch.arange(12, device=device) != 10
        self.grads = torch.randn(2, 12, generator=generator).to(device)
        shape = (2, 12, vocab)
        self.u, self.w = torch.randn(shape, generator=generator).to(dtype).to(device)
        widths = widths_of(split, vocab, group.size())
        self.first = sum(widths[: dist.get_rank(group)])
        self.width = widths[dist.get_rank(group)]

    def part(self, matrix: Tensor, padding: float = NAN) -> Tensor:
        here = matrix[:, self.first : self.first + self.width].contiguous()
        missing = self.width - here.shape[1]
        return torch.nn.functional.pad(here, (0, missing), value=padding)

    def score(self, shard: Tensor, **options: Any) -> Any:
        vocab, group = self.vocab, self.group
        return detlogp.parallel.logp(shard, self.ids, vocab_size=vocab, group=group, **options)

    def score_whole(self, logits: Tensor, **options: Any) -> Any:
        return detlogp.logp(logits, self.ids, contract="exact", **options)


def on_each(test: Any) -> Any:
    """Over gloo on the CPU and on CUDA, over NCCL where there are GPUs for it."""
    cuda = [
        pytest.param("gloo", "cuda", marks=pytest.mark.cuda),
        pytest.param("nccl", "cuda", marks=[pytest.mark.cuda, NEEDS_GPUS]),
    ]
    cases = [("gloo", "cpu"), *(cuda if HAS_CUDA else [])]
    return pytest.mark.parametrize(("backend", "device"), cases)(test)


NEEDS_GPUS = pytest.mark.skipif(GPUS < 2, reason="NCCL needs a GPU a process: two of them")


def ranks_of(request: pytest.FixtureRequest, backend: str) -> Ranks:
    ranks: Ranks = request.getfixturevalue(backend)
    return ranks


# ---- value and gradient --------------------------------------------------------------------------


def check_first_order(
    group: dist.ProcessGroup, split: str, vocab: int, dtype: torch.dtype, device: str
) -> None:
    problem = Problem(group, split, vocab, dtype, device)
    for rows in (None, problem.rows, torch.tensor([1, 5, 5, 99], device=device)):
        whole = problem.logits.clone().requires_grad_()
        expected = problem.score_whole(whole, rows=rows, return_lse=True)
        shard = problem.part(problem.logits).requires_grad_()
        before = shard.detach().clone()
        found = problem.score(shard, rows=rows, return_lse=True, validate=rows is not None)
        assert isinstance(found, LogpResult)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one.detach(), other.detach())
        (gradient,) = torch.autograd.grad(found, shard, tuple(problem.grads))
        (of_whole,) = torch.autograd.grad(expected, whole, tuple(problem.grads))
        assert_same_bits(gradient, problem.part(of_whole, padding=0.0))
        assert_same_bits(shard.detach(), before)
    with torch.no_grad():
        assert_same_bits(problem.score(shard), problem.score_whole(whole))
        for options in ({"dtype": torch.bfloat16}, {"on_invalid": "nan"}):
            found = problem.score(shard, **options, validate=True)
            assert_same_bits(found, problem.score_whole(whole, **options))


@on_each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("world", WORLDS)
def test_value_and_gradient(
    world: int,
    split: str,
    dtype: torch.dtype,
    backend: str,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """One process's bits, special rows and bad ids among them; padding is not read."""
    ranks = ranks_of(request, backend)
    if world in ranks.worlds:
        for vocab in (9, 1003):
            ranks.run(world, check_first_order, split, vocab, dtype, device)


# ---- other derivatives ---------------------------------------------------------------------------


def check_derivatives(
    group: dist.ProcessGroup, split: str, vocab: int, dtype: torch.dtype, device: str
) -> None:
    problem = Problem(group, split, vocab, dtype, device)
    whole = (problem.logits, problem.u, problem.w)
    scale = problem.grads[0]
    expected = nested_derivatives(problem.score_whole, *whole, scale)
    parts = (problem.part(problem.logits), problem.part(problem.u), problem.part(problem.w))
    for name, found in nested_derivatives(problem.score, *parts, scale).items():
        value = expected[name]
        try:
            assert_same_bits(found, value if value.dim() == 1 else problem.part(value, padding=0.0))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    ordinary = [0, 1, 6, 7, 11]  # without infinities
    x, u, w = (m[ordinary].double() for m in whole)

    def exact(logits: Tensor) -> Tensor:
        return reference.logp(logits, problem.ids[ordinary]).logp

    eps = max(torch.finfo(dtype).eps, 1e-6)
    for name, value in nested_derivatives(exact, x, u, w, scale[ordinary].double()).items():
        distance = (expected[name][ordinary].double() - value).abs().max()
        assert distance <= 30 * eps * value.abs().max(), (name, distance)


@on_each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("world", WORLDS)
def test_derivatives(
    world: int,
    split: str,
    dtype: torch.dtype,
    backend: str,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    """Orders 2 and 3, jvp and their nestings: right, and the bits of one process."""
    ranks = ranks_of(request, backend)
    if world in ranks.worlds:
        ranks.run(world, check_derivatives, split, 203, dtype, device)


def check_transforms(group: dist.ProcessGroup) -> None:
    problem = Problem(group, "uneven", 57, torch.float32, "cpu")
    x, shard = problem.logits, problem.part(problem.logits)
    ids = problem.ids

    def score(logits: Tensor, token_id: Tensor) -> Tensor:
        return detlogp.parallel.logp(logits, token_id, vocab_size=57, group=group)

    def score_whole(logits: Tensor, token_id: Tensor) -> Tensor:
        return detlogp.logp(logits, token_id, contract="exact")

    for transform in (
        torch.func.vmap,
        lambda f: torch.func.vmap(torch.func.grad(f)),
        lambda f: torch.func.vmap(torch.func.jacrev(f)),
    ):
        found, expected = transform(score)(shard, ids), transform(score_whole)(x, ids)
        assert_same_bits(found, expected if expected.dim() == 1 else problem.part(expected))
    shared = torch.func.vmap(score, in_dims=(None, 0))(shard[0], ids)
    assert_same_bits(shared, torch.func.vmap(score_whole, in_dims=(None, 0))(x[0], ids))


def check_linearize(group: dist.ProcessGroup) -> None:
    problem = Problem(group, "even", 57, torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match=r"torch\.func\.linearize"):
        torch.func.linearize(problem.score, problem.part(problem.logits))


@pytest.mark.parametrize("world", [1, 2])
def test_linearize_is_refused(world: int, gloo: Ranks) -> None:
    """Its tracer would fold what the processes add up."""
    gloo.run(world, check_linearize)


@pytest.mark.parametrize("world", WORLDS)
def test_transforms(world: int, gloo: Ranks) -> None:
    gloo.run(world, check_transforms)


# ---- communication -------------------------------------------------------------------------------


def count_communication(group: dist.ProcessGroup) -> list[list[tuple[str, int]]]:
    """Element type and number of every reduction: of a value, a backward, a jvp, a second order."""
    problem = Problem(group, "even", 500, torch.float32, "cpu")
    seen: list[tuple[str, int]] = []
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        seen.append((str(tensor.dtype), tensor.numel()))
        return real(tensor, *args, **options)

    shard = problem.part(problem.logits).requires_grad_()
    problem.score(shard)
    dist.all_reduce = all_reduce
    stages = []
    try:
        value = problem.score(shard)
        stages.append(list(seen))
        seen.clear()
        value.backward(problem.grads[0])
        stages.append(list(seen))
        with torch.no_grad():
            torch.func.jvp(problem.score, (shard,), (problem.part(problem.u),))
        stages.append(seen[len(stages[0]) :])
    finally:
        dist.all_reduce = real
    return stages


def test_communication(gloo: Ranks) -> None:
    """O(N): a max of 2 N keys and a sum of N integers; none in the backward."""
    keys, sums = ("torch.int32", 24), ("torch.int64", 12)
    for stages in gloo.run(3, count_communication):
        assert stages == [[keys, sums], [], [keys, sums, ("torch.int32", 12)]]


# ---- misuse --------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def misuse(group: dist.ProcessGroup, name: str, rank_of: int, validate: bool) -> list[str]:
    """The error of a wrong call of process `rank_of` (-1: of all); then right calls work."""
    problem = Problem(group, "even", 40, torch.float32, "cpu")
    rank = dist.get_rank(group)
    shard, ids, vocab = problem.part(problem.logits), problem.ids, 40
    options: dict[str, Any] = {}
    if rank == rank_of or rank_of == -1:
        if name == "gathered":
            shard = problem.logits
        elif name == "narrow":
            shard = shard[:, :-1]
        elif name == "local vocab_size":
            vocab = shard.shape[1]
        elif name == "rows":
            shard, ids = shard[:5], ids[:5]
        elif name == "dtype":
            shard = shard.half()
        elif name == "lse":
            options = {"return_lse": True}
        elif name == "float ids":
            ids = ids.float()
        elif name == "float64":
            shard = shard.double()
        elif name == "0-d":
            shard = shard[0, 0]
        elif name == "other ids":
            ids = ids.roll(1)
        elif name == "no vocab_size":
            vocab = None  # type: ignore[assignment]
    if name == "other rows":
        options = {"rows": torch.arange(12) != rank}

    def call() -> object:
        return detlogp.parallel.logp(
            shard, ids, vocab_size=vocab, group=group, validate=validate, **options
        )

    errors = [refused(call)]
    expected = problem.score_whole(problem.logits)
    assert_same_bits(problem.score(problem.part(problem.logits)), expected)
    if validate:
        errors.append(refused(call))
        assert_same_bits(problem.score(problem.part(problem.logits)), expected)
    return errors


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize(
    ("name", "rank", "message"),
    [
        ("gathered", -1, r"widths \[40, 40, 40\]; were the logits gathered already"),
        ("gathered", 1, r"widths \[14, 40, 13\]"),
        ("narrow", -1, r"widths \[13, 12, 12\]"),
        ("narrow", 2, r"widths \[14, 13, 12\]"),
        ("local vocab_size", -1, "must be given the same vocab_size"),
        ("local vocab_size", 0, "must be given the same vocab_size"),
        ("rows", 1, "must be given the same vocab_size, leading shape"),
        ("dtype", 1, "must be given the same .*float16"),
        ("lse", 2, "must be given the same .*options"),
        ("float ids", 2, "token_ids must have an integer dtype"),
        ("float64", 0, "contract must be 'locked' in double arithmetic"),
        ("0-d", 1, "logits_shard must have shape"),
        ("no vocab_size", 0, "vocab_size must be an int"),
    ],
)
def test_misuse(name: str, rank: int, message: str, validate: bool, gloo: Ranks) -> None:
    """An error on every process, at the first call and at every call with validate; no hang."""
    for errors in gloo.run(3, misuse, name, rank, validate):
        assert len(errors) == 1 + validate
        for error in errors:
            assert re.search(message, error), error


@pytest.mark.parametrize(("name", "of"), [("other ids", "token_ids"), ("other rows", "rows")])
def test_validate(name: str, of: str, gloo: Ranks) -> None:
    """What shapes do not show."""
    for errors in gloo.run(3, misuse, name, 1, True):
        for error in errors:
            assert f"{of} must be the same on every process" in error


def change_split(group: dist.ProcessGroup) -> str:
    first, second = (Problem(group, split, 40, torch.float32, "cpu") for split in SPLITS[:2])
    first.score(first.part(first.logits))
    error = refused(lambda: second.score(second.part(second.logits)))
    found = second.score(second.part(second.logits), validate=True)
    assert_same_bits(found, second.score_whole(second.logits))
    return error


def test_the_split_is_settled_at_the_first_call(gloo: Ranks) -> None:
    for error in gloo.run(2, change_split):
        assert "columns, as at the first call of this group with vocab_size=40" in error


def refuse_later(group: dist.ProcessGroup) -> str:
    problem = Problem(group, "even", 40, torch.float32, "cpu")
    shard = problem.part(problem.logits)
    problem.score(shard)
    return refused(lambda: problem.score(shard, on_invalid="raise"))


def test_bad_ids_raise_on_every_process(gloo: Ranks) -> None:
    for error in gloo.run(3, refuse_later):
        assert error == "ValueError: token_ids must be in [0, 40), got -100 in row 7"


def test_no_group() -> None:
    with pytest.raises(ValueError, match="group must be of an initialized"):
        detlogp.parallel.logp(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), vocab_size=3)


# ---- DTensor -------------------------------------------------------------------------------------


def check_dtensor(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    problem = Problem(group, "even", 41, torch.float32, "cpu")
    mesh = DeviceMesh.from_group(group, "cpu")
    leaf = distribute_tensor(problem.logits, mesh, [Shard(1)]).requires_grad_()
    found = detlogp.parallel.logp(leaf, problem.ids, return_lse=True)
    whole = problem.logits.clone().requires_grad_()
    expected = problem.score_whole(whole, return_lse=True)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one.detach(), other.detach())
    (gradient,) = torch.autograd.grad(found, leaf, tuple(problem.grads))
    (of_whole,) = torch.autograd.grad(expected, whole, tuple(problem.grads))
    assert isinstance(gradient, DTensor)
    assert_same_bits(gradient.full_tensor(), of_whole)
    for placement in (Shard(0), Replicate()):
        wrong = distribute_tensor(problem.logits, mesh, [placement])
        error = refused(partial(detlogp.parallel.logp, wrong, problem.ids))
        assert "must be sharded on the last dimension by one mesh dimension" in error


def check_mesh_in_another_order(group: dist.ProcessGroup) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", [1, 0, 2, 3, 4, 5, 6, 7])
    logits = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(1)])
    ids = torch.zeros(3, dtype=torch.int64)
    return refused(lambda: detlogp.parallel.logp(logits, ids))


def test_a_mesh_in_another_order_is_refused(gloo: Ranks) -> None:
    """PyTorch sorts the ranks of a group; the shards then follow each other in another order."""
    for error in gloo.run(8, check_mesh_in_another_order):
        assert "must have a mesh whose processes are in the order of their ranks" in error


@pytest.mark.parametrize("world", WORLDS)
def test_dtensor(world: int, gloo: Ranks) -> None:
    gloo.run(world, check_dtensor)


def check_two_mesh_dimensions(group: dist.ProcessGroup) -> None:
    """Rows over one dimension of the mesh, columns over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    problem = Problem(group, "even", 41, torch.float32, "cpu")
    mesh = init_device_mesh("cpu", (2, 4))
    logits = distribute_tensor(problem.logits, mesh, [Shard(0), Shard(1)])
    here = slice(6 * mesh.get_local_rank(0), 6 * mesh.get_local_rank(0) + 6)
    found = detlogp.parallel.logp(logits, problem.ids[here])
    assert_same_bits(found, problem.score_whole(problem.logits)[here])


def test_two_mesh_dimensions(gloo: Ranks) -> None:
    gloo.run(8, check_two_mesh_dimensions)
