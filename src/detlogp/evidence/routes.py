"""Every way to a derivative, by name.

A route takes a function of the logits and differentiates it; it is applied to an implementation and
to the reference of problems.py alike.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from detlogp.evidence.problems import Directions, Function, Route, Runner


def wide(tensor: Tensor) -> Tensor:
    """In the arithmetic's dtype, float32 for half types."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def weights(like: Tensor) -> Tensor:
    """Multiples of 1/16 in [-1, 1], in no simple pattern."""
    count = torch.arange(1, like.numel() + 1, dtype=torch.float64, device=like.device)
    return ((count * count * 0.7).cos() * 16).round().div(16).reshape(like.shape).to(like.dtype)


def total(function: Function) -> Function:
    """A scalar function. With plain sums, the gradient of a gradient of logp would be 0."""

    def scalar(x: Tensor) -> Tensor:
        y = wide(function(x))
        return (y * weights(y)).sum()

    return scalar


def along(tensor: Tensor, direction: Tensor) -> Tensor:
    """[..., N, V] with [N, V] -> [...]."""
    return (wide(tensor) * wide(direction)).sum((-2, -1))


def _descend(
    scalar: Tensor, leaf: Tensor, directions: Directions, order: int, keeps_graph: bool = False
) -> Tensor:
    """[N, V]: `order` times the gradient, contracted with a direction in between."""
    for k in range(order):
        again = k + 1 < order
        (gradient,) = torch.autograd.grad(scalar, leaf, create_graph=again or keeps_graph)
        scalar = along(gradient, directions[k])
    return gradient


def _reverse(order: int, keeps_graph: bool = False) -> Route:
    """The last order without a graph is what meets a fused kernel."""

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        leaf = x.detach().requires_grad_()
        return _descend(total(function)(leaf), leaf, directions, order, keeps_graph)

    return Route(run, order, float64_only=order > 8, one_form=order > 9)


def _forward(order: int) -> Route:
    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        for direction in directions[:order]:
            function = _jvp(function, direction)
        return function(x)

    return Route(run, order)


def _jvp(h: Function, v: Tensor) -> Function:
    def tangent(x: Tensor) -> Tensor:
        result: Tensor = torch.func.jvp(h, (x,), (v,))[1]
        return result

    return tangent


def _grad(h: Function, v: Tensor) -> Function:
    return torch.func.grad(total(h))


def _vjp(h: Function, v: Tensor) -> Function:
    def vjp(x: Tensor) -> Tensor:
        y, pull, *_ = torch.func.vjp(h, x)
        result: Tensor = pull(weights(y))[0]
        return result

    return vjp


def _vmap(h: Function, v: Tensor) -> Function:
    return lambda x: torch.func.vmap(h)(torch.stack([x, x / 2]))


def _linearize(h: Function, v: Tensor) -> Function:
    return lambda x: torch.func.linearize(h, x)[1](v)


def _jacrev(h: Function, v: Tensor) -> Function:
    return lambda x: along(torch.func.jacrev(h)(x), v)


def _jacfwd(h: Function, v: Tensor) -> Function:
    return lambda x: along(torch.func.jacfwd(h)(x), v)


def _hessian(h: Function, v: Tensor) -> Function:
    return lambda x: along(along(torch.func.hessian(h)(x), v), v / 2)


# Each maps a function of the logits to another, of the next order; hessian's is of two more.
TRANSFORMS: dict[str, Callable[[Function, Tensor], Function]] = {
    "grad": _grad,
    "vjp": _vjp,
    "jvp": _jvp,
    "vmap": _vmap,
    "linearize": _linearize,
    "jacrev": _jacrev,
    "jacfwd": _jacfwd,
    "hessian": _hessian,
}


def nested(names: tuple[str, ...]) -> Route:
    """("grad", "jvp") is grad of jvp."""
    order = sum({"vmap": 0, "hessian": 2}.get(name, 1) for name in names)
    if "linearize" not in names:
        return Route(_nest(names), order)
    same = tuple("jvp" if name == "linearize" else name for name in names)
    expected = "skipped" if _is_unsupported(names) else "right"
    return Route(_nest(names), order, expected, reference=_nest(same))


def _nest(names: tuple[str, ...]) -> Runner:
    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        for name, direction in zip(reversed(names), directions[: len(names)], strict=True):
            function = TRANSFORMS[name](function, direction)
        return function(x)

    return run


def _is_unsupported(names: tuple[str, ...]) -> bool:
    """What PyTorch 2.13's linearize cannot do, whatever the function: it folds what its trace calls
    constant, so that a derivative of it is zero or worse (grad of linearize of x * x; linearize of
    jacrev of exp), and it refuses a second level of forward mode."""
    return not set(names[1:]) <= {"grad", "vjp", "vmap"}


def nestings(depth: int, transforms: Iterable[str] = TRANSFORMS) -> Iterator[tuple[str, Route]]:
    for names in itertools.product(transforms, repeat=depth):
        yield " of ".join(names), nested(names)


# ---- routes outside torch.func's nestings --------------------------------------------------------


def _dual(requires_grad: bool = False, grad_enabled: bool = True) -> Route:
    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        leaf = x.detach().requires_grad_(requires_grad)
        with forward_ad.dual_level(), torch.set_grad_enabled(grad_enabled):
            return _tangent(function(forward_ad.make_dual(leaf, directions[0])))

    return Route(run, 1)


def _tangent(dual: Tensor) -> Tensor:
    tangent: Tensor | None = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    return tangent


