"""verl's log-probabilities with detlogp: every variant, the gradient in place, and the way back."""

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

import detlogp
from detlogp.evidence.kernels import Recorder
from detlogp.integrations import verl as integration
from detlogp.testing import assert_same_bits

V = 300
WITH_INPLACE = ("logprobs_from_logits", "logprobs_from_logits_flash_attn")
WITHOUT = (
    "logprobs_from_logits_torch_npu",
    "logprobs_from_logits_naive",
    "logprobs_from_logits_v2",
)
ENTROPIES = ("entropy_from_logits", "entropy_from_logits_with_chunking")
SCORES = (*WITH_INPLACE, *WITHOUT)
NAMES = (*SCORES, *ENTROPIES)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return importlib.import_module("verl.utils.torch_functional")


@pytest.fixture
def enabled(module: ModuleType) -> Iterator[None]:
    with integration.enable():
        yield


@pytest.fixture
def labels(generator: torch.Generator) -> Tensor:
    return torch.randint(V, (3, 4), generator=generator)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant(
    enabled: None,
    module: ModuleType,
    name: str,
    dtype: torch.dtype,
    labels: Tensor,
    generator: torch.Generator,
) -> None:
    logits = torch.randn(3, 4, V, generator=generator).to(dtype)
    with Recorder() as recorder:
        got = getattr(module, name)(logits, labels)
    assert recorder.names() == ["logp"] or dtype == torch.float64
    assert_same_bits(got, detlogp.logp(logits, labels))


@pytest.mark.parametrize("name", ["logprobs_from_logits_naive", "logprobs_from_logits_v2"])
def test_verls_own_formula_in_float64(
    module: ModuleType, name: str, labels: Tensor, generator: torch.Generator
) -> None:
    leaf = torch.randn(3, 4, V, dtype=torch.float64, generator=generator).requires_grad_()
    cotangent = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    expected = getattr(module, name)(leaf, labels)
    with integration.enable():
        got = getattr(module, name)(leaf, labels)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, leaf, cotangent), torch.autograd.grad(expected, leaf, cotangent)
    )


def test_two_layouts_give_a_ratio_of_one(
    enabled: None, module: ModuleType, labels: Tensor, generator: torch.Generator
) -> None:
    """Padded, as [B, T, V], and packed, as [B * T, V]."""
    logits = 3 * torch.randn(3, 4, V, generator=generator)
    padded = module.logprobs_from_logits(logits, labels).reshape(-1)
    packed = module.logprobs_from_logits(logits.view(-1, V), labels.view(-1))
    assert_same_bits(packed, padded)
    assert ((packed - padded).exp() == 1).all()


@pytest.mark.parametrize("name", WITH_INPLACE)
@pytest.mark.parametrize("inplace", [True, False, None])
def test_the_gradient_in_place(
    enabled: None,
    module: ModuleType,
    name: str,
    inplace: bool | None,
    labels: Tensor,
    generator: torch.Generator,
) -> None:
    """As verl's default has it, the gradient overwrites the logits; False keeps them."""
    leaf = torch.randn(3, 4, V, generator=generator).requires_grad_()
    logits = leaf * 1
    before = logits.detach().clone()
    options = {} if inplace is None else {"inplace_backward": inplace}
    getattr(module, name)(logits, labels, **options).sum().backward()
    expected = torch.autograd.grad(detlogp.logp(leaf, labels).sum(), leaf)[0]
    assert leaf.grad is not None
    assert_same_bits(leaf.grad, expected)
    assert_same_bits(logits.detach(), before if inplace is False else expected)


def test_what_in_place_cannot_do_raises(
    enabled: None, module: ModuleType, labels: Tensor, generator: torch.Generator
) -> None:
    leaf = torch.randn(3, 4, V, generator=generator).requires_grad_()
    with pytest.raises(ValueError, match="inplace_backward"):
        module.logprobs_from_logits(leaf, labels)


def test_verls_own_callers(enabled: None, module: ModuleType, generator: torch.Generator) -> None:
    """A function of verl that calls it: the response's log-probabilities."""
    ids = torch.randint(V, (2, 6), generator=generator)
    logits = torch.randn(2, 6, V, generator=generator)
    got = module.log_probs_from_logits_response(ids, logits, response_length=3)
    assert_same_bits(got, detlogp.logp(logits[:, 2:5], ids[:, 3:]))


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_entropies(
    module: ModuleType, name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """detlogp's, in any layout; in float64 what verl's own formula gives, with its gradient."""
    leaf = torch.randn(6, V, generator=generator).to(dtype).requires_grad_()
    cotangent = torch.randn(6, generator=generator, dtype=torch.float64)
    theirs = module.entropy_from_logits(leaf.double())
    (expected,) = torch.autograd.grad(theirs, leaf, cotangent)
    with integration.enable():
        got = getattr(module, name)(leaf)
        assert_same_bits(getattr(module, name)(leaf[2:4]).detach(), got[2:4].detach())
    ids = torch.zeros(6, dtype=torch.int64)
    assert_same_bits(got.detach(), detlogp.logp(leaf, ids, return_entropy=True).entropy.detach())
    (gradient,) = torch.autograd.grad(got, leaf, cotangent.to(got.dtype))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=4 * eps + 1e-5, atol=1e-6)


def test_a_bad_label_is_not_a_quiet_zero(enabled: None, module: ModuleType) -> None:
    values = module.logprobs_from_logits(torch.zeros(3, V), torch.tensor([0, V, -100]))
    assert values.isnan().tolist() == [False, True, True]


def test_undone(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name gets its own function back, in modules that came later too."""
    before = {name: getattr(module, name) for name in NAMES}
    later = ModuleType("verl.later")
    monkeypatch.setitem(sys.modules, "verl.later", later)
    vars(later)["early"] = before["logprobs_from_logits"]
    first, second = integration.enable(), integration.enable()
    assert not any(getattr(module, name) is before[name] for name in NAMES)
    assert vars(later)["early"] is module.logprobs_from_logits
    vars(later)["late"] = module.logprobs_from_logits_naive
    first.undo()
    assert not any(getattr(module, name) is before[name] for name in NAMES)
    second.undo()
    assert all(getattr(module, name) is before[name] for name in NAMES)
    assert vars(later)["early"] is before["logprobs_from_logits"]
    assert vars(later)["late"] is before["logprobs_from_logits_naive"]
    with pytest.raises(KeyError), integration.enable():
        raise KeyError
    assert all(getattr(module, name) is before[name] for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_internals(module: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    others = {other: getattr(module, other) for other in NAMES if other != name}
    monkeypatch.setattr(module, name, lambda other: other)
    with pytest.raises(RuntimeError, match=re.escape(name) + r".*found \(other\).*nothing"):
        integration.enable()
    monkeypatch.delattr(module, name)
    with pytest.raises(RuntimeError, match=re.escape(name) + ".*found no such function"):
        integration.enable()
    assert all(getattr(module, other) is function for other, function in others.items())
