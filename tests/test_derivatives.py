"""Every route to a derivative (detlogp.evidence.routes) is right, in every form and precision.

Two independent references: float64 exp, sum, log and gather of PyTorch by the same route; and the
joint cumulants of the softmax, from the formulas alone, in 50 digits.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import pytest
import torch
from calls import assert_finite_differences, random_problem
from torch import Tensor
from torch.func import grad, hessian, jvp, vjp, vmap

import detlogp
from detlogp import reference
from detlogp.evidence.kernels import Recorder
from detlogp.evidence.matrix import cases, judge
from detlogp.evidence.problems import (
    FORMS,
    Form,
    Function,
    Problem,
    detlogp_function,
    make_problem,
    reference_function,
    tolerance,
)
from detlogp.evidence.routes import ROUTES, THREEFOLD
from detlogp.testing import assert_same_bits, gradient_error_bound

# torch.func.linearize's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*get_attr Node:UserWarning")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
TWO_FOLD = [(name, form) for name, form in cases() if name not in THREEFOLD]


@pytest.mark.parametrize(("route", "form"), TWO_FOLD, ids=lambda part: getattr(part, "name", part))
def test_route(route: str, form: Form, device: str) -> None:
    """In each dtype; where PyTorch itself refuses the route, detlogp raises too."""
    for dtype in DTYPES:
        result = judge(route, form, dtype, device)
        skipped = dtype != torch.float64 and ROUTES[route].float64_only
        assert result.outcome == ("skipped" if skipped else ROUTES[route].expected), (dtype, result)


@pytest.mark.parametrize("route", THREEFOLD)
def test_threefold_route(route: str, device: str) -> None:
    for dtype in DTYPES:
        result = judge(route, Form("mask", True), dtype, device)
        assert result.outcome == THREEFOLD[route].expected, (dtype, result)


@pytest.mark.parametrize("vocab", [130, 300, 4100])
@pytest.mark.parametrize("route", ["reverse 1", "reverse 2", "reverse 3", "forward 1", "forward 3"])
def test_more_columns(route: str, vocab: int, dtype: torch.dtype, device: str) -> None:
    """More than one column a lane, and every number of lanes."""
    exact = make_problem(4, vocab, device, seed=vocab)
    problem = exact.to(dtype)
    for form in FORMS:
        chosen = ROUTES[route]
        expected = chosen.run(
            reference_function(form, exact.token_ids), exact.logits, exact.directions
        )
        function = detlogp_function(form, problem.token_ids)
        actual = chosen.run(function, problem.logits, problem.directions)
        bound = tolerance(expected, chosen.order, dtype, vocab)
        assert (actual.double() - expected).abs().max() <= bound


# ---- the formulas: derivatives of lse are the joint cumulants of the directions under softmax ----


def _cumulant(x: Sequence[float], directions: Sequence[Sequence[float]]) -> mpmath.mpf:
    """kappa(S) = E[prod S] - sum over the parts T that hold the first: kappa(T) E[prod S - T]."""
    with mpmath.workdps(50):
        weights = [mpmath.exp(mpmath.mpf(value)) for value in x]
        total = mpmath.fsum(weights)
        count = len(directions)
        moment: dict[tuple[int, ...], mpmath.mpf] = {}
        cumulant: dict[tuple[int, ...], mpmath.mpf] = {}
        for size in range(count + 1):
            for part in itertools.combinations(range(count), size):
                products = (
                    mpmath.fprod([weight, *(directions[i][v] for i in part)])
                    for v, weight in enumerate(weights)
                )
                moment[part] = mpmath.fsum(products) / total
        for part in sorted(moment, key=len)[1:]:
            rest = part[1:]
            smaller = mpmath.mpf(0)
            for size in range(len(rest)):
                for chosen in itertools.combinations(rest, size):
                    others = tuple(i for i in rest if i not in chosen)
                    smaller += cumulant[part[:1] + chosen] * moment[others]
            cumulant[part] = moment[part] - smaller
        return cumulant[tuple(range(count))]


def _tangents(problem: Problem, order: int) -> Tensor:
    """[2, N]: the derivatives of logp and lse along the first `order` directions."""
    result = torch.zeros(2, len(problem.logits), dtype=torch.float64)
    for row, token in enumerate(problem.token_ids.tolist()):
        x = problem.logits[row].tolist()
        if 0 <= token < len(x):
            along = [problem.directions[k][row].tolist() for k in range(order)]
            result[1, row] = float(_cumulant(x, along))
            result[0, row] = (along[0][token] if order == 1 else 0.0) - result[1, row]
    return result


def _scores(ids: Tensor, which: int) -> Function:
    return lambda x: detlogp.logp(x, ids, return_lse=True)[which]


@pytest.mark.parametrize("order", range(1, 11))
def test_reverse_equals_the_cumulants(order: int, dtype: torch.dtype, device: str) -> None:
    """The gradient's gradient and so on, contracted with a direction each time."""
    if order > 8 and dtype != torch.float64:
        pytest.skip("orders 9 and 10 are for float64")
    problem = make_problem(3, 4, device, seed=order)
    expected = _tangents(problem, order)
    low = problem.to(dtype)
    for which in (0, 1):
        leaf = low.logits.detach().requires_grad_()
        y = _scores(low.token_ids, which)(leaf)
        y = torch.where(y.isinf(), 0.0, y)
        for k in range(order):
            (gradient,) = torch.autograd.grad(y.sum(), leaf, create_graph=k + 1 < order)
            wide = gradient.to(torch.promote_types(dtype, torch.float32))
            y = (wide * low.directions[k]).sum(-1)
        # The directions' sum is rounded after the gradients, next to the largest of these.
        scale = torch.cat([expected[which], gradient.double().abs().cpu().flatten()])
        bound = tolerance(scale, order, dtype, 4)
        assert (y.detach().double().cpu() - expected[which]).abs().max() <= bound


