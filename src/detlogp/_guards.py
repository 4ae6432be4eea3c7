"""The raw operators know no derivative: on the autograd key they raise instead of returning zeros.

`detlogp.logp` decides about derivatives itself, so it calls the operators through `call`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from detlogp import _native

_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_active_transform = torch._C._functorch.peek_interpreter_stack
_OPERATORS = {
    "logp": _native.logp_op,
    "logp_with_stats": _native.logp_with_stats_op,
    "logp_with_entropy": _native.logp_with_entropy_op,
    "logp_out": _native.logp_out_op,
    "logp_backward": _native.logp_backward_op,
    "logp_backward_inplace": _native.logp_backward_inplace_op,
    "logp_second_order": _native.logp_second_order_op,
    "logp_tangent": _native.logp_tangent_op,
    "probability": _native.probability_op,
    "row_sum": _native.row_sum_op,
    "exact_max": _native.exact_max_op,
    "exact_sum": _native.exact_sum_op,
    "exact_extremes": _native.exact_extremes_op,
    "exact_row_sum": _native.exact_row_sum_op,
}
_autograd = torch.library.Library("detlogp", "IMPL", "Autograd")


def call(operator: torch._ops.OpOverload[..., Any], *args: Any) -> Any:
    """A raw operator, past the guard. (torch.compile traces the guard, which lets it pass.)"""
    if is_compiling():
        return operator(*args)
    return _below_autograd(operator, args)


def _below_autograd(operator: torch._ops.OpOverload[..., Any], args: tuple[Any, ...]) -> Any:
    # As torch._C._AutoDispatchBelowAutograd, a context manager that costs twice as much.
    excluded = _is_excluded(_AUTOGRAD)
    _set_excluded(_AUTOGRAD, True)
    try:
        return operator._op(*args)  # what __call__ does, without a frame of Python
    finally:
        _set_excluded(_AUTOGRAD, excluded)


def has_tangent(tensor: Tensor) -> bool:
    """Whether this is a dual tensor of the forward mode."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def in_transform() -> bool:
    """Whether a torch.func transform is active."""
    return _active_transform() is not None


# What torch.compiler.assume_constant_result does, without its import of the compiler: a traced call
# is made while tracing. Dynamo itself guards on the stack of transforms.
in_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_transformed(logits: Tensor) -> bool:
    """Whether a transform is active, or the logits carry a tangent."""
    if is_compiling():
        if in_transform():
            raise NotImplementedError(
                "logits: a torch.func transform of detlogp.logp inside a compiled function is not "
                "supported; compile what is outside the transform, or do not compile"
            )
        return False
    return in_transform() or has_tangent(logits)


def _guard(name: str, operator: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        for argument in args:
            if not isinstance(argument, Tensor) or not argument.is_floating_point():
                continue
            if (torch.is_grad_enabled() and argument.requires_grad) or has_tangent(argument):
                raise RuntimeError(
                    f"torch.ops.detlogp.{name} has no derivative of its own, and an argument "
                    "requires grad or carries a tangent; call detlogp.logp instead"
                )
        return _below_autograd(operator, args)

    return kernel


def guard(name: str, operator: torch._ops.OpOverload[..., Any]) -> None:
    """From now on the raw operator raises where a derivative of it would be needed."""
    _autograd.impl(name, _guard(name, operator))


for _name, _operator in _OPERATORS.items():
    guard(_name, _operator)
