"""`detlogp audit` finds what is wrong with an implementation, and nothing where nothing is."""

import csv
import signal
import subprocess
import sys
import time
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

def not_a_number(x, t):
    return logp(x, t) * float("nan")

def one_shape_for_one_row(x, t):
    value = logp(x, t)
    return value[0] if len(x) == 1 else value

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
    # NaN has the same bits as NaN: it must not pass for reproducible.
    "not_a_number": set(PROPERTIES),
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


def test_another_shape_is_refused(defects: Path) -> None:
    """Two tensors that only broadcast to each other are not the same rows."""
    assert _run(defects, "one_shape_for_one_row", ("batch", "chunk")) == {
        "batch": "refused",
        "chunk": "held",
    }


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
    assert value.layout == "chunks of 7"
    assert "rows from 0: 7 of 7 differ" in value.detail
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
    script = [str(Path(sys.executable).with_name("detlogp")), *command[3:]]
    again = [*script, "defects:good", *size, "--require", "all"]
    assert subprocess.run(again, cwd=defects, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "implementation must be module:function or one of detlogp, detlogp-exact, "),
        (["liger"], "not installed: liger"),
        (["--require", "speed"], "--require must name properties or all, got 'speed'"),
        (
            ["--require", "batch", "--property", "chunk"],
            "--require batch: --property leaves",
        ),
        (["--vocab", "0"], "--vocab must be at least 8, got 0"),
        (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["--rows", "3"], "--rows must be at least 8, got 3"),
    ],
)
def test_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


# What other people's packages look like to their adapters: the same names, arguments and results.
STANDINS = {
    "trl/__init__.py": "",
    "trl/trainer/__init__.py": "",
    "trl/trainer/utils.py": "from standin import logp as selective_log_softmax",
    "trl/kernels.py": "import standin\n"
    "def selective_log_softmax_and_entropy(x, t): return standin.logp(x, t), None",
    "verl/__init__.py": "",
    "verl/utils/__init__.py": "",
    "verl/utils/torch_functional.py": "import standin\n"
    "def logprobs_from_logits(x, t, inplace_backward=True):\n"
    "    assert not inplace_backward\n    return standin.logp(x, t)",
    "liger_kernel/__init__.py": "",
    "liger_kernel/transformers/__init__.py": "",
    "liger_kernel/transformers/functional.py": "import standin\n"
    "def liger_cross_entropy(x, t, reduction='mean'):\n"
    "    assert reduction == 'none'\n    return -standin.logp(x, t)",
    "liger_kernel/ops/__init__.py": "",
    "liger_kernel/ops/grpo_loss.py": "import standin\n"
    "def fused_selective_log_softmax(x, t, temperature=0.9):\n"
    "    assert temperature == 1.0 and x.is_contiguous()\n"
    "    return standin.logp(x[0, :-1], t[0, -(x.shape[1] - 1):])[None]",
    "flash_attn/__init__.py": "",
    "flash_attn/ops/__init__.py": "",
    "flash_attn/ops/triton/__init__.py": "",
    "flash_attn/ops/triton/cross_entropy.py": "import standin\n"
    "def cross_entropy_loss(x, t): return -standin.logp(x, t), None",
    "fla/__init__.py": "",
    "fla/modules/__init__.py": "",
    "fla/modules/fused_cross_entropy.py": "import standin\n"
    "def cross_entropy_loss(x, t): return -standin.logp(x, t), None",
    "quack/__init__.py": "",
    "quack/cross_entropy.py": "import standin\n"
    "def cross_entropy(x, t, reduction='mean'):\n"
    "    assert reduction == 'none'\n    return -standin.logp(x, t)",
    "batch_invariant_ops/__init__.py": "import torch\n"
    "def log_softmax(x, dim): return torch.log_softmax(x, dim)",
    "rl_engine/__init__.py": "",
    "rl_engine/runtime/__init__.py": "",
    "rl_engine/runtime/registry.py": "import standin\n"
    "class Op:\n    def apply(self, x, t): return standin.logp(x, t)\n"
    "class Registry:\n    def get_op(self, name):\n"
    "        assert name == 'logp_deterministic'\n        return Op()\n"
    "kernel_registry = Registry()",
    "standin.py": "import torch\n"
    "def logp(x, t): return torch.log_softmax(x, -1)[torch.arange(len(t)), t]",
}


@pytest.mark.parametrize("name", [name for name in PEERS if name != "torch-compile"])
def test_adapters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives logp [N], whatever its package's own signs, shapes and results are."""
    for file, text in STANDINS.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    tops = {Path(file).parts[0].removesuffix(".py") for file in STANDINS}
    for module in [m for m in sys.modules if m.partition(".")[0] in tops]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    peer = PEERS[name]
    assert peer.installed()
    x, t = torch.randn(4, 50), torch.randint(50, (4,))
    try:
        torch.testing.assert_close(peer.load()(x, t), PEERS["detlogp"].load()(x, t))
        if name == "trl-kernel":
            with pytest.raises(ValueError, match="columns must be contiguous"):
                peer.load()(x.t().contiguous().t(), t)
    finally:
        for module in [m for m in sys.modules if m.partition(".")[0] in tops]:
            del sys.modules[module]


def test_ctrl_c_ends_every_process(defects: Path) -> None:
    """One job is running; the others never start."""
    (defects / "slow.py").write_text("import time\ndef logp(x, t):\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "detlogp", "audit", "slow:logp", "--device", "cpu", "--quick"]
    with subprocess.Popen(
        command, cwd=defects, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        time.sleep(8)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        assert process.returncode != 0


@pytest.mark.cuda
def test_own_bits_on_cuda() -> None:
    assert main(["audit", "detlogp", "--quick", "--require", "all"]) == 0
