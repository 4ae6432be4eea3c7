"""What drift does to a policy that nobody has trained yet, and to one that is being trained.

    python examples/policy_drift.py --output build/policy-drift
    python examples/policy_drift.py --device cuda --stride 1 --output build/policy-drift

The tiny model reads windows of a real text once. Its bfloat16 logits are scored by torch's
logsumexp form, in bfloat16 and in float32, and by detlogp: the old policy as one batch, the new
policy in another layout, so every policy ratio should be 1. Then each of the three trains twice,
once with the logits as they come and once in the layout that moved torch most.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# PyTorch's deterministic mode asks for it, before the first call of cuBLAS.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import policy_drift_picture
import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import detlogp
from detlogp.evidence import layouts, machine

Score = Callable[[Tensor, Tensor], Tensor]
"""logits [N, V] and ids [N] to log-probabilities [N]."""

HERE = Path(__file__).parent
OWN = "detlogp"
CLIP_RANGE = 0.2
# Where clipping is counted: as usual, and so near to 1 that small changes could count.
CLIP_RANGES = (CLIP_RANGE, 0.01)
# From 1e-8 to 1, eight steps a decade.
EPSILONS = [10 ** (step / 8) for step in range(-64, 1)]
LEARNING_RATE, SEQUENCES_TRAINED, TOKENS_DRAWN = 1e-5, 8, 4096


def logsumexp_form(logits: Tensor, token_ids: Tensor) -> Tensor:
    target = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return target - torch.logsumexp(logits, -1)


def logsumexp_form_in_float32(logits: Tensor, token_ids: Tensor) -> Tensor:
    return logsumexp_form(logits.float(), token_ids)


SCORES: dict[str, Score] = {
    "torch, bfloat16": logsumexp_form,
    "torch, float32": logsumexp_form_in_float32,
    OWN: detlogp.logp,
}


def in_chunks(size: int, score: Score, logits: Tensor, token_ids: Tensor) -> Tensor:
    pairs = zip(logits.split(size), token_ids.split(size), strict=True)
    return torch.cat([score(*pair) for pair in pairs])


def moved(name: str, score: Score, logits: Tensor, token_ids: Tensor) -> Tensor:
    """The whole batch, its logits copied to other memory."""
    (call,) = layouts.LAYOUTS[name]((logits, token_ids), torch.Generator())
    return score(*call.parts)


def other_layouts(length: int) -> dict[str, Callable[[Score, Tensor, Tensor], Tensor]]:
    return {
        "one token at a time": partial(in_chunks, 1),
        "chunks of 7 tokens": partial(in_chunks, 7),
        "one sequence at a time": partial(in_chunks, length),
        "misaligned by one element": partial(moved, "misaligned by one element"),
        "vocabulary-major": partial(moved, "transposed"),
    }


def load(dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    transformers.utils.logging.disable_progress_bar()
    folder = HERE / "tiny-llama"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model.to(device).eval(), tokenizer


def windows_of(text: str, tokenizer: Any, length: int, stride: int) -> Tensor:
    """Windows of `length` + 1 tokens, one every `stride` tokens: [S, length + 1]."""
    token_ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor(token_ids).unfold(0, length + 1, stride)


@torch.no_grad()
def logits_of(model: Any, inputs: Tensor, size: int) -> Tensor:
    """[S x length, V], bfloat16, `size` sequences a forward pass."""
    parts = [model(input_ids=part, use_cache=False).logits for part in inputs.split(size)]
    return torch.cat(parts).flatten(0, 1).bfloat16()


def compare(new_logp: Tensor, old_logp: Tensor) -> dict[str, Any]:
    """What the ratio new / old tells a trainer. In float64, so that nothing is rounded away."""
    log_ratio = new_logp.double() - old_logp.double()
    ratio = log_ratio.exp()
    distance = log_ratio.expm1().abs()
    return {
        "tokens": len(ratio),
        "changed": int((log_ratio != 0).sum()),
        "ratio_min": ratio.min().item(),
        "ratio_max": ratio.max().item(),
        "distance_max": distance.max().item(),
        # The estimate k3 = ratio - 1 - log(ratio) of the KL divergence.
        "k3": (log_ratio.expm1() - log_ratio).mean().item(),
        "clipped": {str(e): (distance > e).double().mean().item() for e in CLIP_RANGES},
        "outside": [(distance > e).double().mean().item() for e in EPSILONS],
    }


def measure_before(windows: Tensor, device: str) -> dict[str, Any]:
    """Nothing is trained: the new policy is the old one, scored in another way."""
    model, _ = load(torch.bfloat16, device)
    inputs, token_ids = windows[:, :-1].to(device), windows[:, 1:].flatten().to(device)
    logits = logits_of(model, inputs, 64)
    again = logits_of(model, inputs, 1)
    exact = logsumexp_form(logits.double(), token_ids)
    comparisons: list[dict[str, Any]] = []
    log_ratios: dict[tuple[str, str], Tensor] = {}
    for name, score in track(SCORES.items(), "scoring", console=Console(stderr=True)):
        old_logp = score(logits, token_ids)
        new_logps = {
            ("layout", layout): present(score, logits, token_ids)
            for layout, present in other_layouts(inputs.shape[1]).items()
        }
        # Beyond layouts: what the operator cannot mend, and what it rounds.
        new_logps["model", "model run by sequence"] = score(again, token_ids)
        new_logps["float64", "float64 arithmetic"] = exact
        for (kind, against), logp in new_logps.items():
            about = {"implementation": name, "kind": kind, "against": against}
            comparisons.append({**about, **compare(logp, old_logp)})
            log_ratios[name, against] = logp.double() - old_logp.double()
    in_layouts = [row for row in comparisons if row["kind"] == "layout"]
    worst: str = max(in_layouts, key=lambda row: int(row["changed"]))["against"]
    drawn = {name: changes(log_ratios[name, worst][:TOKENS_DRAWN]) for name in SCORES}
    return {"comparisons": comparisons, "worst_layout": worst, "drawn": drawn}


def changes(log_ratio: Tensor) -> list[tuple[int, float]]:
    """Token and ratio - 1, where it is not 0."""
    places = log_ratio.nonzero().flatten()
    distances = (float(f"{x:.4g}") for x in log_ratio[places].expm1().tolist())
    return list(zip(places.tolist(), distances, strict=True))


def reward_of(text: str) -> float:
    """The share of lowercase letters and spaces, as in grpo.py."""
    return sum(char.islower() or char == " " for char in text) / len(text)


def train(
    score: Score, present: Callable[..., Tensor], windows: Tensor, device: str, steps: int
) -> list[Tensor]:
    """The old policy's log-probabilities, then the trained one's after 0, 1, ... steps, on the CPU.

    The old policy is scored as a whole; `present` is the trainer's layout. The weights are float32,
    the logits are rounded to bfloat16, as mixed precision has them.
    """
    model, tokenizer = load(torch.float32, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    rewards = torch.tensor([reward_of(text) for text in tokenizer.batch_decode(windows)])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    inputs, token_ids = windows[:, :-1].to(device), windows[:, 1:].flatten().to(device)
    advantages = advantages.repeat_interleave(inputs.shape[1]).to(device)
    history: list[Tensor] = []
    old_logp: Tensor | None = None
    while True:
        logits = model(input_ids=inputs, use_cache=False).logits.flatten(0, 1).bfloat16()
        if old_logp is None:
            old_logp = score(logits.detach(), token_ids).float()
            history.append(old_logp.cpu())
        logp = present(score, logits, token_ids).float()
        history.append(logp.detach().cpu())
        if len(history) == steps + 2:
            return history
        ratio = (logp - old_logp).exp()
        clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def measure_training(windows: Tensor, device: str, steps: int, layout: str) -> dict[str, Any]:
    """Two runs, which differ in the trainer's layout alone."""
    chosen = windows[:: max(1, len(windows) // SEQUENCES_TRAINED)][:SEQUENCES_TRAINED].contiguous()
    other = other_layouts(chosen.shape[1] - 1)[layout]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = {
            name: [
                train(score, present, chosen, device, steps)
                for present in (lambda score, *parts: score(*parts), other)
            ]
            for name, score in track(SCORES.items(), "training", console=Console(stderr=True))
        }
    finally:
        torch.use_deterministic_algorithms(before)
    return {name: _between(*pair) for name, pair in runs.items()}


def _between(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[dict[str, Any]]:
    """After each step: the runs against each other, and each against its old policy."""
    rows = []
    for step, pair in enumerate(zip(one[1:], other[1:], strict=True)):
        each = [compare(logp, one[0]) for logp in pair]
        distances = [(logp.double() - one[0].double()).expm1().abs() for logp in pair]
        in_one_run = {
            str(e): int(((distances[0] > e) != (distances[1] > e)).sum()) for e in CLIP_RANGES
        }
        rows.append(
            {
                "step": step,
                "tokens": len(pair[0]),
                "changed": int((pair[0] != pair[1]).sum()),
                "difference_max": (pair[0] - pair[1]).abs().max().item(),
                "clipped": {str(e): [c["clipped"][str(e)] for c in each] for e in CLIP_RANGES},
                "clipped_in_one_run": in_one_run,
                "k3": [comparison["k3"] for comparison in each],
            }
        )
    return rows


def shown(comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of one implementation. The layouts that changed nothing become one row."""
    in_layouts = [row for row in comparisons if row["kind"] == "layout"]
    loud = [row for row in in_layouts if row["changed"]]
    quiet = [row for row in in_layouts if not row["changed"]]
    count = f"{'the other' if loud else 'all'} {len(quiet)} layouts"
    merged = [{**row, "against": count} for row in quiet[:1]]
    return loud + merged + [row for row in comparisons if row["kind"] != "layout"]


def report(result: dict[str, Any], console: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("scored by")
    table.add_column("against")
    for column in ("not 1", "|ratio - 1|", "k3", *(f"clipped {e}" for e in CLIP_RANGES)):
        table.add_column(column, justify="right")
    before = result["before"]
    for name in SCORES:
        own = [row for row in before["comparisons"] if row["implementation"] == name]
        for row in shown(own):
            sizes = (f"{row[key]:.2g}" for key in ("distance_max", "k3"))
            shares = (f"{share:.2%}" if share else "0" for share in row["clipped"].values())
            changed = f"{row['changed']} of {row['tokens']}"
            table.add_row(name, row["against"], changed, *sizes, *shares)
    console.print(table)
    console.print(f"Two runs each, as it comes and {before['worst_layout']}:")
    for name, rows in result["training"].items():
        last, gap = rows[-1], max(row["difference_max"] for row in rows)
        clipped = " and ".join(f"{share:.2%}" for share in last["clipped"][str(CLIP_RANGE)])
        k3 = " and ".join(f"{value:.8f}" for value in last["k3"])
        console.print(
            f"  {name}: {last['changed']} of {last['tokens']} tokens differ after {last['step']} "
            f"steps (on the way by up to {gap:.2g} nats)"
        )
        console.print(f"  {'':{len(name)}}  clipped {clipped}, k3 {k3}")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    _, tokenizer = load(torch.bfloat16, "cpu")
    text = options.text.read_text(encoding="utf-8")
    windows = windows_of(text, tokenizer, options.length, options.stride)
    before = measure_before(windows, options.device)
    return {
        "machine": machine.facts(options.device),
        "epsilons": EPSILONS,
        "sizes": {
            "sequences": len(windows),
            "length": options.length,
            "stride": options.stride,
            "drawn": min(TOKENS_DRAWN, len(windows) * options.length),
        },
        "before": before,
        "training": measure_training(
            windows, options.device, options.steps, before["worst_layout"]
        ),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--text", type=Path, default=HERE / "held-out.txt")
    parser.add_argument("--length", type=int, default=64, help="tokens scored in a window")
    parser.add_argument("--stride", type=int, default=16, help="tokens from one window to the next")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of a run")
    parser.add_argument("--output", type=Path, help="folder for drift.json, drift.png, drift.svg")
    options = parser.parse_args(arguments)
    result = measure(options)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "drift.json").write_text(json.dumps(result) + "\n")
        policy_drift_picture.draw(result, options.output)
    report(result, Console(highlight=False, width=112))
    own = [row for row in result["before"]["comparisons"] if row["implementation"] == OWN]
    in_layouts = [row for row in own if row["kind"] == "layout"]
    return int(any(row["changed"] for row in in_layouts + result["training"][OWN]))


if __name__ == "__main__":
    raise SystemExit(main())