@pytest.mark.parametrize("order", range(1, 8))
def test_forward_equals_the_cumulants(order: int, dtype: torch.dtype, device: str) -> None:
    """jvp of jvp of ..."""
    problem = make_problem(3, 4, device, seed=20 + order)
    expected = _tangents(problem, order)
    low = problem.to(dtype)
    for which in (0, 1):
        function = _scores(low.token_ids, which)
        for k in range(order):
            function = _along(function, low.directions[k])
        actual = function(low.logits)
        bound = tolerance(expected[which], order, torch.promote_types(dtype, torch.float32), 4)
        assert (actual.double().cpu() - expected[which]).abs().max() <= bound


def _along(function: Function, v: Tensor) -> Function:
    return lambda x: jvp(function, (x,), (v,))[1]


# ---- finite differences --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("fast", [False, True])
def test_finite_differences(form: Form, fast: bool, device: str) -> None:
    """gradcheck and gradgradcheck, slow and fast, forward mode and batched."""
    problem = make_problem(4, 3, device, seed=1)
    leaf = problem.logits.requires_grad_()
    function = detlogp_function(form, problem.token_ids)
    assert_finite_differences(function, leaf, fast)


# ---- which kernels serve a route -----------------------------------------------------------------

IDS = torch.tensor([1, -100, 4])


def _logp(x: Tensor) -> Tensor:
    return detlogp.logp(x, IDS.to(x.device))


def _second(x: Tensor) -> Tensor:
    leaf = x.requires_grad_()
    (gradient,) = torch.autograd.grad(_logp(leaf).sum(), leaf, create_graph=True)
    return torch.autograd.grad(gradient, leaf, torch.ones_like(gradient))[0]


def _first(x: Tensor) -> Tensor:
    leaf = x.requires_grad_()
    return torch.autograd.grad(_logp(leaf).sum(), leaf)[0]


