"""The causal-LM loss on detlogp: torch's cross_entropy, its derivatives, and a Trainer run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from detlogp.evidence.kernels import Recorder
from detlogp.integrations.transformers import causal_lm_loss, compute_loss, cross_entropy
from detlogp.testing import assert_same_bits

MODEL_DIR = Path(__file__).parents[1] / "examples" / "tiny-llama"
TEXT = MODEL_DIR.with_name("held-out.txt")
N, V = 6, 50
REDUCTIONS = ["mean", "sum", "none"]
Loss = Callable[..., Tensor]


@pytest.fixture
def logits(generator: torch.Generator) -> Tensor:
    return torch.randn(N, V, dtype=torch.float64, generator=generator)


def some_labels(ignored: int = -100) -> Tensor:
    return torch.tensor([0, ignored, V - 1, 7, ignored, 20])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignore_index", [-100, 7, 255])
def test_torchs_cross_entropy(logits: Tensor, reduction: str, ignore_index: int) -> None:
    options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    labels = some_labels(ignore_index)
    leaf = logits.requires_grad_()
    got, expected = (loss(leaf, labels, **options) for loss in (cross_entropy, functional_loss))
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(loss.sum(), leaf)[0] for loss in (got, expected)]
    torch.testing.assert_close(*gradients)
    assert gradients[0][labels == ignore_index].count_nonzero() == 0
    if reduction == "none":
        assert not torch.signbit(got[labels == ignore_index]).any()


def functional_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits, labels, **options)


def test_no_label_that_counts(logits: Tensor) -> None:
    labels = torch.full((N,), -100)
    assert cross_entropy(logits, labels).isnan()
    assert cross_entropy(logits, labels, reduction="sum") == 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_differentiable_in_the_same_ways(
    logits: Tensor, reduction: str, generator: torch.Generator
) -> None:
    labels = some_labels()
    tangent = torch.randn(N, V, dtype=torch.float64, generator=generator)

    def derivatives(function: Loss) -> list[Any]:
        def loss(x: Tensor) -> Tensor:
            return function(x, labels, reduction=reduction)

        def total(x: Tensor) -> Tensor:
            return loss(x).sum()

        def along_tangent(x: Tensor) -> Tensor:
            gradient: Tensor = torch.func.grad(total)(x)
            return (gradient * tangent).sum()

        return [
            torch.func.jvp(loss, (logits,), (tangent,)),
            torch.func.grad(along_tangent)(logits),
            torch.func.jvp(torch.func.grad(total), (logits,), (tangent,)),
            torch.func.hessian(total)(logits),
        ]

    torch.testing.assert_close(derivatives(cross_entropy), derivatives(functional.cross_entropy))


def test_per_sample_gradients(generator: torch.Generator) -> None:
    """vmap over a batch of sequences, each with labels of its own."""
    logits = torch.randn(3, N, V, dtype=torch.float64, generator=generator)
    labels = torch.stack([some_labels(), some_labels().flip(0), torch.arange(N)])
    ours, theirs = (
        torch.func.vmap(torch.func.grad(loss))(logits, labels)
        for loss in (cross_entropy, functional.cross_entropy)
    )
    torch.testing.assert_close(ours, theirs)
    loop = [torch.func.grad(cross_entropy)(*pair) for pair in zip(logits, labels, strict=True)]
    torch.testing.assert_close(ours, torch.stack(loop))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tokens_loss_does_not_know_its_batch(dtype: torch.dtype, logits: Tensor) -> None:
    rounded, labels = logits.to(dtype), some_labels()
    whole = cross_entropy(rounded, labels, reduction="none")
    assert whole.dtype == torch.float32
    for row in range(N):
        alone = cross_entropy(rounded[row], labels[row], reduction="none")
        assert_same_bits(alone, whole[row])


@pytest.mark.parametrize("count", [None, 4, torch.tensor(4)])
@pytest.mark.parametrize("is_shifted", [False, True])
def test_transformers_own_loss(
    generator: torch.Generator, count: int | Tensor | None, is_shifted: bool
) -> None:
    leaf = torch.randn(2, N, V, generator=generator).requires_grad_()
    labels = torch.stack([some_labels(), some_labels().flip(0)])
    options: dict[str, Any] = {"vocab_size": V, "num_items_in_batch": count}
    options |= {"labels": None, "shift_labels": labels} if is_shifted else {"labels": labels}
    got, expected = (
        loss(logits=leaf, attention_mask=None, **options)
        for loss in (causal_lm_loss, ForCausalLMLoss)
    )
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, leaf), torch.autograd.grad(expected, leaf))


def test_errors(logits: Tensor) -> None:
    labels = some_labels()
    with pytest.raises(ValueError, match="reduction must be one of mean, sum, none, got 'max'"):
        cross_entropy(logits, labels, reduction="max")
    with pytest.raises(ValueError, match=f"vocab_size must be logits' V, {V}, got 51"):
        causal_lm_loss(logits, labels, vocab_size=51)
    with pytest.raises(ValueError, match="labels must be given"):
        causal_lm_loss(logits)
    # Where torch raises, at the price of a synchronisation.
    assert cross_entropy(logits, torch.full((N,), V), reduction="none").isnan().all()
    assert cross_entropy(logits, some_labels(), ignore_index=0).isnan()


def train(folder: Path, way: str) -> list[dict[str, Any]]:
    """A short Trainer run, in which gradients are accumulated, and its losses."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, local_files_only=True
    )
    ids: list[int] = tokenizer(TEXT.read_text())["input_ids"][: 8 * 40]
    # Sequences with different numbers of labels that count.
    rows = [ids[start : start + 40] for start in range(0, len(ids), 40)]
    data = [
        {"input_ids": row, "labels": [-100] * (3 * number) + row[3 * number :]}
        for number, row in enumerate(rows)
    ]
    if way == "loss_function":
        model.loss_function = causal_lm_loss
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer: Any = transformers.Trainer(
        model=model,
        args=settings,
        train_dataset=data,
        compute_loss_func=compute_loss if way == "compute_loss_func" else None,
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_run(tmp_path: Path) -> None:
    expected = train(tmp_path / "torch", "transformers' own")
    for way in ("loss_function", "compute_loss_func"):
        with Recorder() as recorder:
            first = train(tmp_path / way, way)
        assert set(recorder.names()) == {"logp_with_stats", "logp_backward"}
        assert train(tmp_path / way, way) == first
        assert len(first) == len(expected) == 3
        losses = (torch.tensor([entry["loss"] for entry in run]) for run in (first, expected))
        torch.testing.assert_close(*losses)
