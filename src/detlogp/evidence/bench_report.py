"""What a benchmark leaves behind: bench.csv, and the roofline bench.png."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from detlogp.evidence.timing import Row

_FACTS = ("date", "commit", "build_id", "detlogp", "torch", "python", "gpu", "driver", "threads")


Draw = Callable[[Sequence[Row], dict[str, str], float], Figure]


def write(
    folder: Path,
    rows: Sequence[Row],
    machine: dict[str, str],
    copied_gb_s: float,
    draw: Draw,
) -> None:
    """Into `folder`, which is made where it is missing. Every row carries the machine's facts."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = [machine.get(name, "") for name in _FACTS]
    with (folder / "bench.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Row._fields, "copy_gb_s", *_FACTS))
        writer.writerows((*row, round(copied_gb_s, 3), *facts) for row in rows)
    figure = draw(rows, machine, copied_gb_s)
    figure.savefig(folder / "bench.png", dpi=130)
    plt.close(figure)


def draw(rows: Sequence[Row], machine: dict[str, str], copied_gb_s: float) -> Figure:
    """Left: the roofline. Right: the time of each as a multiple of the limit, one bar a case."""
    timed = [row for row in rows if row.method in ("graph", "clock") and row.median_ms]
    names = list(dict.fromkeys(row.variant for row in timed))
    colours = {name: plt.get_cmap("tab20")(i % 20) for i, name in enumerate(names)}
    groups = list(dict.fromkeys((row.benchmark, row.case) for row in timed))
    figure, (roof, bars) = plt.subplots(
        *(1, 2),
        figsize=(15, 2.5 + 0.13 * len(timed) + 0.25 * len(groups)),
        width_ratios=[2, 3],
        layout="constrained",
    )
    intensities = [row.operations_per_byte for row in timed]
    edge = [min(intensities) / 1.5, max(intensities) * 1.5]
    roof.plot(edge, [x * copied_gb_s for x in edge], "k-", label="copy bandwidth of this run")
    for name in names:
        mine = [row for row in timed if row.variant == name]
        x = [row.operations_per_byte for row in mine]
        y = [row.operations_per_byte * row.gb_s for row in mine]
        roof.scatter(x, y, color=colours[name], label=name, s=28)
    roof.set(xscale="log", yscale="log", xlabel="operations / byte", ylabel="Gop/s")
    roof.legend(fontsize=7)
    position = 0.0
    ticks = []
    for benchmark, case in groups:
        mine = [row for row in timed if (row.benchmark, row.case) == (benchmark, case)]
        ticks.append((position + (len(mine) - 1) / 2, f"{benchmark}\n{case}"))
        for row in mine:
            times = 1 / row.share_of_copy
            bars.barh(position, times, color=colours[row.variant])
            bars.text(
                times, position, f" {row.variant} {row.median_ms:.3g} ms", va="center", size=6
            )
            position += 1
        position += 1
    bars.axvline(1.0, color="k")
    bars.set(xscale="log", xlabel="time / (fewest bytes at copy bandwidth)", ylim=(position, -1))
    bars.set_yticks([y for y, _ in ticks], [text for _, text in ticks], fontsize=7)
    bars.set_xlim(right=max(1 / row.share_of_copy for row in timed) * 3)
    figure.suptitle(_title(machine, copied_gb_s))
    return figure


def draw_scaling(rows: Sequence[Row], machine: dict[str, str], copied_gb_s: float) -> Figure:
    """Left against N, right against V: the times, and the limits as thin lines."""
    timed = [row for row in rows if row.method in ("graph", "clock") and row.median_ms]
    figure, both = plt.subplots(1, 2, figsize=(13, 6), layout="constrained", sharey=True)
    sizes = [tuple(map(int, row.case.split()[:3:2])) for row in timed]
    fixed = [max({size[k] for size in sizes}, key=[s[k] for s in sizes].count) for k in (1, 0)]
    for axis, along, name, other in zip(both, (0, 1), "NV", "VN", strict=True):
        chosen = [
            (size[along], row)
            for size, row in zip(sizes, timed, strict=True)
            if size[1 - along] == fixed[along]
        ]
        for line in dict.fromkeys((row.benchmark, row.case.split()[-1]) for _, row in chosen):
            mine = sorted(
                ((x, r) for x, r in chosen if (r.benchmark, r.case.split()[-1]) == line),
                key=lambda point: point[0],
            )
            x = [size for size, _ in mine]
            (drawn,) = axis.plot(
                x, [r.median_ms for _, r in mine], "o-", ms=3, label=", ".join(line)
            )
            limits = [r.median_ms * r.share_of_copy for _, r in mine]
            axis.plot(x, limits, color=drawn.get_color(), lw=0.6)
        axis.set(xscale="log", yscale="log", xlabel=f"{name} at {other} = {fixed[along]}")
        axis.grid(alpha=0.3)
    both[0].set_ylabel("ms")
    both[0].legend(fontsize=8)
    figure.suptitle(f"{_title(machine, copied_gb_s)}\nthin: the fewest bytes at that bandwidth")
    return figure


def _title(machine: dict[str, str], copied_gb_s: float) -> str:
    place = machine.get("gpu") or f"CPU, {machine['threads']} threads"
    return (
        f"detlogp bench: {place}, copy {copied_gb_s / 1000:.2f} TB/s, torch {machine['torch']}, "
        f"commit {machine['commit']}, {machine['date']}"
    )
