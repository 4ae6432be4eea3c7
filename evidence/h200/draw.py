"""Draws errors.png and coverage.png from the cases.csv of a validation: python draw.py [FOLDER].

Needs matplotlib alone: `detlogp validate` leaves a copy of this file, as draw.py, with the figures.
"""

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.ticker import MaxNLocator

Rows = list[dict[str, str]]
DTYPES = ("float64", "float32", "float16", "bfloat16")
_COLOURS = {"untested": "#d9d9d9", "skip": "#fdf3c7", "pass": "#7fbf7b", "fail": "#d6604d"}


def read_derivatives(folder: Path) -> Rows:
    with (folder / "cases.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["method"]]


def draw_errors(rows: Rows, path: Path) -> None:
    """The largest error by precision, order and method; tolerances dashed, exact zeros named."""
    figure, axes = plt.subplots(2, 2, figsize=(13, 9), sharex=True, layout="constrained")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axis, dtype in zip(axes.flat, DTYPES, strict=True):
        measured = [
            row
            for row in rows
            if row["dtype"] == dtype and row["error"] and row["outcome"] != "skip"
        ]
        for number, method in enumerate(methods):
            _draw_method(axis, [row for row in measured if row["method"] == method], number, method)
        axis.set(yscale="log", title=dtype, xlabel="order", ylabel="largest absolute error")
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not measured:
            axis.text(0.5, 0.5, "not run", ha="center", transform=axis.transAxes)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle("Largest error against float64; dashed: the tolerance that goes with it")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_method(axis: Axes, rows: Rows, number: int, label: str) -> None:
    colour = plt.get_cmap("tab10")(number)
    worst: dict[int, tuple[float, float]] = {}
    for row in rows:
        order = int(row["order"])
        error, tolerance = float(row["error"]), float(row["tolerance"])
        if error != error:
            axis.annotate("NaN", (order, 0.9), xycoords=("data", "axes fraction"), color="red")
            continue
        before = worst.get(order, (0.0, 0.0))
        worst[order] = (max(before[0], error), max(before[1], tolerance))
    orders = sorted(worst)
    shown = [order for order in orders if worst[order][0] > 0]
    axis.plot(shown, [worst[o][0] for o in shown], "o-", color=colour, label=label, markersize=4)
    axis.plot(orders, [worst[o][1] for o in orders], "--", color=colour, linewidth=0.8)
    for order in orders:
        if worst[order][0] == 0:
            place = (order, 0.02 + 0.035 * number)
            axis.annotate("0", place, xycoords=("data", "axes fraction"), color=colour, size=9)


def draw_coverage(rows: Rows, path: Path) -> None:
    """Methods against orders and precisions: passed, failed, skipped; grey where nothing ran."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    orders = sorted({int(row["order"]) for row in rows})
    columns = [(order, dtype) for order in orders for dtype in DTYPES]
    names = list(_COLOURS)
    figure, axis = plt.subplots(
        figsize=(3 + 0.36 * len(columns), 2 + 0.45 * len(methods)), layout="constrained"
    )
    grid = []
    for y, method in enumerate(methods):
        line = []
        for x, (order, dtype) in enumerate(columns):
            key = (method, str(order), dtype)
            cell = [row for row in rows if (row["method"], row["order"], row["dtype"]) == key]
            outcomes = {row["outcome"] for row in cell} or {"untested"}
            line.append(max(names.index(outcome) for outcome in outcomes))
            if cell:
                good = sum(row["outcome"] == "pass" for row in cell)
                text = str(good) if good == len(cell) else f"{good}/{len(cell)}"
                axis.text(x, y, text, ha="center", va="center", fontsize=6)
        grid.append(line)
    colours = ListedColormap(list(_COLOURS.values()))
    axis.imshow(grid, cmap=colours, vmin=0, vmax=len(names) - 1, aspect="auto")
    labels = [f"{order}  {dtype}" for order, dtype in columns]
    axis.set_xticks(range(len(columns)), labels, rotation=90, fontsize=7)
    axis.set_yticks(range(len(methods)), methods)
    axis.set_title("Cases that passed; yellow: skipped, grey: untested", loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(folder: Path) -> None:
    rows = read_derivatives(folder)
    if rows:
        draw_errors(rows, folder / "errors.png")
        draw_coverage(rows, folder / "coverage.png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
