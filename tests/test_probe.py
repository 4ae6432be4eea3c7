"""`detlogp probe` says whose kernels ran, and notices when they are not the library's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import detlogp
from detlogp.cli import main
from detlogp.evidence import probe

detlogp_logp = detlogp.logp
# torch.func.linearize's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*get_attr Node:UserWarning")


def test_record(tmp_path: Path, device: str) -> None:
    file = tmp_path / "probe.json"
    assert main(["probe", "--quick", "--device", device, "--output", str(file)]) == 0
    record = json.loads(file.read_text())
    assert record["machine"]["device"] == device
    assert len(record["machine"]["build_id"]) == 16
    routes = {route["route"]: route for route in record["routes"]}
    assert len(routes) == probe.count(quick=True)
    training = routes["training, dense"]
    assert training["own_operators"] == {
        "detlogp::logp_with_stats": 1,
        "detlogp::logp_backward": 1,
    }
    assert training["aten_operators"]["aten::sin"] == 1
    if device == "cuda":
        assert set(training["own_kernels"]) == {
            "detlogp::cuda::forward_kernel",
            "detlogp::cuda::backward_kernel",
        }
    assert "detlogp::logp_second_order" in routes["reverse 2"]["own_operators"]
    assert "detlogp::logp_tangent" in routes["jvp"]["own_operators"]
    assert not any(route["complaint"] for route in record["routes"])


def _of_torch(logits: Tensor, token_ids: Tensor, **_: object) -> Tensor:
    return torch.log_softmax(logits, -1)[range(len(token_ids)), token_ids.clamp(0)]


def test_complaints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With torch's own formula in the place of logp, the exit code is 1."""
    monkeypatch.setattr(detlogp, "logp", _of_torch)
    monkeypatch.setattr(probe, "TRAINING_FORMS", probe.TRAINING_FORMS[:1])
    monkeypatch.setattr(probe, "routes", lambda quick: ["reverse 1", "reverse 3", "vmap"])
    assert main(["probe", "--quick", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "training, dense: training ran nothing of the library" in text
    for route in ("reverse 1", "reverse 3", "vmap"):
        assert f"{route}: PyTorch's own aten::" in text


class _FusedOnce(torch.autograd.Function):
    """The library's value and first gradient; every further derivative is plain exp and sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(x, t)
        return detlogp_logp(x, t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, t = ctx.saved_tensors
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                return torch.autograd.grad(detlogp_logp(leaf, t), leaf, grad)[0], None
        e = (x - x.detach().amax(-1, keepdim=True)).exp()
        onehot = torch.nn.functional.one_hot(t.clamp(0), x.shape[-1])
        return grad[:, None] * (onehot - e / e.sum(-1, keepdim=True)), None


def _fused_once(logits: Tensor, token_ids: Tensor, **_: object) -> Tensor:
    result: Tensor = _FusedOnce.apply(logits, token_ids)  # type: ignore[no-untyped-call]
    return result


def test_a_recursive_route_needs_recursive_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detlogp, "logp", _fused_once)
    assert probe.probe_route("reverse 1", "cpu").complaint == ""
    for route in ("reverse 2", "reverse 3"):
        complaint = probe.probe_route(route, "cpu").complaint
        assert complaint == "no derivative kernel of the library ran"


def test_training_must_be_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A correct gradient by the wrong route is noticed: two forwards for one backward."""
    original = detlogp.logp
    monkeypatch.setattr(detlogp, "logp", lambda x, t, **k: original(x, t) + original(x, t))
    ran = probe.probe_training(probe.TRAINING_FORMS[0], "cpu")
    assert ran.complaint == "training ran detlogp::logp_backward, detlogp::logp_with_stats"
