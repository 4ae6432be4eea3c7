"""`detlogp audit` finds what is wrong with an implementation, and nothing where nothing is."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from detlogp.cli import main
from detlogp.evidence import audit, summary
from detlogp.evidence.layouts import PROPERTIES
from detlogp.evidence.peers import PEERS, Implementation, Peer, find

# Implementations with one defect each. In a module of its own, because every implementation runs in
# another process.
DEFECTS = """
import os
import torch
from detlogp import logp

def good(x, t):
    return logp(x, t)

def _nudge(value, by):
    return value + by * 2.0**-20

def depends_on_batch(x, t):
    return _nudge(logp(x, t), len(x))

def depends_on_alignment(x, t):
    return _nudge(logp(x, t), float(x.data_ptr() % 16 != 0))

def depends_on_strides(x, t):
    return _nudge(logp(x, t), float(not x.is_contiguous()))

def depends_on_neighbour(x, t):
    return _nudge(logp(x, t), x.detach().float().sum(-1).roll(1).sign())

def spreads_nan(x, t):
    return logp(x, t) + 0 * x.detach().float().sum()

def counts_calls(x, t):
    counts_calls.calls = getattr(counts_calls, "calls", 0) + 1
    return _nudge(logp(x, t), counts_calls.calls)

def position(x, t):
    return _nudge(logp(x, t), torch.arange(len(x)) % 3)

def writes(x, t):
    value = logp(x, t)
    with torch.no_grad():
        x.detach().add_(1)
    return value

def half_result(x, t):
    return logp(x, t).bfloat16()

def subtracts_lse(x, t):
    return x.gather(-1, t[:, None])[:, 0].float() - torch.logsumexp(x.float(), -1)

def ignores_bad_ids(x, t):
    return logp(x, t.clamp(0, x.shape[-1] - 1))

def detached_twice(x, t):
    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, t):
            ctx.save_for_backward(x, t)
            return logp(x, t)
        @staticmethod
        def backward(ctx, g):
            x, t = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                (d,) = torch.autograd.grad(logp(leaf, t), leaf, g.detach())
            return d, None
    return F.apply(x, t)

def wrong_gradient_alone(x, t):
    return logp(x, t) * (1.0 if len(x) > 1 else 1.001)

def refuses(x, t):
    raise NotImplementedError("not today")

def dies(x, t):
    os._exit(11)
