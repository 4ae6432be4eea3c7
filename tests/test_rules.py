"""Every primitive has every rule, each rule is right, and the fused kernels equal the formulas."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import assert_finite_differences, random_problem
from torch import Tensor
from torch.autograd import forward_ad

from detlogp import _native, primitives
from detlogp._guards import call
from detlogp.primitives._function import Primitive
from detlogp.primitives.columns import Columns
from detlogp.primitives.gather import Gather, gather
from detlogp.primitives.gather_several import GatherSeveral, gather_several
from detlogp.primitives.gradient import Gradient, gradient
from detlogp.primitives.probability import Probability, probability
from detlogp.primitives.row_expand import RowExpand, row_expand
from detlogp.primitives.row_sum import RowSum, row_sum
from detlogp.primitives.rows import Rows, scored, widen
from detlogp.primitives.scatter import Scatter, scatter
from detlogp.primitives.scatter_several import ScatterSeveral, scatter_several
from detlogp.primitives.score import Score
from detlogp.primitives.second_order import SecondOrder, second_order
from detlogp.primitives.tangent import Tangent, tangent
from detlogp.primitives.targets import Targets, targets
from detlogp.primitives.weighted_log import WeightedLog, weighted_log
from detlogp.testing import lanes

for _module in pkgutil.iter_modules(primitives.__path__):
    importlib.import_module(f"detlogp.primitives.{_module.name}")

N, V, K = 4, 5, 3
MASK = torch.tensor([True, True, False, True])
IDS = torch.tensor([1, -100, 2, 4])
SEVERAL = torch.tensor([[1, 1, 5], [-100, 5, -1], [0, 1, 2], [4, -2, 0]])
UNSCORED = [1, 2]
WHOLE = Columns(V, V)


def _rows(x: Tensor) -> Rows:
    """The statistics from PyTorch, and constants."""
    fixed = x.detach()
    row_max = fixed.amax(-1)
    log_sum = (fixed - row_max.unsqueeze(-1)).exp().sum(-1).log()
    return Rows(x, IDS.to(x.device), MASK.to(x.device), row_max, log_sum)


def _score(x: Tensor) -> tuple[Tensor, Tensor]:
    _, ids, mask, *_ = _rows(x)
    options = (3, 3, True, False)
    logp, lse, _, _ = Score.apply(x, ids, mask, *options)
    return logp, torch.where(lse.isinf(), 0.0, lse)


def _targets(x: Tensor) -> Tensor:
    """The lse of `_score`, so that row 1, none of whose ids counts, has no part in it."""
    _, _, mask, row_max, log_sum, _ = _rows(x)
    rows = (SEVERAL.to(x.device), mask, row_max, log_sum)
    return targets(x, _score(x)[1], *rows, 3, False)


# For each primitive, a function of its differentiable operands, and what these are.
CASES: dict[type[Primitive], tuple[Callable[..., Any], str]] = {
    Gather: (lambda m: gather(m, IDS.to(m.device), MASK.to(m.device), WHOLE), "matrix"),
    Scatter: (lambda v: scatter(v, IDS.to(v.device), MASK.to(v.device), WHOLE), "vector"),
    GatherSeveral: (
        lambda m: gather_several(m, SEVERAL.to(m.device), MASK.to(m.device)),
        "matrix",
    ),
    ScatterSeveral: (
        lambda v: scatter_several(v, SEVERAL.to(v.device), MASK.to(v.device), V),
        "ids",
    ),
    Targets: (_targets, "matrix"),
    RowSum: (lambda m: row_sum(m, WHOLE), "matrix"),
    RowExpand: (lambda v: row_expand(v, WHOLE), "vector"),
    Probability: (lambda x: probability(_rows(x)), "matrix"),
    WeightedLog: (lambda x: weighted_log(_rows(x)), "matrix"),
    Score: (_score, "matrix"),
    Gradient: (lambda x, a, b: gradient(_rows(x), a, b), "matrix vector vector"),
    SecondOrder: (
        lambda x, a, b, u: second_order(_rows(x), a, b, u),
        "matrix vector vector matrix",
    ),
    Tangent: (lambda x, dx: tangent(_rows(x), dx), "matrix matrix"),
}
PRIMITIVES = pytest.mark.parametrize("primitive", CASES, ids=lambda primitive: primitive.__name__)


def _operands(primitive: type[Primitive], generator: torch.Generator, device: str) -> list[Tensor]:
    shapes = {"matrix": (N, V), "vector": (N,), "ids": (N, K)}
    return [
        torch.randn(*shapes[kind], generator=generator, dtype=torch.float64)
        .to(device)
        .requires_grad_()
        for kind in CASES[primitive][1].split()
    ]


def test_no_rule_is_missing() -> None:
    """Every primitive is in the table above, and defines each rule itself."""
    assert set(Primitive.__subclasses__()) == set(CASES)
    for primitive in CASES:
        for rule in ("forward", "setup_context", "backward", "jvp", "vmap"):
            assert isinstance(vars(primitive).get(rule), staticmethod), (primitive, rule)
        assert primitive.generate_vmap_rule is False


@PRIMITIVES
@pytest.mark.parametrize("fast", [False, True])
def test_rules_are_right(
    primitive: type[Primitive], fast: bool, device: str, generator: torch.Generator
) -> None:
    """Finite differences: the vjp, the jvp, both under vmap, and the derivatives of the vjp."""
    function, operands = CASES[primitive][0], _operands(primitive, generator, device)
    assert_finite_differences(function, operands, fast)


@PRIMITIVES
def test_rows_that_are_not_scored_give_zero(
    primitive: type[Primitive], device: str, generator: torch.Generator
) -> None:
    """Exactly, in value, vjp and jvp, whatever the operands, cotangents and tangents hold there."""
    if primitive in (RowSum, RowExpand):
        pytest.skip("knows nothing of rows that are not scored")
    function = CASES[primitive][0]
    operands = _operands(primitive, generator, device)

    def spoilt(like: Tensor) -> Tensor:
        tensor = torch.ones_like(like).detach()
        tensor[UNSCORED] = torch.nan
        return tensor

    operands = [spoilt(operand).requires_grad_() for operand in operands]
    outputs = function(*operands)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [spoilt(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, operands, cotangents)
    with forward_ad.dual_level():
        duals = function(*(forward_ad.make_dual(o.detach(), spoilt(o)) for o in operands))
        duals = duals if isinstance(duals, tuple) else (duals,)
        tangents = [forward_ad.unpack_dual(dual).tangent for dual in duals]
    for tensor in (*outputs, *gradients, *tangents):
        assert tensor is not None
        assert not tensor[UNSCORED].any()
        assert not tensor.isnan().any()


@pytest.mark.parametrize("vocab", [5, 130, 300, 4100])
@pytest.mark.parametrize("missing", [None, "grad_logp", "grad_lse"])
def test_fused_kernels_equal_the_formulas(
    missing: str | None,
    vocab: int,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
) -> None:
    """logp_backward, logp_tangent and logp_second_order, from the primitives."""
    x, ids, a, b = random_problem(7, vocab, dtype, device, generator)
    ids[3] = -100
    mask = torch.arange(7, device=device) != 5
    arithmetic = a.dtype
    number = _native.DTYPE_NUMBERS[arithmetic]
    options = (number, number, arithmetic == torch.float64, False)
    rows = Rows(x, ids, mask, *call(_native.logp_with_stats_op, x, ids, mask, *options)[2:])
    grad_logp = None if missing == "grad_logp" else a
    grad_lse = None if missing == "grad_lse" else b
    u = torch.randn(7, vocab, generator=generator).to(device, dtype)

    p, wide = probability(rows), widen(rows, u)
    nothing = torch.zeros_like(a)
    of_p = (nothing if grad_lse is None else b) - (nothing if grad_logp is None else a)
    columns = rows.columns
    mean, c = row_sum(p * wide, columns), row_expand(of_p, columns)
    of_logp = gather(wide, ids, mask, columns) - mean
    first = c * p
    if grad_logp is not None:
        first = first + scatter(grad_logp, ids, mask, columns)
    second = c * (p * (wide - row_expand(mean, columns)))

    fused = (
        call(_native.logp_backward_op, *rows.tensors, grad_logp, grad_lse),
        *call(_native.logp_tangent_op, *rows.tensors, u),
        *call(_native.logp_second_order_op, *rows.tensors, grad_logp, grad_lse, u),
    )
    # One unit for each addition of a lane and of the tree, and for each product: of terms that
    # sum to the largest |u| at most. Both sides have this error.
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    largest = float(wide.abs().max()) * max(1.0, 2 * float(c.abs().max()))
    bound = 2 * unit * (vocab / lanes(vocab) + 14) * largest
    of_rows = scored(ids, mask, vocab)
    for actual, expected in zip(fused, (first, of_logp, mean, second, of_logp, mean), strict=True):
        assert actual.dtype == (dtype if actual.dim() == 2 else arithmetic)
        half = torch.finfo(dtype).eps if actual.dtype in (torch.float16, torch.bfloat16) else 0.0
        error = (actual.double() - expected.double()).abs()
        assert (error <= bound + half * expected.double().abs()).all()
        assert not actual[~of_rows].any()


def _raw_calls(x: Tensor) -> dict[str, Callable[[], object]]:
    """Every raw operator, with the tensor as an operand."""
    ids, f32 = torch.zeros(N, dtype=torch.int64, device=x.device), 2
    vector, zeros = torch.zeros(N, device=x.device), torch.zeros(N, V, device=x.device)
    keys, sums = torch.zeros(2, N, dtype=torch.int32, device=x.device), torch.zeros_like(ids)
    rows = (x, ids, None, vector, vector)
    plain_rows = (zeros, ids, None, vector, vector)
    several, of_ids = (x, ids[:, None], None, vector, vector), zeros[:, :1]
    ops = torch.ops.detlogp
    return {
        "logp": lambda: ops.logp(x, ids, None, f32, False, False),
        "logp_with_stats": lambda: ops.logp_with_stats(x, ids, None, f32, f32, False, False),
        "logp_with_entropy": lambda: ops.logp_with_entropy(x, ids, None, f32, f32, 0, False, 1.0),
        "logp_out": lambda: ops.logp_out(x, ids, None, f32, False, False, torch.empty_like(vector)),
        "logp_backward": lambda: ops.logp_backward(*rows, vector, None),
        "logp_backward_inplace": lambda: ops.logp_backward_inplace(*rows, vector, None),
        "logp_second_order": lambda: ops.logp_second_order(*rows, vector, None, zeros),
        "logp_second_order's cotangent": lambda: ops.logp_second_order(
            *plain_rows, vector, None, x
        ),
        "logp_tangent": lambda: ops.logp_tangent(*rows, zeros),
        "logp_tangent's tangent": lambda: ops.logp_tangent(*plain_rows, x),
        "probability": lambda: ops.probability(*rows),
        "row_sum": lambda: ops.row_sum(x),
        "targets": lambda: ops.targets(*several, f32, False, 1.0),
        "targets_backward": lambda: ops.targets_backward(*several, of_ids, *(None,) * 3, 1.0),
        "exact_max": lambda: ops.exact_max(x, ids, None, 0, V, keys),
        "exact_sum": lambda: ops.exact_sum(x, ids, None, 0, V, keys, sums),
        "exact_row_total": lambda: ops.exact_row_total(x, *(None,) * 5, V),
        "exact_extremes": lambda: ops.exact_extremes(x, *(None,) * 5, V, keys),
        "exact_row_sum": lambda: ops.exact_row_sum(x, *(None,) * 5, V, keys, sums),
    }


RAW = list(_raw_calls(torch.zeros(N, V)))


@pytest.mark.parametrize("operator", RAW)
def test_raw_operators_raise(operator: str, device: str) -> None:
    """With an operand that requires grad or carries a tangent: an error, never a silent zero."""
    x = torch.zeros(N, V, device=device)
    message = rf"torch\.ops\.detlogp\.{operator.partition(chr(39))[0]} has no derivative"
    with pytest.raises(RuntimeError, match=message):
        _raw_calls(x.clone().requires_grad_())[operator]()

    def inside(y: Tensor) -> Tensor:
        _raw_calls(y)[operator]()
        return y.sum()

    for transform in (torch.func.grad(inside), lambda y: torch.func.jvp(inside, (y,), (y,))):
        with pytest.raises(RuntimeError, match="detlogp"):
            transform(x)
    for enabled in (True, False):
        with (
            forward_ad.dual_level(),
            torch.set_grad_enabled(enabled),
            pytest.raises(RuntimeError, match=message),
        ):
            _raw_calls(forward_ad.make_dual(x, x))[operator]()
    with torch.no_grad():
        _raw_calls(x.clone().requires_grad_())[operator]()


def test_every_raw_operator_is_guarded() -> None:
    """The table above has every operator that takes a floating-point tensor."""
    names = {name.partition("'")[0] for name in RAW}
    schemas = torch._C._jit_get_all_schemas()
    ours = {s.name.split("::")[1] for s in schemas if s.name.startswith("detlogp::")}
    of_integers = {"exact_finish", "exact_total"}
    assert names == ours - of_integers - {"build_info", "select_cpu_path", "select_cuda_layout"}
