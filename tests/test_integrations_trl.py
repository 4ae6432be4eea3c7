"""TRL's trainers with detlogp: a GRPO run made twice, the functions' values, and the way back."""

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import detlogp
from detlogp.evidence.kernels import Recorder
from detlogp.integrations import trl as integration
from detlogp.testing import assert_same_bits

pytestmark = [
    # Of other people's code, about other people's code.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ImportWarning"),
]
MODEL_DIR = Path(__file__).parents[1] / "examples" / "tiny-llama"
PROMPTS = ["Return the", "This method is called when", "Wrap a paragraph of", "If the argument is"]
TIMINGS = ("_runtime", "_per_second", "step_time")
STEPS = 4
V = 300


@pytest.fixture(scope="module")
def utils() -> ModuleType:
    return importlib.import_module("trl.trainer.utils")


@pytest.fixture
def enabled(utils: ModuleType) -> Iterator[None]:
    with integration.enable():
        yield


def prose(completions: list[str], **_: Any) -> list[float]:
    """The share of lowercase letters and spaces."""
    return [sum(c.islower() or c == " " for c in text) / max(1, len(text)) for text in completions]


def train(folder: Path) -> list[dict[str, Any]]:
    """A GRPO run with a reference model and two updates a rollout; what it logged, less timings."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, local_files_only=True
    )
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        num_iterations=2,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=12,
        learning_rate=1e-4,
        beta=0.04,
        temperature=0.9,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=prose,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMINGS)}
        for entry in history
    ]


def bits(history: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: float(v).hex() for name, v in entry.items()} for entry in history]


def test_a_grpo_run_twice(enabled: None, tmp_path: Path) -> None:
    with Recorder() as recorder:
        first = train(tmp_path / "first")
    assert {"logp", "logp_backward"} <= set(recorder.names()), recorder.names()
    second = train(tmp_path / "second")
    print(first)
    assert bits(first) == bits(second)
    assert len(first) == STEPS + 1
    losses = [entry["loss"] for entry in first[:STEPS]]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == STEPS
