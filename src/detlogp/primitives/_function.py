"""What every primitive shares: how rules meet nested transforms, and how vmap folds into the rows.

A primitive is a torch.autograd.Function in the style of torch.func, whose rules are written with
primitives again. Three things need care.

Forward mode. PyTorch switches forward mode off while a Function's `jvp` runs, so that an outer
level of a nested jvp would silently see zero. `pushing` switches it on again, and hands out the
saved tensors without this level's tangent, so that only the outer levels differentiate the rule.

Dtypes. PyTorch 2.13 promotes the tangent of a 0-d float32 tensor times a Python float to float64,
and the rules of a single row would meet it: every tangent is cast to the dtype of its argument.

vmap. All tensors of a primitive begin with the leading dimensions of the rows, so a mapped axis
moves to the front and becomes one more of them: one call for the whole batch. An operand that is
not mapped is expanded, with stride 0, and not copied. `is_grads_batched` and `vectorize=True` map
over cotangents by an older vmap, which hides the mapped axis below autograd: a Function that is
given such a tensor would record nothing, so `apply` takes the axis out before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from detlogp._guards import in_transform

# Of the older vmap.
is_batched = torch._C._functorch.is_legacy_batchedtensor


class Primitive(torch.autograd.Function):
    """Base of the primitives: gives each its vmap rule, and its jvp tangents of the right dtype."""

    generate_vmap_rule = False

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if any(isinstance(arg, Tensor) and is_batched(arg) for arg in args):
            return _apply_to_batches(cls, args, _innermost_level())
        return super().apply(*args)  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()

        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
            front = [
                fold(info.batch_size, dim, arg) for dim, arg in zip(in_dims, args, strict=True)
            ]
            outputs = cls.apply(*front)
            return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0

        set_up, rule = cls.setup_context, cls.jvp

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.input_dtypes = [i.dtype if isinstance(i, Tensor) else None for i in inputs]
            set_up(ctx, inputs, output)

        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            with forward_ad._set_fwd_grad_enabled(True):
                cast = [
                    tangent if tangent is None else tangent.to(dtype)
                    for tangent, dtype in zip(tangents, ctx.input_dtypes, strict=True)
                ]
            return rule(ctx, *cast)

        cls.vmap = staticmethod(vmap)  # type: ignore[method-assign]
        cls.setup_context = staticmethod(setup_context)  # type: ignore[method-assign]
        cls.jvp = staticmethod(jvp)  # type: ignore[method-assign]


def fold(batch_size: int, dim: int | None, argument: Any) -> Any:
    """The mapped axis in front; an operand that is shared is expanded, not copied."""
    if not isinstance(argument, Tensor):
        return argument
    if dim is None:
        return argument.expand(batch_size, *argument.shape)
    return argument.movedim(dim, 0)


def _innermost_level() -> int:
    """How many of the older vmaps are active."""
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def _apply_to_batches(cls: type[Primitive], args: tuple[Any, ...], level: int) -> Any:
    """`cls` of arguments that the older vmap has mapped at this level, or at those below."""
    if level == 0:
        return cls.apply(*args)
    # A tensor that is not mapped at this level gets a dimension of the size that is given.
    sizes = [
        torch._remove_batch_dim(arg, level, 0, 0).shape[0]
        for arg in args
        if isinstance(arg, Tensor)
    ]
    size = max(sizes)
    if size == 0:  # none is mapped at this level
        return _apply_to_batches(cls, args, level - 1)
    front = [
        torch._remove_batch_dim(arg, level, size, 0) if isinstance(arg, Tensor) else arg
        for arg in args
    ]
    outputs = _apply_to_batches(cls, tuple(front), level - 1)
    if isinstance(outputs, tuple):
        return tuple(torch._add_batch_dim(output, 0, level) for output in outputs)
    return torch._add_batch_dim(outputs, 0, level)


def contiguous(vector: Tensor | None) -> Tensor | None:
    """As the operators want a vector. Forward mode's zeros are no memory until they are written."""
    if vector is None:
        return None
    return torch.zeros_like(vector) if vector._is_zerotensor() else vector.contiguous()


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """Saves for both modes; missing gradients and tangents come as None."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


@contextmanager
def pushing(ctx: Any) -> Iterator[tuple[Any, ...]]:
    """Inside a jvp rule: the saved tensors, of which the outer levels alone see the tangents."""
    with forward_ad._set_fwd_grad_enabled(True):
        yield tuple(
            forward_ad.unpack_dual(saved).primal if isinstance(saved, Tensor) else saved
            for saved in ctx.saved_tensors
        )


def is_plain() -> bool:
    """No derivative is recorded, no transform or dual level is active: a fused kernel serves."""
    recorded = torch.is_grad_enabled() or forward_ad._current_level >= 0
    return not recorded and not in_transform()
