"""`detlogp validate`: what a run leaves, what it says when it fails or stops, and its manifest."""

import csv
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

import detlogp
from detlogp.cli import main
from detlogp.evidence import validation
from detlogp.evidence.sections import SECTIONS, Check, Options, Result

EXAMPLES = Path(__file__).parents[1] / "examples"
# torch.func.linearize's own.
pytestmark = pytest.mark.filterwarnings("ignore:.*get_attr Node:UserWarning")


def _validate(folder: Path, *arguments: str) -> int:
    return main(["validate", "--output", str(folder), "--device", "cpu", *arguments])


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "cases.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_everything_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every section, small; every skip says why; the picture redraws; the manifest holds."""
    assert _validate(tmp_path, "--quick", "--max-order", "1", "--examples", str(EXAMPLES)) == 0
    rows = _rows(tmp_path)
    assert {row["section"] for row in rows} == set(SECTIONS)
    assert {row["outcome"] for row in rows} == {"pass", "skip"}
    assert all(row["reason"] for row in rows)
    assert {row["reason"] for row in rows if row["outcome"] == "skip"} == {
        "PyTorch's linearize refuses it or is zero"
    }
    (grpo,) = (row for row in rows if row["case"].startswith("GRPO"))
    assert "detlogp::logp_backward" in grpo["reason"]
    report = (tmp_path / "report.html").read_text()
    assert "Run: complete" in report
    assert "Nothing failed." in report
    assert main(["validate", "--verify", str(tmp_path)]) == 0
    before = (tmp_path / "errors.png").read_bytes()
    (tmp_path / "errors.png").unlink()
    subprocess.run([sys.executable, str(tmp_path / "draw.py")], check=True)
    assert (tmp_path / "errors.png").read_bytes() == before
    assert "complete; written" in capsys.readouterr().out


def test_verify_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _validate(tmp_path, "--section", "out") == 0
    (tmp_path / "log.txt").write_text("nothing happened\n")
    (tmp_path / "draw.py").unlink()
    (tmp_path / "more.txt").write_text("")
    assert main(["validate", "--verify", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for line in ("changed: log.txt", "missing: draw.py", "not in the manifest: more.txt"):
        assert line in text
    assert main(["validate", "--verify", str(tmp_path / "nowhere")]) == 2


def test_a_wrong_bit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value off by one ulp in batches of 7 rows: the layouts notice, and the report says so."""
    original = detlogp.logp

    def logp(logits: Tensor, *args: object, **kwargs: object) -> object:
        result = original(logits, *args, **kwargs)  # type: ignore[call-overload]
        if logits.dim() == 2 and len(logits) == 7 and not isinstance(result, Tensor):
            return result._replace(logp=result.logp * (1 + 2.0**-23))
        return result

    monkeypatch.setattr(detlogp, "logp", logp)
    assert _validate(tmp_path, "--quick", "--section", "layouts") == 1
    failed = [row for row in _rows(tmp_path) if row["outcome"] == "fail"]
    assert {row["case"].partition(",")[0] for row in failed} == {"chunks of 7"}
    assert "is not" in failed[0]["reason"]
    assert "checks failed" in (tmp_path / "report.html").read_text()


def _checks(runs: list[Callable[[], Result]]) -> Callable[[Options], list[Check]]:
    return lambda options: [Check(f"check {i}", "float32", run) for i, run in enumerate(runs)]


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    stops = iter([True, False])

    def passing(number: int) -> Callable[[], Result]:
        def run() -> Result:
            ran.append(number)
            if number == 2 and next(stops, False):
                raise KeyboardInterrupt
            return Result("pass", "fine")

        return run

    def raising() -> Result:
        ran.append(99)
        raise RuntimeError("broken")

    runs = [passing(0), raising, passing(2), passing(3)]
    monkeypatch.setitem(SECTIONS, "out", _checks(runs))
    assert _validate(tmp_path, "--section", "out") == 1
    assert "interrupted after 2 of 4 checks" in (tmp_path / "report.html").read_text()
    assert main(["validate", "--verify", str(tmp_path)]) == 0
    assert _validate(tmp_path, "--section", "out") == 2, "the folder is not empty"
    ran.clear()
    assert _validate(tmp_path, "--section", "out", "--resume") == 1
    assert ran == [99, 2, 3], "what had passed is not run again; what had failed is"
    rows = _rows(tmp_path)
    assert [row["outcome"] for row in rows] == ["pass", "fail", "pass", "pass"]
    assert rows[1]["reason"] == "RuntimeError: broken"


def test_a_terminated_run_leaves_a_report(tmp_path: Path) -> None:
    """SIGTERM, as `timeout` and batch systems send it."""
    command = [
        sys.executable,
        "-m",
        "detlogp",
        "validate",
        "--device",
        "cpu",
        "--section",
        "orders",
    ]
    with subprocess.Popen([*command, "--output", str(tmp_path)], stdout=subprocess.DEVNULL) as run:
        while len(validation.read(tmp_path / "cases.csv")) < 5:
            time.sleep(0.1)
            assert run.poll() is None
        run.terminate()
        assert run.wait() == 1
    assert "interrupted after" in (tmp_path / "report.html").read_text()
    assert validation.verify_manifest(tmp_path) == []


def _passing(names: str) -> list[tuple[str, Check]]:
    return [("out", Check(name, "", lambda: Result("pass", "fine"))) for name in names]


def test_rows_of_a_killed_resume_are_kept(tmp_path: Path) -> None:
    """Rows are added behind the earlier ones, so that no kill can lose any."""
    table = tmp_path / "cases.csv"
    assert len(list(validation.run(tmp_path, _passing("abc"), "cpu", {}))) == 3
    again = validation.run(tmp_path, _passing("dabc"), "cpu", validation.read(table))
    assert next(again).case == "d"
    again.close()  # type: ignore[attr-defined]
    assert set(row.case for row in validation.read(table).values()) == set("abcd")
    failing = [("out", Check("a", "", lambda: Result("fail", "now")))]
    list(validation.run(tmp_path, failing, "cpu", {}))
    assert {row.case: row.outcome for row in validation.settle(tmp_path)}["a"] == "fail"


def test_a_resumed_report_has_the_earlier_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SECTIONS, "out", _checks([lambda: Result("fail", "broken")]))
    assert _validate(tmp_path, "--section", "out") == 1
    assert _validate(tmp_path, "--section", "semantics", "--resume") == 1
    assert "1 checks failed" in (tmp_path / "report.html").read_text()


def test_another_build_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _validate(tmp_path, "--section", "out") == 0
    facts = tmp_path / "machine.json"
    facts.write_text(facts.read_text().replace('"build_id": "', '"build_id": "0'))
    assert _validate(tmp_path, "--section", "out", "--resume") == 2
    assert "--resume needs the build and machine of the folder's rows: build_id was 0" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-order", "-5", "--section", "orders"], "leave no check to run"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cuda:7"], "--device cuda:7: there are"),
    ],
)
def test_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "--device", "cpu", "--output", str(tmp_path / "new"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.cuda
def test_on_cuda(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--device", "cuda", "--quick", "--max-order", "1"]
    assert main(["validate", *arguments, "--examples", str(EXAMPLES)]) == 0
