"""`detlogp bench`: what it times, the yardstick, and the files."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from detlogp.cli import bench, main
from detlogp.evidence import timing
from detlogp.evidence.kernels import Recorder
from detlogp.evidence.peers import PEERS
from detlogp.evidence.works import FIRST_ORDER, SECOND_ORDER, Case, make_inputs


def test_command(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", device, "--quick", "--rounds", "2", "--output", str(tmp_path)]
    assert main(["bench", "detlogp", "torch-log-softmax", *arguments]) == 0
    with (tmp_path / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = [row for row in rows if row["method"] != "host"]
    assert {row["benchmark"] for row in timed} == {*FIRST_ORDER, *SECOND_ORDER}
    both = {"detlogp", "torch-log-softmax"}
    variants = both | {"detlogp in place"} | {f"{name} + entropy" for name in both}
    assert {row["variant"] for row in timed} == variants
    methods = {"graph", "eager"} if device == "cuda" else {"clock"}
    assert {row["method"] for row in timed} == methods
    for row in timed:
        assert float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"])
        share = float(row["gb_s"]) / float(row["copy_gb_s"])
        assert float(row["share_of_copy"]) == pytest.approx(share, rel=1e-2, abs=1e-4)
        assert row["torch"] == torch.__version__
        assert row["build_id"]
        if device == "cuda":
            assert row["gpu"]
            assert row["driver"]
            assert int(row["extra_bytes"]) > 0
    assert (tmp_path / "bench.png").stat().st_size > 10000
    assert "of copy" in capsys.readouterr().out


def test_what_is_timed(device: str) -> None:
    """Every work gives what its name says, and counts the bytes that it must move."""
    case = Case(4, 300, torch.float32)
    inputs = make_inputs(case, device)
    run = PEERS["detlogp"].load()
    for name, benchmark in (FIRST_ORDER | SECOND_ORDER).items():
        work = benchmark(run, case, inputs)
        result = work.call()
        tensors = result if isinstance(result, tuple) else (result,)
        last = tensors[-1]
        assert isinstance(last, torch.Tensor)
        assert last.shape == ((4,) if name == "forward" else (4, 300))
        with Recorder() as recorder:
            work.call()
        assert recorder.names() == {
            "forward": ["logp"],
            "backward": ["logp_backward"],
            "forward + backward": ["logp_with_stats", "logp_backward"],
            "training step": ["logp_with_stats", "logp_backward"],
            "hvp, reverse over reverse": ["logp_with_stats", "logp_backward", "logp_second_order"],
        }.get(name, recorder.names())
        counts = {"forward": 1, "backward": 2, "forward + backward": 3, "training step": 5}
        passes = counts.get(name, 6)
        assert work.minimum_bytes == passes * 4 * 300 * 4


def test_a_variant_that_fails_is_a_row_with_its_reason(device: str) -> None:
    def fails(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot")

    variants = {"fails": fails, "detlogp": PEERS["detlogp"].load()}
    case = Case(4, 300, torch.float32)
    for name in ("forward", "backward"):
        rows = list(timing.measure(name, FIRST_ORDER[name], case, variants, device, 1, 1.0))
        assert rows[0].reason == "ValueError: cannot"
        assert rows[0].median_ms == 0
        assert rows[-1].median_ms > 0


def test_no_time_for_a_wrong_second_order() -> None:
    """A gradient that PyTorch cannot differentiate again, and one that it does wrongly."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.softmax(x, -1), t)
            return torch.log_softmax(x, -1)[torch.arange(len(t)), t]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            p, t = ctx.saved_tensors
            return grad[:, None] * (torch.nn.functional.one_hot(t, p.shape[-1]) - p), None

    def once(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Once.apply(x, t)  # type: ignore[no-untyped-call]
        return result

    variants = {"once": once, "detlogp": PEERS["detlogp"].load()}
    wrong = bench._wrong_at("hvp, reverse over reverse", variants, "cpu")
    assert list(wrong) == ["once"]
    assert wrong["once"].startswith("silently wrong: error")
    assert bench._wrong_at("forward", variants, "cpu") == {}


def test_scaling(tmp_path: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--scaling", "--device", device, "--quick", "--rounds", "1"]
    assert main(["bench", *arguments, "--output", str(tmp_path)]) == 0
    with (tmp_path / "bench.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] != "host"]
    assert {row["variant"] for row in rows} == {"detlogp"}  # or a line would be of two
    cases = {row["case"] for row in rows}
    assert {"1 x 4096 bfloat16", "1 x 4096 float32"} <= cases
    assert len({case.split()[2] for case in cases}) > 4
    assert (tmp_path / "bench.png").stat().st_size > 10000
    assert main(["bench", "torch-log-softmax", *arguments]) == 2
    assert "--scaling times detlogp alone" in capsys.readouterr().err


def test_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "detlogp", "--device", "cpu", "--rounds", "0"]) == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err


def test_unknown_variant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nobody", "--device", "cpu", "--quick"]) == 2
    assert "got nobody" in capsys.readouterr().err
