"""Draws drift.png and drift.svg from the drift.json that policy_drift.py left in FOLDER.

python examples/policy_drift_picture.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

OWN = "detlogp"
# Okabe and Ito's colours, which colour-blind readers can tell apart; the lines differ too.
STYLES: dict[str, dict[str, Any]] = {
    "torch, bfloat16": {"color": "#E69F00", "marker": "s", "linestyle": "--"},
    "torch, float32": {"color": "#D55E00", "marker": "^", "linestyle": "-"},
    OWN: {"color": "#0072B2", "marker": "o", "linestyle": "-"},
}


def draw_ratios(axis: Axes, result: dict[str, Any]) -> None:
    before = result["before"]
    counts = {
        row["implementation"]: row
        for row in before["comparisons"]
        if row["against"] == before["worst_layout"]
    }
    largest = 1e-6
    for name, pairs in before["drawn"].items():
        style = {**STYLES[name], "linestyle": ""}
        places, distances = [place for place, _ in pairs], [distance for _, distance in pairs]
        label = f"{name}: {counts[name]['changed']} of {counts[name]['tokens']}"
        axis.plot(places, distances, label=label, markersize=2.5, **style)
        largest = max([largest, *map(abs, distances)])
    # Ratios of exactly 1 lie on this line.
    axis.axhline(0, color=STYLES[OWN]["color"], linewidth=2)
    axis.set_yscale("symlog", linthresh=1e-7)
    drawn = result["sizes"]["drawn"]
    axis.set(xlim=(0, drawn), ylim=(-10 * largest, 1e3 * largest))
    axis.set(xlabel=f"token, of the first {drawn}", ylabel="policy ratio - 1")
    axis.set_title(f"Nothing trained, {before['worst_layout']}", fontsize=10)
    axis.legend(title="ratios that are not 1", fontsize=7.5, title_fontsize=7.5, loc="upper right")


def draw_clipped(axis: Axes, result: dict[str, Any]) -> None:
    before = result["before"]
    ticks = {1e-5: "0", 1e-4: "0.01%", 1e-3: "0.1%", 1e-2: "1%", 1e-1: "10%", 1: "100%"}
    floor = min(ticks)
    # detlogp first and wide, so that a line upon it is seen.
    for name in (OWN, "torch, float32", "torch, bfloat16"):
        for row in before["comparisons"]:
            is_layout = row["against"] == before["worst_layout"]
            is_rounding = row["kind"] == "float64" and name == "torch, bfloat16"
            if row["implementation"] != name or not (is_layout or is_rounding):
                continue
            style = {**STYLES[name], "marker": "", **({} if is_layout else {"linestyle": ":"})}
            shares = [max(share, floor) for share in row["outside"]]
            label = name if is_layout else "its rounding"
            width = 4 if name == OWN else 1.8
            axis.plot(result["epsilons"], shares, label=label, linewidth=width, **style)
    for clip_range in map(float, before["comparisons"][0]["clipped"]):
        axis.axvline(clip_range, color="0.5", linewidth=0.8)
        axis.text(clip_range, 1.3, f"{clip_range} ", ha="right", va="bottom", fontsize=7.5)
    axis.set(xscale="log", yscale="log", xlim=(1e-8, 1), ylim=(floor / 1.6, 3))
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.minorticks_off()
    axis.set(xlabel="clip range ε", ylabel="tokens with |ratio - 1| > ε")
    axis.set_title("Nothing trained: what would be clipped", fontsize=10)
    axis.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(0.28, 0.5))


def draw_training(axis: Axes, training: dict[str, list[dict[str, Any]]]) -> None:
    # Each smaller than the one beneath it, so that equal points are all seen.
    for (name, rows), size in zip(training.items(), (7.0, 5.0, 3.5), strict=True):
        steps, gaps = [row["step"] for row in rows], [row["difference_max"] for row in rows]
        axis.plot(steps, gaps, label=name, markersize=size, **STYLES[name])
    axis.set_yscale("symlog", linthresh=1e-7)
    axis.set(xlabel="optimizer steps", ylim=(-3e-8, 3), ylabel="largest difference of logp, nats")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title("Two runs that differ in layout alone", fontsize=10)
    axis.legend(fontsize=7.5, loc="upper left", ncols=2)


def draw(result: dict[str, Any], folder: Path) -> None:
    facts = result["machine"]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.9), layout="constrained")
    draw_ratios(axes[0], result)
    draw_clipped(axes[1], result)
    draw_training(axes[2], result["training"])
    for axis in axes:
        axis.grid(alpha=0.3)
    place = facts.get("gpu") or f"CPU, {facts['threads']} threads"
    figure.suptitle(
        f"The same bfloat16 logits, scored in two layouts: {place}, torch {facts['torch']}, "
        f"commit {facts['commit']}, {facts['date']}",
        fontsize=10,
    )
    figure.savefig(folder / "drift.png", dpi=140)
    figure.savefig(folder / "drift.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    here = Path(sys.argv[1])
    draw(json.loads((here / "drift.json").read_text()), here)