"""

# Which properties each defect breaks; every other one must hold.
BROKEN: dict[str, set[str]] = {
    "good": set(),
    "depends_on_batch": {"batch", "chunk", "padding", "noise", "nan"},
    "depends_on_alignment": {"alignment", "strides"},
    "depends_on_strides": {"strides"},
    # Rolled rows keep their neighbours.
    "depends_on_neighbour": {"batch", "chunk", "reorder", "padding", "noise", "nan"},
    "spreads_nan": {"nan"},
    "counts_calls": set(PROPERTIES),
    "position": {"batch", "chunk", "position", "reorder", "noise", "nan"},
}


@pytest.fixture(scope="module")
def defects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("defects")
    (folder / "defects.py").write_text(DEFECTS)
    return folder


def _implementation(defects: Path, name: str) -> tuple[Peer, Implementation]:
    sys.path.insert(0, str(defects))
    try:
        peer = find(f"defects:{name}")
        return peer, peer.load()
    finally:
        sys.path.remove(str(defects))


def _run(defects: Path, name: str, properties: tuple[str, ...]) -> dict[str, str]:
    """The worst outcome of each property, float32, V = 1000."""
    peer, implementation = _implementation(defects, name)
    findings = [
        finding
        for job in audit.jobs(properties, ("float32",), (1000,), 16, "cpu", 0)
        for finding in audit.run(job, peer, implementation)
    ]
    names = dict.fromkeys(finding.property for finding in findings)
    return {
        property_name: summary.cell(summary.select(findings, peer.name, property_name)).outcome
        for property_name in names
    }


@pytest.mark.parametrize("name", BROKEN)
def test_layouts(defects: Path, name: str) -> None:
    outcomes = _run(defects, name, tuple(PROPERTIES))
    assert {key for key, outcome in outcomes.items() if outcome == "broken"} == BROKEN[name]
    assert {o for key, o in outcomes.items() if key not in BROKEN[name]} <= {"held"}


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("good", set()),
        ("writes", {"inputs", "routes"}),
        ("half_result", {*audit.ACCURACY, "routes"}),
        ("subtracts_lse", {"offset", "near-certain"}),
        ("ignores_bad_ids", {"bad ids"}),
        ("detached_twice", {"routes"}),
    ],
)
def test_the_rest(defects: Path, name: str, broken: set[str]) -> None:
    outcomes = _run(defects, name, audit.NAMES[len(PROPERTIES) :])
    assert {key for key, outcome in outcomes.items() if outcome == "broken"} == broken
    if name == "good":
        assert set(outcomes.values()) == {"held"}


def test_a_drift_is_measured(defects: Path) -> None:
    """2^-20 for each row of a batch: 1 row against 16, and what it does to the ratio and to k3."""
    peer, implementation = _implementation(defects, "depends_on_batch")
    (job,) = audit.jobs(("chunk",), ("float32",), (1000,), 16, "cpu", 0)
    value = next(audit.run(job, peer, implementation))
    assert value.drifting == value.rows == 16
    # Chunks of 7, 7 and 2 rows; the nudge is rounded with the value.
    assert value.largest == pytest.approx(14 * 2.0**-20, abs=2.0**-20)
    assert value.largest_ratio == pytest.approx(1 + value.largest, rel=1e-9)
    assert value.k3_kl == pytest.approx(
        sum(n * (gap * 2.0**-20) ** 2 / 2 for n, gap in ((7, 9), (7, 9), (2, 14))) / 16, rel=0.1
    )
    assert "chunks of 7, rows from 0: 7 of 7 differ" in value.detail
    assert "is not" in value.detail
    assert "0x" in value.detail


def test_command(defects: Path, tmp_path: Path) -> None:
    """A process for each; one that dies and one that refuses; the files; the exit code."""
    command = [sys.executable, "-m", "detlogp", "audit", "--device", "cpu", "--vocab", "1000"]
    arguments = ["defects:good", "defects:dies", "defects:refuses", "--dtype", "float32"]
    size = ["--rows", "16", "--property", "chunk", "--property", "alignment"]
    done = subprocess.run(
        [*command, *arguments, *size, "--output", str(tmp_path), "--require", "chunk"],
        cwd=defects,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "required, and did not hold: defects:dies: chunk; defects:refuses: chunk" in " ".join(
        done.stdout.split()
    )
    with (tmp_path / "findings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    outcomes = {(row["implementation"], row["property"]): row["outcome"] for row in rows}
    assert outcomes["defects:good", "chunk"] == "held"
    assert outcomes["defects:dies", "chunk"] == "crashed"
    assert outcomes["defects:dies", "alignment"] == "crashed", "the next job ran all the same"
    assert outcomes["defects:refuses", "chunk"] == "refused"
    report = (tmp_path / "report.html").read_text()
    assert "<svg" in report
    assert "http-equiv" not in report
    assert "detlogp audit defects:dies --property chunk" in report
    assert (tmp_path / "audit.png").stat().st_size > 10000
    again = [*command, "defects:good", "--quick", "--require", "chunk", "--property", "chunk"]
    assert subprocess.run(again, cwd=defects, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "implementation must be module:function or one of detlogp, torch-log-softmax"),
        (["liger"], "not installed: liger"),
        (["--require", "speed"], "--require must name properties or all, got 'speed'"),
        (["--rows", "3"], "--rows must be at least 8, got 3"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_peers_that_are_here_agree() -> None:
    x, t = torch.randn(4, 50), torch.randint(50, (4,))
    for peer in PEERS.values():
        if peer.module in ("torch", "detlogp") and peer.name != "torch-compile":
            torch.testing.assert_close(peer.load()(x, t), PEERS["detlogp"].load()(x, t))


@pytest.mark.cuda
def test_own_bits_on_cuda() -> None:
    assert main(["audit", "detlogp", "--quick", "--require", "all"]) == 0