BACKWARD = ["logp_with_stats", "logp_backward"]
TANGENT = ["logp_with_stats", "logp_tangent"]
FUSED: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "value": (_logp, ["logp"]),
    "backward": (_first, BACKWARD),
    "grad": (grad(lambda x: _logp(x).sum()), BACKWARD),
    "vjp": (lambda x: vjp(_logp, x)[1](torch.ones(3, device=x.device)), BACKWARD),
    "jvp": (lambda x: jvp(_logp, (x,), (x,)), TANGENT),
    "vmap of grad": (
        lambda x: vmap(grad(lambda y: _logp(y).sum()))(x.expand(2, 3, 5)),
        BACKWARD,
    ),
    "vmap of jvp": (lambda x: vmap(lambda y: jvp(_logp, (y,), (y,)))(x.expand(2, 3, 5)), TANGENT),
    "second order": (_second, [*BACKWARD, "logp_second_order"]),
}


@pytest.mark.parametrize("route", FUSED)
def test_fused_kernels(route: str, device: str) -> None:
    """These routes call these operators and no others: no [N, V] temporary but the result."""
    function, expected = FUSED[route]
    with Recorder() as recorder:
        function(torch.randn(3, 5, device=device))
    assert recorder.names() == expected


# ---- inputs on which others have failed ----------------------------------------------------------


