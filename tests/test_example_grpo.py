"""examples/grpo.py: one training run, made twice, has the same bits; and its checks can fail."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPT = Path(__file__).parents[1] / "examples" / "grpo.py"
STEPS = 3


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    # The script sets it when it is imported; this undoes that after the test.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    spec = importlib.util.spec_from_file_location("grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def history() -> list[dict[str, Any]]:
    """Metrics in the script's form, of two steps."""
    metrics = {"reward_mean": 0.5, "loss": 0.1, "kl": 0.0, "ratio_min": 1.0, "ratio_max": 1.0}
    named = {"train_logp_source": "detlogp::logp", "parameters": "00ff", "seconds": 1.0}
    return [{"step": step, **metrics, **named} for step in range(2)]


def torch_logp(logits: Tensor, token_ids: Tensor, *, rows: Tensor) -> Tensor:
    chosen = torch.log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return torch.where(rows, chosen, 0)


def test_two_runs_have_the_same_bits(device: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "grpo.json"
    command = [sys.executable, str(SCRIPT), "--device", device, "--steps", str(STEPS)]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    steps = result["steps"]
    floats = [v for m in steps for n, v in m.items() if isinstance(v, float) and n != "seconds"]
    assert result["repeated"] is True
    assert f"twice the same: {len(floats)} numbers bitwise equal over {STEPS} steps" in done.stdout
    assert [metrics["step"] for metrics in steps] == list(range(STEPS))
    assert all(math.isfinite(number) for number in floats)
    assert len({metrics["parameters"] for metrics in steps}) == STEPS
    for metrics in steps:
        assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
        assert metrics["reward_std"] > 0
        assert metrics["grad_norm"] > 0
        source = "detlogp::logp_with_stats + detlogp::logp_backward"
        assert metrics["train_logp_source"] == source


@pytest.mark.parametrize(("name", "value"), [("loss", math.nextafter(0.1, 1)), ("kl", -0.0)])
def test_one_changed_bit_is_found(grpo: ModuleType, name: str, value: float) -> None:
    changed = history()
    changed[1][name] = value
    (found,) = grpo.differences(history(), changed)
    assert found.startswith(f"step 1, {name}: ")


def test_other_differences_are_found_but_for_the_timing(grpo: ModuleType) -> None:
    changed = history()
    changed[0]["seconds"] = 2.0
    assert grpo.differences(history(), changed) == []
    changed[0]["parameters"] = "00fe"
    del changed[1]["loss"]
    assert grpo.differences(history(), changed) == [
        "step 0, parameters: 00ff and 00fe",
        f"step 1, loss: {(0.1).hex()} and None",
    ]
    assert grpo.differences(history(), history()[:1]) == ["steps: 2 and 1"]


def test_a_difference_is_reported_and_fails(
    grpo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    changed = history()
    changed[1]["loss"] = 0.2
    runs = iter([history(), changed])
    monkeypatch.setattr(grpo, "train", lambda *_: next(runs))
    output = tmp_path / "grpo.json"
    assert grpo.main(["--output", str(output), "--device", "cpu"]) == 1
    assert f"step 1, loss: {(0.1).hex()} and {(0.2).hex()}" in capsys.readouterr().out
    assert json.loads(output.read_text())["repeated"] is False


def test_another_log_probability_is_refused(
    grpo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo.detlogp, "logp", torch_logp)
    with pytest.raises(RuntimeError, match="ran no detlogp operator"):
        grpo.train(grpo.MODEL_DIR, "cpu", 1, 0)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_ratio_other_than_one_is_refused(
    grpo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = grpo.in_micro_batches
    below = torch.tensor(-torch.inf)
    monkeypatch.setattr(
        grpo, "in_micro_batches", lambda *args: torch.nextafter(exact(*args), below)
    )
    with pytest.raises(RuntimeError, match="must be exactly 1"):
        grpo.train(grpo.MODEL_DIR, "cpu", 1, 0)
