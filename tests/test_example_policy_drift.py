"""examples/policy_drift.py: detlogp's ratios are exactly 1, and the page says what was measured."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor

import detlogp

ROOT = Path(__file__).parents[1]
SMALL = ["--length", "16", "--stride", "128", "--steps", "1"]


@pytest.fixture
def drift(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("transformers")
    # The script sets it when it is imported; this undoes that after the test.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import policy_drift

    return policy_drift


def test_the_ratios_of_detlogp_are_exactly_1(device: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = [sys.executable, str(ROOT / "examples" / "policy_drift.py"), "--device", device]
    done = subprocess.run(
        [*command, *SMALL, "--output", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "drift.json").read_text())
    before = result["before"]
    own = [row for row in before["comparisons"] if row["implementation"] == "detlogp"]
    in_layouts = [row for row in own if row["kind"] == "layout"]
    assert len(in_layouts) == 5
    for row in in_layouts:
        assert row["tokens"] == 7 * 16
        assert row["ratio_min"] == row["ratio_max"] == 1.0
        assert row["changed"] == row["k3"] == row["distance_max"] == 0
        assert set(row["clipped"].values()) | set(row["outside"]) == {0.0}
    # The same measure sees a difference where there is one: float32 against float64.
    (rounding,) = (row for row in own if row["kind"] == "float64")
    assert 0 < rounding["distance_max"] < 1e-5
    assert rounding["k3"] > 0
    assert before["drawn"]["detlogp"] == []
    steps = result["training"]["detlogp"]
    assert [row["step"] for row in steps] == [0, 1]
    assert all(row["changed"] == row["difference_max"] == 0 for row in steps)
    # The step moved the policy, so that its layout had something to change.
    assert steps[0]["k3"] == [0.0, 0.0]
    assert steps[1]["k3"][0] == steps[1]["k3"][1] > 0
    assert {"commit", "torch", "device", "date", "threads"} <= set(result["machine"])
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("drift.png", "drift.svg"))


def test_a_log_probability_that_knows_its_batch_is_found(
    drift: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def drifting(logits: Tensor, token_ids: Tensor) -> Tensor:
        return detlogp.logp(logits, token_ids) + 1e-3 * (len(logits) == 1)

    monkeypatch.setitem(drift.SCORES, "detlogp", drifting)
    assert drift.main([*SMALL, "--device", "cpu", "--output", str(tmp_path)]) == 1
    before = json.loads((tmp_path / "drift.json").read_text())["before"]
    assert before["worst_layout"] == "one token at a time"
    (row,) = (
        row
        for row in before["comparisons"]
        if (row["implementation"], row["against"]) == ("detlogp", "one token at a time")
    )
    assert row["changed"] == row["tokens"] == len(before["drawn"]["detlogp"])
    # ratio = exp(1e-3), and k3 = ratio - 1 - 1e-3
    assert row["ratio_max"] == pytest.approx(1.0010005, abs=2e-6)
    assert row["k3"] == pytest.approx(5.0017e-7, rel=2e-3)


@pytest.mark.parametrize("machine", ["cpu", "h200"])
def test_the_page_says_what_was_measured(
    machine: str, drift: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((ROOT / f"benchmarks/results/policy-drift-{machine}.json").read_text())
    drift.report(record, drift.Console(width=112, highlight=False))
    page = (ROOT / "docs" / "drift.md").read_text()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) > 10
    assert not [line for line in lines if line not in page]