def _reverse_over_dual(order: int) -> Route:
    """`order` - 1 times reverse, over one tangent."""

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        leaf = x.detach().requires_grad_()
        with forward_ad.dual_level():
            tangent = _tangent(function(forward_ad.make_dual(leaf, directions[-1])))
            return _descend(total(lambda _: tangent)(leaf), leaf, directions, order - 1)

    return Route(run, order)


def _dual_over_reverse(order: int) -> Route:
    """One tangent, over `order` - 1 times reverse."""

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        leaf = x.detach().requires_grad_()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(leaf, directions[-1])
            scalar = total(function)(dual)
            return _tangent(_descend(scalar, dual, directions, order - 1, keeps_graph=True))

    return Route(run, order)


def _in_dual(transform: str, expected: str = "right") -> Route:
    """A torch.func transform of a function that sees a dual tensor of the level outside."""

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, directions[0])
            return _tangent(TRANSFORMS[transform](function, directions[1])(dual))

    return Route(run, 1 if transform == "vmap" else 2, expected)


def _without_grad(names: tuple[str, ...]) -> Route:
    route = nested(names)

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        with torch.no_grad():
            return route.run(function, x, directions)

    return Route(run, route.order)


def _of_leaf(names: tuple[str, ...]) -> Route:
    """torch.func inside, torch.autograd outside."""
    route = nested(names)

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        leaf = x.detach().requires_grad_()
        scalar = total(lambda y: route.run(function, y, directions))(leaf)
        return _descend(scalar, leaf, directions, 1)

    return Route(run, route.order + 1)


def _batched_reverse(order: int) -> Route:
    """is_grads_batched: three cotangents at once, at the last order."""

    def run(function: Function, x: Tensor, directions: Directions) -> Tensor:
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        for k in range(order - 1):
            (y,) = torch.autograd.grad(y, leaf, weights(y), create_graph=True)
            y = y * directions[k]
        cotangents = torch.stack([weights(y), -weights(y) / 2, weights(y) * 2])
        (gradient,) = torch.autograd.grad(y, leaf, cotangents, is_grads_batched=True)
        return gradient

    return Route(run, order)


def _transposed_reverse(function: Function, x: Tensor, directions: Directions) -> Tensor:
    """The gradient is linear in its cotangent; its transpose there is the tangent."""
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    cotangent = weights(y).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(y, leaf, cotangent, create_graph=True)
    (result,) = torch.autograd.grad(gradient, cotangent, directions[0])
    return result


def _old_hessian(function: Function, x: Tensor, directions: Directions) -> Tensor:
    """torch.autograd.functional, vectorised: forward over reverse."""
    hessian = torch.autograd.functional.hessian(
        total(function), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    )
    assert isinstance(hessian, Tensor)
    return hessian


def _old_jvp(function: Function, x: Tensor, directions: Directions) -> Tensor:
    """torch.autograd.functional: reverse over reverse."""
    result = torch.autograd.functional.jvp(function, x, directions[0])[1]
    assert isinstance(result, Tensor)
    return result


def _penalty(function: Function, x: Tensor, directions: Directions) -> Tensor:
    """Case 16: the loss and the squared norm of its gradient, one backward."""
    leaf = x.detach().requires_grad_()
    loss = total(function)(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    return _descend(loss + wide(gradient).square().sum(), leaf, directions, 1)


OTHERS: dict[str, Route] = {
    "dual": _dual(),
    "dual of leaf": _dual(requires_grad=True),
    "dual in no_grad": _dual(grad_enabled=False),
    "dual of leaf in no_grad": _dual(requires_grad=True, grad_enabled=False),
    **{f"reverse {k - 1} over dual": _reverse_over_dual(k) for k in range(2, 5)},
    **{f"dual over reverse {k - 1}": _dual_over_reverse(k) for k in range(2, 5)},
    **{f"{name} in dual": _in_dual(name) for name in ("grad", "vjp", "vmap", "jacrev")},
    **{f"{name} in dual": _in_dual(name, "raised") for name in ("jvp", "jacfwd", "linearize")},
    **{
        " of ".join(names) + " in no_grad": _without_grad(names)
        for names in (("grad",), ("jvp",), ("jvp", "jvp"), ("grad", "jvp"), ("jvp", "grad"))
    },
    **{
        "reverse of " + " of ".join(names): _of_leaf(names)
        for names in (("grad",), ("jvp",), ("vmap",), ("jvp", "jvp"), ("vmap", "grad", "jvp"))
    },
    **{f"batched reverse {k}": _batched_reverse(k) for k in range(1, 5)},
    "transposed reverse": Route(_transposed_reverse, 1),
    "autograd.functional.hessian": Route(_old_hessian, 2),
    "autograd.functional.jvp": Route(_old_jvp, 1),
    "gradient penalty": Route(_penalty, 2),
}
REVERSE = {f"reverse {k}": _reverse(k) for k in range(1, 11)}
FORWARD = {f"forward {k}": _forward(k) for k in range(1, 9)}
KEPT = {f"reverse {k}, graph kept": _reverse(k, keeps_graph=True) for k in range(1, 5)}
ORDERS = REVERSE | FORWARD | KEPT
ROUTES = ORDERS | OTHERS | dict(nestings(1)) | dict(nestings(2))
# hessian is jacfwd of jacrev, so all threefold ones with it are of order four at least.
THREEFOLD = dict(nestings(3, [name for name in TRANSFORMS if name != "hessian"]))
ALL = ROUTES | THREEFOLD
