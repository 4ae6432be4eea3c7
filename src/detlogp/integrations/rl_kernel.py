"""RL-Kernel: its deterministic operator, under its names, by detlogp, on the CPU and on CUDA.

    from detlogp.integrations import rl_kernel
    rl_kernel.enable()
    from rl_engine.runtime.registry import kernel_registry
    kernel_registry.get_op("logp_deterministic")             # a DeterministicLogpCUDAOp

Where RL-Kernel is installed, the operator is registered with its registry, and RL-Kernel's modules
stay as they are. Elsewhere this module stands at the canonical and at the legacy path.

Source: RL-Kernel's public rl_engine/backends/cuda/logprob/logp.py and runtime/registry.py.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from detlogp._checks import FLOAT_DTYPES, dtype_name
from detlogp.integrations._patch import Patch, Patcher, Undo
from detlogp.object import DeterministicLogp

OPERATORS = ("logp_deterministic", "logp_deterministic_indexed")
# Where this module stands when RL-Kernel is not installed. RL-Kernel's older code says kernels.
PATHS = (
    "rl_engine.backends.cuda.logprob.logp",
    "rl_engine.kernels.ops.cuda.loss.logp",
    "rl_engine.runtime.registry",
    "rl_engine.kernels.registry",
)
PLATFORMS = ("cuda", "cpu")
_BACKEND = "CUDA_DETERMINISTIC_LOGP"


def enable() -> Patch:
    """Gives RL-Kernel's names to detlogp until the returned Patch is undone.

    Raises: RuntimeError, for an RL-Kernel whose registry has other internals.
    """
    return _patcher.enable()


class DeterministicLogpCUDAOp(DeterministicLogp):
    """`detlogp.DeterministicLogp`, with the errors of RL-Kernel's operator of this name.

    Shapes as there, and the ids may have any shape with as many elements as logits have rows.

    Raises:
        RuntimeError: "token_ids length must match logits rows", "output dtype".
        ValueError: "output shape"; what `detlogp.logp` raises.
        TypeError: what `detlogp.logp` raises.
    """

    is_fused_logp = True
    is_batch_invariant = True

    def _score(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        rows: Tensor | None = None,
        out: Tensor | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        leading = logits.shape[:-1]
        if token_ids.numel() != leading.numel():
            raise RuntimeError(
                f"token_ids length must match logits rows, {leading.numel()}, "
                f"got {token_ids.numel()}"
            )
        if out is not None and out.shape != leading:
            raise ValueError(
                f"output shape must match logits' leading shape, {tuple(leading)}, "
                f"got {tuple(out.shape)}"
            )
        if out is not None and out.dtype not in FLOAT_DTYPES:
            expected = ", ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
            raise RuntimeError(
                f"output dtype must be one of {expected}, got {dtype_name(out.dtype)}"
            )
        ids = token_ids.reshape(leading).to(logits.device)
        rows = None if rows is None else rows.to(logits.device)
        return super()._score(logits, ids, rows=rows, out=out, compute_dtype=compute_dtype)


class KernelRegistry:
    """RL-Kernel's registry, as far as detlogp has its operators."""

    def __init__(self) -> None:
        self._operator = DeterministicLogpCUDAOp()

    def get_op(
        self, op_type: str, device: torch.device | str | None = None
    ) -> DeterministicLogpCUDAOp:
        """The operator, which runs on the device of its arguments; `device` changes nothing.

        Raises: RuntimeError, for an operator that detlogp does not have.
        """
        if op_type not in OPERATORS:
            raise RuntimeError(
                f"no functional backend found for {op_type}: RL-Kernel is not installed, and "
                f"detlogp has {', '.join(OPERATORS)}"
            )
        return self._operator


kernel_registry = KernelRegistry()


def _apply() -> Undo:
    if importlib.util.find_spec("rl_engine") is None:
        return _stand_in()
    return _register(importlib.import_module("rl_engine.runtime.registry"))


def _stand_in() -> Undo:
    """Puts this module at each of PATHS, in packages that hold nothing else."""
    added: dict[str, ModuleType] = {}
    for path in PATHS:
        parts = path.split(".")
        packages = [".".join(parts[: depth + 1]) for depth in range(len(parts) - 1)]
        for name in packages:
            if name not in added:
                spec = ModuleSpec(name, loader=None, is_package=True)
                added[name] = importlib.util.module_from_spec(spec)
        added[path] = sys.modules[__name__]
    for name, module in added.items():
        parent, _, attribute = name.rpartition(".")
        if parent:
            setattr(added[parent], attribute, module)
    sys.modules.update(added)

    def undo() -> None:
        for name, module in added.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    return undo


def _register(module: Any) -> Undo:
    """Makes the operator the only choice of RL-Kernel's registry for OPERATORS."""
    registry = module.kernel_registry
    try:
        backend = module.OpBackend[_BACKEND]
        instances: dict[str, Any] = registry._instance_cache
        choices = [registry._priority_map[platform] for platform in PLATFORMS]
        before = [{name: platform[name] for name in OPERATORS} for platform in choices]
    except (AttributeError, KeyError, ValueError) as error:
        raise RuntimeError(
            f"rl_engine.runtime.registry: expected OpBackend.{_BACKEND}, and _instance_cache and "
            f"_priority_map of kernel_registry with {', '.join(OPERATORS)}; detlogp does not know "
            "this version's internals, and has changed nothing"
        ) from error
    instance = instances.get(_BACKEND)
    instances[_BACKEND] = DeterministicLogpCUDAOp()
    for platform in choices:
        platform.update({name: [backend] for name in OPERATORS})

    def undo() -> None:
        for platform, lists in zip(choices, before, strict=True):
            platform.update(lists)
        if instance is None:
            del instances[_BACKEND]
        else:
            instances[_BACKEND] = instance

    return undo


_patcher = Patcher(_apply)