def _minus_inf(dtype: torch.dtype, device: str, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Rows with -inf logits, none of them a target; and a tangent that is 0 there."""
    x, ids, grads, _ = random_problem(4, 300, dtype, device, generator)
    x[:, 200:] = -torch.inf
    tangent = torch.randn(4, 300, generator=generator).to(device, dtype)
    tangent[:, 200:] = 0
    return x, ids % 200, grads, tangent


def test_tangent_at_minus_inf(dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Case 18: a -inf logit contributes 0 at every order, to the bit."""
    x, ids, grads, tangent = _minus_inf(dtype, device, generator)
    far = torch.where(x.isinf(), torch.finfo(dtype).min, x)

    def derivatives(x: Tensor) -> list[Tensor]:
        def function(y: Tensor) -> Tensor:
            return detlogp.logp(y, ids)

        once, twice = _along(function, tangent), _along(_along(function, tangent), tangent)
        gradient = grad(lambda y: (function(y) * grads).sum())
        return [once(x), twice(x), gradient(x), _along(gradient, tangent)(x)]

    for actual, expected in zip(derivatives(x), derivatives(far), strict=True):
        assert actual.isfinite().all()
        # Equal numbers: a product with a -0 may differ in the sign of a zero.
        assert torch.equal(actual, expected)


def test_case_5_and_a_hessian_at_minus_inf(dtype: torch.dtype, device: str) -> None:
    """[0, -inf], id 0: logp 0, every derivative finite and 0."""
    x = torch.tensor([[0.0, -torch.inf]], dtype=dtype, device=device)
    ids = torch.tensor([0], device=device)
    for derivative in (grad, hessian):
        result = derivative(lambda y: detlogp.logp(y, ids).sum())(x)
        assert not result.any()


def test_common_offset(device: str) -> None:
    """Case 4: [1, 2, 3] - 1e7 has the derivatives of [1, 2, 3], not those of exp(x - lse)."""
    x = torch.tensor([[1.0, 2.0, 3.0]], device=device)
    ids = torch.tensor([1], device=device)

    def second(y: Tensor) -> Tensor:
        result: Tensor = hessian(lambda z: detlogp.logp(z, ids).sum())(y)
        return result

    assert_same_bits(second(x - 1e7), second(x))


def test_jvp_of_grad_equals_the_formula(device: str, generator: torch.Generator) -> None:
    """Case 17, from the formula: -p (v - sum p v) grad."""
    x, ids, grads, _ = random_problem(4, 300, torch.float64, device, generator)
    v = torch.randn(4, 300, generator=generator, dtype=torch.float64).to(device)
    actual = _along(grad(lambda y: (detlogp.logp(y, ids) * grads).sum()), v)(x)
    p = reference.probability(x)
    expected = -grads.unsqueeze(-1) * p * (v - (p * v).sum(-1, keepdim=True))
    magnitude = 4 * grads.abs() * v.abs().amax(-1)
    bound = gradient_error_bound(p, magnitude, expected, torch.float64)
    assert ((actual - expected).abs() <= bound).all()


AT_A_ROW: dict[str, Callable[[Function, Tensor], Function]] = {
    "jvp of grad": lambda f, v: lambda x: jvp(grad(f), (x,), (v,))[1],
    "jvp of vjp": lambda f, v: (
        lambda x: jvp(lambda y: vjp(f, y)[1](y.new_ones(()))[0], (x,), (v,))[1]
    ),
    "jvp of jvp": lambda f, v: _along(_along(f, v), v),
    "grad of jvp": lambda f, v: grad(_along(f, v)),
    "hessian": lambda f, v: lambda x: hessian(f)(x) @ v,
    "jvp of jvp of grad": lambda f, v: _along(_along(grad(f), v), v),
}


@pytest.mark.parametrize("route", AT_A_ROW)
@pytest.mark.parametrize("contract", ["locked", "exact"])
@pytest.mark.parametrize("ids_shape", [(), (2,)])
def test_one_row_times_a_number(
    ids_shape: tuple[int, ...],
    contract: str,
    route: str,
    device: str,
    generator: torch.Generator,
) -> None:
    """A 0-d result times a Python float, whose tangent PyTorch 2.13 makes float64."""
    x, v = (torch.randn(7, generator=generator).to(device) for _ in range(2))
    ids = torch.randint(7, ids_shape, generator=generator).to(device)

    def loss(logp: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
        return torch.sin(logp.sum() * 0.3) * lse + entropy * 0.25 + (lse * 0.5) ** 2

    def f(logits: Tensor) -> Tensor:
        found = detlogp.logp(logits, ids, contract=contract, return_lse=True, return_entropy=True)
        return loss(found.logp * 0.7, found.lse, found.entropy)

    def by_hand(logits: Tensor) -> Tensor:
        logp = torch.log_softmax(logits, -1)
        lse = torch.logsumexp(logits, -1)
        return loss(logp[ids] * 0.7, lse, -(logp.exp() * logp).sum())

    found = AT_A_ROW[route](f, v)(x)
    expected = AT_A_ROW[route](by_hand, v.double())(x.double())
    assert torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("route", ["grad of jvp", "jvp of grad", "hessian"])
@pytest.mark.parametrize("contract", ["locked", "exact"])
@pytest.mark.parametrize("ids_shape", [(4,), (4, 2)])
def test_a_loss_that_is_linear(
    ids_shape: tuple[int, ...],
    contract: str,
    route: str,
    device: str,
    generator: torch.Generator,
) -> None:
    """Weights that are constant: forward mode pulls back zeros that are no memory."""
    x, v = (torch.randn(4, 7, generator=generator).to(device) for _ in range(2))
    ids = torch.randint(7, ids_shape, generator=generator).to(device)
    weights = torch.randn(3, 4, generator=generator).to(device)

    def loss(*results: Tensor) -> Tensor:
        columns = torch.stack([result.reshape(4, -1).sum(-1) for result in results])
        return (columns * weights.to(columns.dtype)).sum()

    def f(logits: Tensor) -> Tensor:
        found = detlogp.logp(logits, ids, contract=contract, return_lse=True, return_entropy=True)
        return loss(*found)

    def by_hand(logits: Tensor) -> Tensor:
        log_p = torch.log_softmax(logits, -1)
        logp = log_p.gather(-1, ids.view(4, -1))
        return loss(logp, torch.logsumexp(logits, -1), -(log_p.exp() * log_p).sum(-1))

    def of(function: Function, along: Tensor) -> Function:
        if route != "hessian":
            return AT_A_ROW[route](function, along)
        return lambda logits: torch.tensordot(hessian(function)(logits), along, 2)

    found = of(f, v)(x)
    expected = of(by_hand, v.double())(x.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
