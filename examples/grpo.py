"""A strictly deterministic GRPO run on the tiny model, made twice from scratch and compared.

    python examples/grpo.py
    python examples/grpo.py --steps 10 --device cuda --output grpo.json

Every log-probability comes from detlogp.logp. Matrix products may round by the size of their batch,
so a step computes the logits once and scores them twice, one sequence at a time (the old policy)
and as a whole (the trained one): before any update each ratio must be exactly 1.
"""

import argparse
import copy
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# PyTorch's deterministic mode asks for it, before the first call of cuBLAS.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import detlogp
from detlogp.evidence.kernels import Recorder

PROMPTS = ("Return the", "This method is called when", "Wrap a paragraph of", "If the argument is")
GROUP_SIZE, COMPLETION_TOKENS, UPDATES_PER_ROLLOUT = 4, 16, 2
LEARNING_RATE, CLIP_RANGE, KL_WEIGHT, MAX_GRAD_NORM = 1e-4, 0.2, 0.05, 1.0
COLUMNS = ("step", "reward_mean", "loss", "kl", "ratio_min", "ratio_max", "parameters")
MODEL_DIR = Path(__file__).with_name("tiny-llama")


class Rollout(NamedTuple):
    """N sequences of T tokens, padded on the right; row t of the logits predicts token t + 1."""

    inputs: Tensor  # [N, T - 1], int64
    targets: Tensor  # [N, T - 1], int64
    rows: Tensor  # [N, T - 1], bool: the target belongs to the completion
    rewards: Tensor  # [N], float64, on the CPU
    advantages: Tensor  # [N], float32


