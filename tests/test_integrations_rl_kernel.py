"""RL-Kernel's names: two paths, the registry, the errors, and where RL-Kernel is installed."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import detlogp
from detlogp.integrations import rl_kernel
from detlogp.testing import assert_same_bits

CANONICAL, LEGACY, REGISTRY, LEGACY_REGISTRY = rl_kernel.PATHS
# As much of RL-Kernel's registry as get_op is made of; it has no deterministic CPU operator.
INSTALLED = {
    "rl_engine/__init__.py": "",
    "rl_engine/runtime/__init__.py": "",
    "rl_engine/runtime/registry.py": """
from enum import Enum

class OpBackend(Enum):
    CUDA_DETERMINISTIC_LOGP = "cuda"
    PYTORCH_NATIVE = "native"

class KernelRegistry:
    def __init__(self):
        names = ("logp_deterministic", "logp_deterministic_indexed", "logp")
        self._instance_cache = {"PYTORCH_NATIVE": "native"}
        self._priority_map = {
            "cuda": {name: [OpBackend.CUDA_DETERMINISTIC_LOGP] for name in names},
            "cpu": {name: [OpBackend.PYTORCH_NATIVE] for name in names},
        }

    def get_op(self, op_type, device="cpu"):
        for backend in self._priority_map[device][op_type]:
            if backend.name in self._instance_cache:
                return self._instance_cache[backend.name]
        raise RuntimeError("no functional backend")

kernel_registry = KernelRegistry()
""",
}


def loaded() -> list[str]:
    return sorted(name for name in sys.modules if name.partition(".")[0] == "rl_engine")


@pytest.fixture
def stand_in() -> Iterator[None]:
    assert loaded() == []
    with rl_kernel.enable():
        yield
    assert loaded() == []


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of that name on the path; its registry."""
    for name, text in INSTALLED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(REGISTRY).kernel_registry
    for name in loaded():
        del sys.modules[name]


def test_one_module_and_one_class_under_both_paths(stand_in: None) -> None:
    canonical, legacy = (importlib.import_module(path) for path in (CANONICAL, LEGACY))
    assert canonical is legacy
    from rl_engine.backends.cuda.logprob.logp import DeterministicLogpCUDAOp as One
    from rl_engine.kernels.ops.cuda.loss.logp import DeterministicLogpCUDAOp as Other

    assert One is Other
    assert One.__name__ == "DeterministicLogpCUDAOp"
    import rl_engine.backends.cuda.logprob.logp

    assert rl_engine.backends.cuda.logprob.logp is canonical


@pytest.mark.parametrize("path", [REGISTRY, LEGACY_REGISTRY])
@pytest.mark.parametrize("name", rl_kernel.OPERATORS)
def test_the_registry(
    stand_in: None, path: str, name: str, device: str, generator: torch.Generator
) -> None:
    operator = importlib.import_module(path).kernel_registry.get_op(name)
    assert type(operator) is importlib.import_module(LEGACY).DeterministicLogpCUDAOp
    logits = torch.randn(2, 3, 300, generator=generator).bfloat16().to(device)
    ids = torch.randint(300, (2, 3), generator=generator).to(device)
    expected = detlogp.logp(logits, ids)
    assert_same_bits(operator(logits, ids), expected)
    # RL-Kernel flattens the ids, and takes them from any device.
    assert_same_bits(operator.apply(logits, ids.flatten().cpu().int()), expected)
    rows = torch.tensor([[4], [0]])
    out = torch.full((2, 3), 7.0, dtype=torch.float64, device=device)
    assert operator.indexed_out(logits, ids, rows, out) is out
    chosen = torch.tensor([True, False, False, False, True, False], device=device).view(2, 3)
    assert torch.equal(out, expected.double().where(chosen, 7.0))
    assert torch.equal(operator.indexed_fp32(logits, ids, rows), expected.where(chosen, 0.0))


def test_what_is_not_there(stand_in: None) -> None:
    registry = importlib.import_module(REGISTRY).kernel_registry
    with pytest.raises(RuntimeError, match="no functional backend found for rms_norm"):
        registry.get_op("rms_norm")
    with pytest.raises(ModuleNotFoundError, match="rl_engine"):
        importlib.import_module("rl_engine.backends.cuda.norm")
    with pytest.raises(ImportError, match="FusedLogpGenericOp"):
        from rl_engine.backends.cuda.logprob.logp import FusedLogpGenericOp  # noqa: F401


def test_the_errors_that_its_users_match(device: str) -> None:
    operator = rl_kernel.DeterministicLogpCUDAOp()
    logits = torch.zeros(2, 3, 17, dtype=torch.float16, device=device)
    ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
    buffer = torch.empty(2, 3, device=device)
    with pytest.raises(RuntimeError, match="token_ids length must match logits rows, 6, got 4"):
        operator.apply_fp32(logits, ids[:, :2])
    with pytest.raises(ValueError, match="output shape"):
        operator.out(logits, ids, buffer[:, :2])
    with pytest.raises(RuntimeError, match="output dtype"):
        operator.out(logits, ids, buffer.int())
    # In this layer only: the library's own operator keeps its words.
    with pytest.raises(ValueError, match="token_ids must have logits' leading shape"):
        detlogp.DeterministicLogp().apply(logits, ids[:, :2])


def test_nested_and_undone() -> None:
    outer, inner = rl_kernel.enable(), rl_kernel.enable()
    names = loaded()
    assert set(rl_kernel.PATHS) < set(names)
    outer.undo()
    assert loaded() == names
    inner.undo()
    assert loaded() == []
    with pytest.raises(KeyError), rl_kernel.enable():
        raise KeyError
    assert loaded() == []


def test_registers_with_an_installed_rl_kernel(installed: Any) -> None:
    modules = loaded()
    with pytest.raises(RuntimeError):
        installed.get_op("logp_deterministic", "cuda")
    with rl_kernel.enable():
        assert loaded() == modules
        for name in rl_kernel.OPERATORS:
            for platform in rl_kernel.PLATFORMS:
                operator = installed.get_op(name, platform)
                assert type(operator) is rl_kernel.DeterministicLogpCUDAOp
        assert installed.get_op("logp") == "native"
    assert installed.get_op("logp_deterministic") == "native"
    with pytest.raises(RuntimeError):
        installed.get_op("logp_deterministic", "cuda")
    installed._instance_cache["CUDA_DETERMINISTIC_LOGP"] = "its own"
    with rl_kernel.enable():
        assert installed.get_op("logp_deterministic", "cuda") != "its own"
    assert installed.get_op("logp_deterministic", "cuda") == "its own"


def test_an_rl_kernel_with_other_internals(installed: Any) -> None:
    lists = installed._priority_map["cpu"]
    del lists["logp_deterministic_indexed"]
    before = {platform: dict(names) for platform, names in installed._priority_map.items()}
    with pytest.raises(RuntimeError, match="does not know this version's internals"):
        rl_kernel.enable()
    assert installed._priority_map == before
    assert list(installed._instance_cache) == ["PYTORCH_NATIVE"]
