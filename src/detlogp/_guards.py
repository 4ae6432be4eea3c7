"""The raw operators know no derivative: on the autograd key they raise instead of returning zeros.

`detlogp.logp` decides about derivatives itself, so it calls the operators inside `below_autograd`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from detlogp import _native

below_autograd = torch._C._AutoDispatchBelowAutograd

_OPERATORS = {
    "logp": _native.logp_op,
    "logp_with_stats": _native.logp_with_stats_op,
    "logp_out": _native.logp_out_op,
    "logp_backward": _native.logp_backward_op,
}
_autograd = torch.library.Library("detlogp", "IMPL", "Autograd")


def has_tangent(tensor: Tensor) -> bool:
    """Whether this is a dual tensor of the forward mode."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def check_plain_call(logits: Tensor) -> None:
    """Raises where a derivative would be lost: transforms and forward mode are not there yet."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            "logits: detlogp.logp does not support torch.func transforms (grad, vjp, jvp, vmap) "
            "yet; use backward() or torch.autograd.grad"
        )
    if has_tangent(logits):
        raise NotImplementedError(
            "logits: detlogp.logp does not support forward-mode derivatives (dual tensors) yet; "
            "use backward() or torch.autograd.grad"
        )


def _guard(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        for argument in args:
            if not isinstance(argument, Tensor) or not argument.is_floating_point():
                continue
            if (torch.is_grad_enabled() and argument.requires_grad) or has_tangent(argument):
                raise RuntimeError(
                    f"torch.ops.detlogp.{name} has no derivative of its own, and an argument "
                    "requires grad or carries a tangent; call detlogp.logp instead"
                )
        with below_autograd():
            return operator(*args)

    return kernel


for _name, _operator in _OPERATORS.items():
    _autograd.impl(_name, _guard(_name, _operator))
