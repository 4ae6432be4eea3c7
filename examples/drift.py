"""The same rows scored alone, in chunks and misaligned: who keeps the bits? Draws the picture.

    python examples/drift.py --output drift.json --picture drift.png
    python examples/drift.py --from drift.json --picture drift.png

Every implementation gets the same float32 logits. A point is one row; its height is the result in
that layout minus the result of the whole batch.
"""

import argparse
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich.progress import track
from torch import Tensor

import detlogp

Score = Callable[[Tensor, Tensor], Tensor]


def logsumexp_form(logits: Tensor, token_ids: Tensor) -> Tensor:
    target = logits.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return target - torch.logsumexp(logits, -1)


def log_softmax_form(logits: Tensor, token_ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def in_chunks(size: int, score: Score, logits: Tensor, token_ids: Tensor) -> Tensor:
    pairs = zip(logits.split(size), token_ids.split(size), strict=True)
    return torch.cat([score(*pair) for pair in pairs])


def misaligned(score: Score, logits: Tensor, token_ids: Tensor) -> Tensor:
    moved = logits.new_empty(logits.numel() + 1)[1:].view(logits.shape)
    return score(moved.copy_(logits), token_ids)


IMPLEMENTATIONS: dict[str, Score] = {
    "torch gather - logsumexp": logsumexp_form,
    "torch log_softmax + gather": log_softmax_form,
    "detlogp.logp": detlogp.logp,
}
LAYOUTS: dict[str, Callable[[Score, Tensor, Tensor], Tensor]] = {
    "one row at a time": partial(in_chunks, 1),
    "chunks of 7": partial(in_chunks, 7),
    "misaligned by one element": misaligned,
}


def measure(rows: int, vocab: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).to(device)
    token_ids = torch.randint(vocab, (rows,), generator=generator).to(device)
    differences: dict[str, dict[str, list[float]]] = {}
    for name, score in track(IMPLEMENTATIONS.items(), description="scoring"):
        whole = score(logits, token_ids).double()
        differences[name] = {
            layout: (present(score, logits, token_ids).double() - whole).tolist()
            for layout, present in LAYOUTS.items()
        }
    name = platform.processor() or "CPU"
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else name,
        "torch": torch.__version__,
        "rows": rows,
        "vocab": vocab,
        "differences": differences,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    names = list(result["differences"])
    figure, axes = plt.subplots(1, len(names), figsize=(11, 3.2), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        drifting = []
        for color, (layout, values) in enumerate(result["differences"][name].items()):
            changed = sum(value != 0 for value in values)
            drifting.append(changed)
            millionths = [value * 1e6 for value in values]
            label = f"{layout}: {changed}"
            axis.plot(millionths, ".", markersize=2.5, color=f"C{color}", label=label)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("row")
        legend = axis.legend(title="rows that changed", fontsize=7, loc="upper right")
        legend.get_title().set_fontsize(7)
    axes[0].set_ylabel("change, millionths of a nat")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, high + 0.55 * (high - low))
    figure.suptitle(
        f"The same {result['rows']} rows (V = {result['vocab']}, float32) in other layouts, "
        f"{result['device']}, torch {result['torch']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws who keeps the bits over batch layouts.")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--from", dest="source", type=Path, help="draw an earlier measurement")
    parser.add_argument("--output", type=Path, help="write the measurement as JSON")
    parser.add_argument("--picture", type=Path, help="write the picture, .png or .svg")
    options = parser.parse_args()
    if options.source:
        result = json.loads(options.source.read_text())
    else:
        result = measure(options.rows, options.vocab, options.device)
    if options.output:
        options.output.write_text(json.dumps(result) + "\n")
    if options.picture:
        draw(result, options.picture)
    for name, layouts in result["differences"].items():
        changed = {layout: sum(v != 0 for v in values) for layout, values in layouts.items()}
        print(name, changed)


if __name__ == "__main__":
    main()
