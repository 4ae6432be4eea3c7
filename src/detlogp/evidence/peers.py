"""Who is audited and timed: detlogp, torch's own formulas, and other people's kernels.

Each is imported only when asked for. An implementation takes logits [N, V] and token_ids [N],
int64, and returns the log-probabilities [N] in nats; it may refuse (raise) what it cannot do.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

import detlogp

Implementation = Callable[[Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """One implementation; `load` imports it."""

    name: str
    module: str  # that must be importable
    distribution: str  # whose version is reported
    load: Callable[[], Implementation]
    devices: tuple[str, ...] = ("cpu", "cuda")
    has_gradient: bool = True
    note: str = ""

    def installed(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None

    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return str(getattr(importlib.import_module(self.module), "__version__", "unknown"))


def find(name: str) -> Peer:
    """A built-in name, or "module:function". Raises ValueError for anything else."""
    if name in PEERS:
        return PEERS[name]
    module, colon, function = name.partition(":")
    if not colon or not function:
        expected = ", ".join(PEERS)
        raise ValueError(f"implementation must be module:function or one of {expected}; got {name}")
    return Peer(name, module, module.partition(".")[0], lambda: _attribute(module, function))


def default_names(quick: bool) -> list[str]:
    """Who is taken where nobody is named. torch.compile spends minutes compiling."""
    return [name for name in PEERS if not (quick and name == "torch-compile")]


def one_line(error: Exception, most: int = 200) -> str:
    """What other people's code raised, for a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def _attribute(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _detlogp() -> Implementation:
    def run(logits: Tensor, token_ids: Tensor) -> Tensor:
        return detlogp.logp(logits, token_ids)

    return run


def _exact() -> Implementation:
    def run(logits: Tensor, token_ids: Tensor) -> Tensor:
        return detlogp.logp(logits, token_ids, contract="exact")

    return run


def in_place(logits: Tensor, token_ids: Tensor) -> Tensor:
    """detlogp whose gradient overwrites the logits, which must be the result of an operation."""
    return detlogp.logp(logits, token_ids, inplace_backward=True)


def _and_entropy(logits: Tensor, token_ids: Tensor, contract: str) -> Tensor:
    found = detlogp.logp(logits, token_ids, contract=contract, return_entropy=True)
    return found.logp + found.entropy  # so that a gradient has both


def _log_softmax_and_entropy(logits: Tensor, token_ids: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), -1)
    logp = log_p.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return logp - (log_p.exp() * log_p).sum(-1)


WITH_ENTROPY: dict[str, Implementation] = {
    "detlogp": partial(_and_entropy, contract="locked"),
    "detlogp-exact": partial(_and_entropy, contract="exact"),
    "torch-log-softmax": _log_softmax_and_entropy,
}
"""logp + entropy of the row, by the name of the implementation that has logp alone."""


def _log_softmax(logits: Tensor, token_ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def _logsumexp(logits: Tensor, token_ids: Tensor) -> Tensor:
    target = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return target - torch.logsumexp(logits, -1)


def _cross_entropy(logits: Tensor, token_ids: Tensor) -> Tensor:
    return -torch.nn.functional.cross_entropy(logits, token_ids, reduction="none")


def _compiled() -> Implementation:
    compiled: Implementation = torch.compile(_log_softmax)
    return compiled


def _trl() -> Implementation:
    function: Implementation = _attribute("trl.trainer.utils", "selective_log_softmax")
    return function


def _trl_kernel() -> Implementation:
    function = _attribute("trl.kernels", "selective_log_softmax_and_entropy")

    def run(logits: Tensor, token_ids: Tensor) -> Tensor:
        if logits.stride(-1) != 1:
            # As TRL's own callers check; the kernel would read other columns.
            raise ValueError("columns must be contiguous")
        result: Tensor = function(logits, token_ids)[0]
        return result

    return run


def _verl() -> Implementation:
    function = _attribute("verl.utils.torch_functional", "logprobs_from_logits")
    return lambda logits, token_ids: function(logits, token_ids, inplace_backward=False)


def _liger() -> Implementation:
    function = _attribute("liger_kernel.transformers.functional", "liger_cross_entropy")
    return lambda logits, token_ids: -function(logits, token_ids, reduction="none")


def _liger_selective() -> Implementation:
    function = _attribute("liger_kernel.ops.grpo_loss", "fused_selective_log_softmax")

    def run(logits: Tensor, token_ids: Tensor) -> Tensor:
        # It takes [B, L + 1, V] and leaves out the last position: a batch of one, one row more.
        longer = torch.cat([logits, logits[-1:]]).unsqueeze(0)
        result: Tensor = function(longer, token_ids.unsqueeze(0), temperature=1.0)[0]
        return result

    return run


def _flash_attn() -> Implementation:
    function = _attribute("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
    return lambda logits, token_ids: -function(logits, token_ids)[0]


def _fla() -> Implementation:
    function = _attribute("fla.modules.fused_cross_entropy", "cross_entropy_loss")
    return lambda logits, token_ids: -function(logits, token_ids)[0]


def _quack() -> Implementation:
    function = _attribute("quack.cross_entropy", "cross_entropy")
    return lambda logits, token_ids: -function(logits, token_ids, reduction="none")


def _batch_invariant_ops() -> Implementation:
    module = importlib.import_module("batch_invariant_ops")
    function = getattr(module, "log_softmax", None) or _attribute(
        "batch_invariant_ops.batch_invariant_ops", "log_softmax"
    )

    def run(logits: Tensor, token_ids: Tensor) -> Tensor:
        table: Tensor = function(logits, dim=-1)
        return table.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)

    return run


def _rl_kernel() -> Implementation:
    registry = _attribute("rl_engine.runtime.registry", "kernel_registry")
    function: Implementation = registry.get_op("logp_deterministic").apply
    return function


_GPU = ("cuda",)
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("detlogp", "detlogp", "detlogp", _detlogp),
        Peer("detlogp-exact", "detlogp", "detlogp", _exact, note='contract="exact"'),
        Peer("torch-log-softmax", "torch", "torch", lambda: _log_softmax, note="and gather"),
        Peer("torch-logsumexp", "torch", "torch", lambda: _logsumexp),
        Peer("torch-cross-entropy", "torch", "torch", lambda: _cross_entropy),
        Peer("torch-compile", "torch", "torch", _compiled, note="of log_softmax and gather"),
        Peer("trl", "trl", "trl", _trl, note="selective_log_softmax"),
        Peer("trl-kernel", "trl", "trl", _trl_kernel, _GPU, note="its Triton kernel"),
        Peer("verl", "verl", "verl", _verl, note="logprobs_from_logits"),
        Peer("liger", "liger_kernel", "liger-kernel", _liger, _GPU, note="cross entropy"),
        Peer(
            *("liger-selective", "liger_kernel", "liger-kernel", _liger_selective, _GPU, False),
            note="fused selective log-softmax; copied into its layout, so strides are not seen",
        ),
        Peer("flash-attn", "flash_attn", "flash-attn", _flash_attn, _GPU, note="Triton kernel"),
        Peer("fla", "fla", "fla-core", _fla, _GPU, note="fused cross entropy"),
        Peer("quack", "quack", "quack-kernels", _quack, _GPU, note="cross entropy"),
        Peer(
            *("batch-invariant-ops", "batch_invariant_ops", "batch-invariant-ops"),
            *(_batch_invariant_ops, _GPU, False),
            note="log_softmax and gather",
        ),
        Peer("rl-kernel", "rl_engine", "rl-kernel", _rl_kernel, _GPU, note="logp_deterministic"),
    )
}
