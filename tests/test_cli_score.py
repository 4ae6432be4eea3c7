"""`detlogp score`: values against detlogp.logp and float64, files, windows, layouts, errors."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import detlogp
from detlogp.cli import _layouts, main
from detlogp.cli._model import window_spans
from detlogp.testing import bits

TEXT = "The order of every addition depends on V alone. Größe: 3 µm; f(x) = [x] + 1.\r\n" * 3
V = 300


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers and 64 positions, in bfloat16, with a byte-level tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=V,
        special_tokens=["<bos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    folder = tmp_path_factory.mktemp("model")
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")
    fast.save_pretrained(folder)
    (folder / "text.txt").write_bytes(TEXT.encode())
    return folder


@pytest.fixture
def saved() -> dict[str, Tensor]:
    """Logits [2, 9, V] and ids, two of them bad."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(V, (2, 9), generator=generator)
    token_ids[0, 3] = -100
    token_ids[1, 0] = V
    return {"logits": 4 * torch.randn(2, 9, V, generator=generator), "token_ids": token_ids}


def save(path: Path, tensors: dict[str, Tensor]) -> str:
    if path.suffix == ".npz":
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        np.savez(path, **arrays)
    else:
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    return str(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def words(values: Any) -> list[int]:
    found: list[int] = np.asarray(values, dtype=np.float32).view(np.uint32).tolist()
    return found


def model_logits(folder: Path, dtype: torch.dtype, window: int) -> tuple[Tensor, Tensor]:
    """Every row of the text, each from the first window that holds it, by plain means."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.tensor(tokenizer(TEXT, verbose=False)["input_ids"])
    rows: list[Tensor] = []
    start = 0
    while len(rows) < len(ids) - 1:
        with torch.no_grad():
            logits = model(ids[None, start : min(start + window, len(ids) - 1)]).logits[0]
        rows.extend(logits[len(rows) - start :])
        start += window // 2
    return torch.stack(rows), ids[1:]


@pytest.mark.parametrize("dtype", [None, "float32", "float64"])
def test_model(
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dtype: str | None,
) -> None:
    output = tmp_path / "rows.jsonl"
    command = ["score", "--model", str(model_folder), "--text", str(model_folder / "text.txt")]
    command += ["--output", str(output), "--window", "40", "--device", "cpu"]
    assert main(command + (["--dtype", dtype] if dtype else [])) == 0
    captured = capsys.readouterr()
    assert captured.err == ""

    rows = read_jsonl(output)
    logits, token_ids = model_logits(model_folder, getattr(torch, dtype or "bfloat16"), 40)
    expected, lse = detlogp.logp(logits, token_ids, return_lse=True)
    assert [row["position"] for row in rows] == list(range(1, len(token_ids) + 1))
    assert [row["token_id"] for row in rows] == token_ids.tolist()
    assert [row["logp"] for row in rows] == expected.tolist()
    assert [row["lse"] for row in rows] == lse.tolist()
    kind, digits = (np.uint64, 16) if dtype == "float64" else (np.uint32, 8)
    expected_bits = [f"{value:0{digits}x}" for value in expected.numpy().view(kind).tolist()]
    assert [row["logp_bits"] for row in rows] == expected_bits
    assert "".join(row["token"] for row in rows if "�" not in row["token"]).endswith("\r\n")

    x = logits.double().numpy()
    exact = x[np.arange(len(x)), token_ids.numpy()] - np.log(np.exp(x).sum(1))
    shown = dict(line.rsplit("  ", 1) for line in captured.out.splitlines()[:3])
    assert shown["tokens scored"] == str(len(rows))
    assert float(shown["mean logp    "].split()[0]) == pytest.approx(exact.mean(), abs=2e-6)
    perplexity = float(shown["perplexity   "])
    assert perplexity == pytest.approx(math.exp(-exact.mean()), rel=1e-5)
    least = token_ids[exact.argmin()].item()
    assert f"{exact.argmin() + 1}" in captured.out
    assert f"{least}" in captured.out
    assert "detlogp.logp gave the same bits in all" in captured.out


@pytest.mark.parametrize("row_count", [1, 2, 5, 39, 40, 41, 60, 61, 200])
@pytest.mark.parametrize("length", [1, 2, 3, 40])
def test_every_row_is_new_in_one_window(row_count: int, length: int) -> None:
    spans = window_spans(row_count, length)
    new = [row for span in spans for row in range(span.first_new, span.stop)]
    assert new == list(range(row_count))
    for span in spans:
        assert 0 < span.stop - span.start <= length
        context = span.first_new - span.start + 1
        assert span.start == 0 or context > length // 2


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
@pytest.mark.parametrize("output_suffix", [".jsonl", ".parquet"])
def test_saved_logits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    saved: dict[str, Tensor],
    suffix: str,
    output_suffix: str,
) -> None:
    path = save(tmp_path / f"logits{suffix}", saved)
    output = tmp_path / f"rows{output_suffix}"
    command = ["score", "--logits", path, "--output", str(output), "--window", "5"]
    assert main([*command, "--least", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "tokens scored  16" in text
    assert "skipped        2" in text
    scored = detlogp.logp(saved["logits"], saved["token_ids"], return_lse=True)
    logp, lse = (part.flatten() for part in scored)
    assert f"mean logp      {logp.double().sum().item() / 16:.6f} nats" in text
    if output_suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = parquet.read_table(output).to_pydict()
        assert parquet.read_schema(output).field("logp").type == "float"
        assert words(columns["lse"]) == words(lse)
    else:
        rows = read_jsonl(output)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        assert columns["logp_bits"] == [f"{value:08x}" for value in words(logp)]
        assert columns["lse"][3] is None
    assert columns["position"] == list(range(18))
    assert columns["token_id"] == saved["token_ids"].flatten().tolist()
    assert words(columns["logp"]) == words(logp)


def test_dtype_of_saved_logits(tmp_path: Path, saved: dict[str, Tensor]) -> None:
    path = save(tmp_path / "logits.safetensors", saved)
    output = tmp_path / "rows.jsonl"
    assert main(["score", "--logits", path, "--output", str(output), "--dtype", "bfloat16"]) == 0
    expected = _layouts.IMPLEMENTATIONS[_layouts.OWN](
        saved["logits"].bfloat16(), saved["token_ids"]
    )
    assert words([row["logp"] for row in read_jsonl(output)]) == words(expected.flatten())


def test_values_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logits = torch.tensor([[0.0, -math.inf], [math.nan, 0.0], [0.0, 0.0]])
    tensors = {"logits": logits, "token_ids": torch.tensor([1, 0, 0])}
    path = save(tmp_path / "logits.npz", tensors)
    output = tmp_path / "rows.jsonl"
    assert main(["score", "--logits", path, "--output", str(output)]) == 0
    assert "not finite     2" in capsys.readouterr().out
    rows = read_jsonl(output)
    assert [row["logp"] for row in rows] == [None, None, pytest.approx(-math.log(2))]
    assert rows[0]["logp_bits"] == "ff800000"


def test_no_valid_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"logits": torch.zeros(2, 3), "token_ids": torch.tensor([-100, 3])}
    assert main(["score", "--logits", save(tmp_path / "logits.npz", tensors)]) == 0
    text = capsys.readouterr().out
    assert "tokens scored  0" in text
    assert "no layout to check" in text


def test_bar_on_a_terminal_alone(
    tmp_path: Path,
    saved: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = save(tmp_path / "logits.npz", saved)
    command = [sys.executable, "-m", "detlogp", "score", "--logits", path, "--window", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(command[3:]) == 0
    assert "scoring" in capsys.readouterr().err


# ---- layouts -------------------------------------------------------------------------------------
own = _layouts.IMPLEMENTATIONS[_layouts.OWN]
ALL = {*_layouts.SHOWN, _layouts.ONE_THREAD}
DRIFTS = {
    "none": (own, set()),
    "batch": (
        lambda x, ids: own(x, ids) + 1e-3 * len(x),
        {"one row at a time", "chunks of 7", "noise beside each row"},
    ),
    "alignment": (
        lambda x, ids: own(x, ids) + 1e-3 * (x.data_ptr() % 16 != 0),
        {"misaligned by one element"},
    ),
    "place": (
        lambda x, ids: own(x, ids) + 1e-3 * torch.arange(len(x)),
        ALL - {"misaligned by one element", "one thread"},
    ),
    "threads": (lambda x, ids: own(x, ids) + 1e-3 * torch.get_num_threads(), {"one thread"}),
}


@pytest.mark.parametrize(("implementation", "expected"), DRIFTS.values(), ids=DRIFTS)
def test_layouts_detect_drift(
    implementation: Callable[[Tensor, Tensor], Tensor], expected: set[str]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generator = torch.Generator().manual_seed(2)
        logits = torch.randn(150, 64, generator=generator)
        token_ids = torch.randint(64, (150,), generator=generator)
        found = _layouts.compare_layouts(logits, token_ids, {"other": implementation})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert {comparison.layout for comparison in found} == ALL
    assert {comparison.layout for comparison in found if comparison.differing} == expected
    for comparison in found:
        assert (str(comparison) == "equal") == (comparison.layout not in expected)
        assert (comparison.max_difference > 1e-4) == (comparison.layout in expected)


def test_one_bit_counts_and_nan_payloads_do_not() -> None:
    a = torch.tensor([1.0, 0.0, math.nan, 2.0])
    b = torch.tensor([1.0, -0.0, math.nan, 2.0])
    b[3:].view(torch.int32).add_(1)
    b[2:3].view(torch.int32).add_(1)
    assert (bits(a) == bits(b)).tolist() == [True, False, True, False]


def test_exit_code_1_when_detlogp_drifts(
    tmp_path: Path,
    saved: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    true_logp: Callable[..., Any] = detlogp.logp

    def drifting(logits: Tensor, token_ids: Tensor, **options: Any) -> Any:
        value = true_logp(logits, token_ids, **options)
        return value if options else value + 1e-3 * len(logits)

    monkeypatch.setattr(detlogp, "logp", drifting)
    assert main(["score", "--logits", save(tmp_path / "logits.npz", saved)]) == 1
    text = capsys.readouterr().out
    assert "detlogp.logp is NOT reproducible here" in text
    assert "16 of 16 rows differ" in text


# ---- errors --------------------------------------------------------------------------------------
def fails(capsys: pytest.CaptureFixture[str], *command: str | Path) -> str:
    """The message of a command that must return 2 and print nothing else."""
    assert main(["score", *map(str, command)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("detlogp score: error: ")
    return captured.err


def test_errors_in_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["score"],
        ["score", "--logits", "a.npz", "--model", "b"],
        ["score", "--logits", "a.npz", "--window", "0"],
        ["score", "--logits", "a.npz", "--dtype", "int8"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 2
        assert "error: " in capsys.readouterr().err


def test_errors_in_logits(
    tmp_path: Path,
    saved: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def message(name: str, **change: Tensor) -> str:
        return fails(capsys, "--logits", save(tmp_path / name, saved | change))

    path = save(tmp_path / "good.npz", saved)
    ids = saved["token_ids"]
    assert "no such file" in fails(capsys, "--logits", tmp_path / "absent.npz")
    assert "a folder" in fails(capsys, "--logits", tmp_path)
    assert ".safetensors or .npz" in fails(capsys, "--logits", __file__)
    assert "--text goes with --model" in fails(capsys, "--logits", path, "--text", path)
    assert "--device must be cpu" in fails(capsys, "--logits", path, "--device", "tpu9")
    assert "sees" in fails(capsys, "--logits", path, "--device", "cuda:99")
    for suffix in (".npz", ".safetensors"):
        text = message(f"shape{suffix}", token_ids=ids[:, :8].contiguous())
        assert "logits' leading shape, (2, 9), got (2, 8)" in text
    assert "token_ids" in message("float.npz", token_ids=ids.double())
    assert "logits in" in message("int.npz", logits=saved["logits"].to(torch.int32))
    assert "at least one row" in message("empty.npz", logits=torch.zeros(0, V))
    for suffix in (".npz", ".safetensors"):
        renamed = save(tmp_path / f"renamed{suffix}", {"scores": saved["logits"]})
        assert "named logits and token_ids, got scores" in fails(capsys, "--logits", renamed)
        broken = tmp_path / f"broken{suffix}"
        broken.write_bytes(Path(path).read_bytes()[:3000])
        assert "--logits must be a" in fails(capsys, "--logits", broken)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install detlogp[hf]" in fails(capsys, "--logits", broken)


def test_errors_in_output(
    tmp_path: Path,
    saved: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = save(tmp_path / "logits.npz", saved)
    command = ("--logits", path, "--output")
    assert ".jsonl or .parquet, got a.csv" in fails(capsys, *command, "a.csv")
    assert "a folder that exists" in fails(capsys, *command, tmp_path / "no" / "a.jsonl")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    text = fails(capsys, *command, tmp_path / "a.parquet")
    assert "pip install detlogp[parquet]" in text


def test_errors_in_model(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = model_folder / "text.txt"
    short = tmp_path / "short.txt"
    short.write_text("a")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Größe".encode("latin-1"))
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    (hollow / "config.json").write_text("{}")
    model = ("--model", model_folder)
    assert "--text must name the file" in fails(capsys, *model)
    assert "no such file" in fails(capsys, *model, "--text", tmp_path / "absent.txt")
    assert "must be UTF-8" in fails(capsys, *model, "--text", latin)
    assert "at least 2 tokens" in fails(capsys, *model, "--text", short)
    assert "64 positions, got 65" in fails(capsys, *model, "--text", text, "--window", "65")
    assert "with its config.json" in fails(capsys, "--model", tmp_path, "--text", text)
    assert "causal language model" in fails(capsys, "--model", hollow, "--text", text)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install detlogp[hf]" in fails(capsys, *model, "--text", text)
