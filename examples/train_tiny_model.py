"""Train the tiny Llama-style language model that the examples score text with.

The training text is the docstrings of the running Python's standard library, read with ``ast``
and never imported, so nothing is downloaded. The docstrings of a few modules are held out; an
excerpt of them becomes ``held-out.txt`` beside the output folder. Run it with::

    OMP_NUM_THREADS=1 python examples/train_tiny_model.py

The defaults are what made the committed ``tiny-llama`` folder (17 minutes on one CPU core).
Training is fixed by steps and seed, so a second run with the same Python, PyTorch and processor
should give the same weights; another Python version has other docstrings, and so another model.
"""

import argparse
import ast
import math
import sysconfig
import time
from pathlib import Path

import torch
from rich.progress import Progress, TextColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SKIPPED_DIRS = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT_MODULES = ("textwrap", "sched", "graphlib", "heapq", "secrets", "fractions", "statistics")
EXCERPT_CHARS = 3000
VOCAB_SIZE, CONTEXT_LENGTH, BATCH_SIZE = 2048, 1024, 2
PEAK_LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-3, 100, 0.1, 1.0


def docstrings_of(path: Path) -> list[str]:
    """Return the docstrings in one source file, none if the file does not parse."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def collect_docstrings() -> tuple[list[str], list[str]]:
    """Return the distinct (training, held-out) docstrings of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    held_out = [text for name in HELD_OUT_MODULES for text in docstrings_of(root / f"{name}.py")]
    everything: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_DIRS.isdisjoint(path.relative_to(root).parts):
            everything.extend(docstrings_of(path))
    # Other modules repeat a few held-out docstrings; those copies must not be trained on.
    excluded = set(held_out)
    training = [text for text in dict.fromkeys(everything) if text not in excluded]
    return training, list(dict.fromkeys(held_out))


def prose_excerpt(docstrings: list[str]) -> str:
    """Join public, example-free docstrings of paragraph length, up to EXCERPT_CHARS in all."""
    excerpt = ""
    for text in docstrings:
        is_prose = 400 <= len(text) <= 1300 and ">>>" not in text and not text.startswith("_")
        if is_prose and len(excerpt) + len(text) <= EXCERPT_CHARS:
            excerpt += f"{text}\n\n"
    return excerpt.rstrip() + "\n"


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts the BOS token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=CONTEXT_LENGTH
    )


def train_model(corpus: torch.Tensor, config: LlamaConfig, steps: int) -> LlamaForCausalLM:
    """Train on random windows of the token stream, with AdamW and a cosine schedule."""
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, min(WARMUP_STEPS, steps // 10), steps)
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps, loss=math.nan)
        for _ in range(steps):
            starts = torch.randint(len(corpus) - CONTEXT_LENGTH + 1, (BATCH_SIZE,)).tolist()
            batch = torch.stack([corpus[start : start + CONTEXT_LENGTH] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            progress.update(task, advance=1, loss=loss.item())
    return model


@torch.inference_mode()
def report_perplexity(out: Path, name: str, texts: list[str]) -> None:
    """Print the perplexity of the texts under the saved model, each text scored from BOS."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    # The saved weights are bfloat16; float32 arithmetic keeps rounding out of the measurement.
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    total, count = 0.0, 0
    for text in texts:
        # Only the first context of a longer text is scored: the model knows no later positions.
        ids = tokenizer(text, truncation=True, return_tensors="pt")["input_ids"]
        predicted = ids.shape[1] - 1
        total += model(input_ids=ids, labels=ids).loss.item() * predicted
        count += predicted
    print(f"{name}: perplexity {math.exp(total / count):.2f} over {count} tokens")


def main() -> None:
    """Collect the text, train the tokenizer and the model, save both and score held-out text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default_out = Path(__file__).parent / "tiny-llama"
    parser.add_argument("--out", type=Path, default=default_out, help="folder for the model")
    parser.add_argument("--steps", type=int, default=3200, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    args = parser.parse_args()
    started = time.monotonic()
    # One thread fixes the order of floating-point sums, so that a rerun gives the same weights.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    training, held_out = collect_docstrings()
    tokenizer = train_tokenizer(training)
    # The model sees windows of the joined texts, so the warning about long texts is no concern.
    token_ids = tokenizer(training, verbose=False)["input_ids"]
    corpus = torch.tensor([i for ids in token_ids for i in (*ids, tokenizer.eos_token_id)])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    print(f"training text: {len(training)} docstrings, {len(corpus)} tokens")
    model = train_model(corpus, config, args.steps)
    print(f"parameters: {model.num_parameters()}, wall time {time.monotonic() - started:.0f} s")
    args.out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    excerpt = prose_excerpt(held_out)
    (args.out.parent / "held-out.txt").write_text(excerpt, encoding="utf-8")
    report_perplexity(args.out, "held-out.txt", [excerpt])
    report_perplexity(args.out, "all held-out docstrings", held_out)


if __name__ == "__main__":
    main()