def operator_names(recorder: Recorder, part: str) -> str:
    """Which of detlogp's operators really ran, in order, each once."""
    if not recorder.calls:
        raise RuntimeError(f"the {part} of the training step ran no detlogp operator")
    return " + ".join(f"detlogp::{name}" for name in dict.fromkeys(recorder.names()))


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def load(model_dir: Path, device: str) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer. Nothing is downloaded."""
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.to(device).eval(), tokenizer


def logits_of(model: Any, inputs: Tensor) -> Tensor:
    # Padding is on the right, where causal attention never looks, so no attention mask is needed.
    return model(input_ids=inputs, use_cache=False).logits  # type: ignore[no-any-return]


@torch.no_grad()
def sample(model: Any, prompt: list[int], generator: torch.Generator) -> Tensor:
    """One prompt with each of its completions: [GROUP_SIZE, tokens], on the CPU."""
    device = next(model.parameters()).device
    token_ids = torch.tensor([prompt] * GROUP_SIZE)
    for _ in range(COMPLETION_TOKENS):
        last = logits_of(model, token_ids.to(device))[:, -1]
        probabilities = torch.softmax(last.cpu().double(), -1)
        chosen = torch.multinomial(probabilities, 1, generator=generator)
        token_ids = torch.cat([token_ids, chosen], 1)
    return token_ids


def reward_of(text: str) -> float:
    """The share of lowercase letters and spaces, which asks for prose rather than code."""
    return sum(char.islower() or char == " " for char in text) / max(1, len(text))


def roll_out(model: Any, tokenizer: Any, generator: torch.Generator, device: str) -> Rollout:
    end = tokenizer.eos_token_id
    sequences, masks, rewards = [], [], []
    for prompt in PROMPTS:
        prompt_ids: list[int] = tokenizer(prompt)["input_ids"]
        for sequence in sample(model, prompt_ids, generator):
            completion = sequence[len(prompt_ids) :].tolist()
            # The policy chose the end as well, so it is trained; what follows it is left out.
            length = [*completion, end].index(end) + 1
            mask = torch.zeros(len(sequence), dtype=torch.bool)
            mask[len(prompt_ids) : len(prompt_ids) + length] = True
            text = tokenizer.decode(completion[:length], skip_special_tokens=True)
            sequences.append(sequence)
            masks.append(mask)
            rewards.append(reward_of(text))
    pad = torch.nn.utils.rnn.pad_sequence
    token_ids = pad(sequences, batch_first=True, padding_value=end).to(device)
    mask = pad(masks, batch_first=True).to(device)
    scores = torch.tensor(rewards, dtype=torch.float64)
    groups = scores.view(-1, GROUP_SIZE)
    normalised = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    advantages = normalised.flatten().float().to(device)
    return Rollout(token_ids[:, :-1], token_ids[:, 1:], mask[:, 1:], scores, advantages)


def in_micro_batches(logits: Tensor, rollout: Rollout) -> Tensor:
    """The log-probabilities [N, T - 1], scored one sequence at a time."""
    tensors = (logits, rollout.targets, rollout.rows)
    parts = zip(*(tensor.split(1) for tensor in tensors), strict=True)
    return torch.cat([detlogp.logp(*part[:2], rows=part[2]) for part in parts])


def grpo_loss(
    train_logp: Tensor, old_logp: Tensor, reference_logp: Tensor, rollout: Rollout
) -> tuple[Tensor, dict[str, float]]:
    """The clipped loss with the k3 estimate of the KL, a mean over tokens, then over sequences."""

    def mean(values: Tensor) -> Tensor:
        return ((values * rollout.rows).sum(1) / rollout.rows.sum(1)).mean()

    ratio = (train_logp - old_logp).exp()
    clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
    advantages = rollout.advantages[:, None]
    policy_loss = -mean(torch.minimum(ratio * advantages, clipped * advantages))
    to_reference = reference_logp - train_logp
    kl = mean(to_reference.exp() - to_reference - 1)
    loss = policy_loss + KL_WEIGHT * kl
    return loss, {
        "loss": loss.item(),
        "policy_loss": policy_loss.item(),
        "kl": kl.item(),
        "clipped_share": mean((ratio != clipped).float()).item(),
        "logp_mean": mean(train_logp).item(),
    }


def train_step(
    model: Any, reference: Any, optimizer: torch.optim.Optimizer, rollout: Rollout
) -> dict[str, Any]:
    """The updates of one rollout. The ratio is the first update's, other numbers the last's."""
    with torch.no_grad():
        reference_logits = logits_of(reference, rollout.inputs)
        reference_logp = detlogp.logp(reference_logits, rollout.targets, rows=rollout.rows)
    metrics: dict[str, Any] = {}
    old_logp: Tensor | None = None
    for _ in range(UPDATES_PER_ROLLOUT):
        logits = logits_of(model, rollout.inputs)
        with Recorder() as forward:
            train_logp = detlogp.logp(logits, rollout.targets, rows=rollout.rows)
        source = operator_names(forward, "forward")
        if old_logp is None:
            old_logp = in_micro_batches(logits.detach(), rollout)
            ratio = (train_logp.detach() - old_logp).exp()[rollout.rows]
            metrics |= {"ratio_min": ratio.min().item(), "ratio_max": ratio.max().item()}
            # Near a logp of 0 a changed last bit still gives the ratio 1, so the bits count too.
            if not (torch.equal(train_logp, old_logp) and (ratio == 1).all()):
                raise RuntimeError(f"the ratio before the update must be exactly 1, got {metrics}")
        loss, numbers = grpo_loss(train_logp, old_logp, reference_logp, rollout)
        optimizer.zero_grad()
        with Recorder() as backward:
            loss.backward()
        source += " + " + operator_names(backward, "backward")
        metrics |= numbers | {"train_logp_source": source}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM, foreach=False)
        metrics["grad_norm"] = norm.item()
        optimizer.step()
    return metrics


def checksum(model: Any) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(model_dir: Path, device: str, steps: int, seed: int) -> list[dict[str, Any]]:
    """One run from the saved model on; the metrics of each step."""
    history = []
    with deterministic(seed):
        model, tokenizer = load(model_dir, device)
        reference = copy.deepcopy(model).requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
        generator = torch.Generator().manual_seed(seed)
        for step in track(range(steps), description="training", console=Console(stderr=True)):
            started = time.perf_counter()
            rollout = roll_out(model, tokenizer, generator, device)
            rewards = rollout.rewards
            metrics = {
                "step": step,
                "reward_mean": rewards.mean().item(),
                "reward_std": rewards.std().item(),
                **train_step(model, reference, optimizer, rollout),
                "parameters": checksum(model),
            }
            # The checksum has waited for the device, so this is the whole step.
            history.append(metrics | {"seconds": time.perf_counter() - started})
    return history


def differences(one: Sequence[dict[str, Any]], two: Sequence[dict[str, Any]]) -> list[str]:
    """What differs between two runs' metrics, bit for bit; the timing is left out."""

    def bits(value: Any) -> str:
        return value.hex() if isinstance(value, float) else str(value)

    found = [] if len(one) == len(two) else [f"steps: {len(one)} and {len(two)}"]
    for step, (left, right) in enumerate(zip(one, two, strict=False)):
        for name in dict.fromkeys([*left, *right]):
            pair = bits(left.get(name)), bits(right.get(name))
            if name != "seconds" and pair[0] != pair[1]:
                found.append(f"step {step}, {name}: {pair[0]} and {pair[1]}")
    return found


def report(history: list[dict[str, Any]], found: list[str] | None) -> None:
    console = Console(highlight=False)
    table = Table(*COLUMNS, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for metrics in history:
        values = (metrics[name] for name in COLUMNS)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    console.print(table)
    console.print("trained with", history[0]["train_logp_source"], soft_wrap=True)
    if found:
        console.print(f"different ({len(found)}): {found[0]}", style="bold red", soft_wrap=True)
    elif found is not None:
        numbers = [v for m in history for n, v in m.items() if n != "seconds"]
        count = sum(isinstance(number, float) for number in numbers)
        sentence = f"{count} numbers bitwise equal over {len(history)} steps"
        console.print(f"twice the same: {sentence}", style="green", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of a causal model")
    parser.add_argument("--steps", type=int, default=3, help="rollouts, each trained on twice")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the metrics as JSON")
    parser.add_argument("--once", action="store_true", help="skip the second run")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model must be a folder with a config.json, got {options.model}")
    settings = (options.model, options.device, options.steps, options.seed)
    history = train(*settings)
    found = None if options.once else differences(history, train(*settings))
    report(history, found)
    if options.output:
        machine = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
            "detlogp": detlogp.__version__,
        }
        repeated = None if found is None else not found
        result = {"machine": machine, "steps": history, "repeated": repeated}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
