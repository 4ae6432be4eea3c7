"""What an audit leaves behind: report.html (self-contained), findings.csv, audit.png, audit.svg."""

import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from detlogp.evidence import audit, page, summary
from detlogp.evidence.audit import Finding

_COLOURS = {
    **{"held": "#7fbf7b", "refused": "#f1d78b", "broken": "#d6604d"},
    **{"crashed": "#762a83", "not loaded": "#cccccc", "": "#f4f4f4"},
}


def write(
    folder: Path, findings: Sequence[Finding], machine: dict[str, str], absent: Sequence[str]
) -> None:
    """Into `folder`, which is made where it is missing; files of an earlier audit are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "findings.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Finding._fields)
        writer.writerows(findings)
    figure = draw(findings, machine)
    figure.savefig(folder / "audit.png", dpi=130)
    figure.savefig(folder / "audit.svg", metadata={"Date": None})
    plt.close(figure)
    html = render(findings, machine, absent, (folder / "audit.svg").read_text())
    (folder / "report.html").write_text(html)


def draw(findings: Sequence[Finding], machine: dict[str, str]) -> Figure:
    """Left: every property of every implementation. Right: the largest drift of a value."""
    names = list(dict.fromkeys(finding.implementation for finding in findings))
    ran = {finding.property for finding in findings}
    properties = [name for name in audit.NAMES if name in ran]
    figure, (grid, drift) = plt.subplots(
        *(1, 2),
        figsize=(5 + 0.62 * len(properties), 2.2 + 0.36 * len(names)),
        width_ratios=[len(properties), 5],
        layout="constrained",
    )
    for y, implementation in enumerate(names):
        for x, name in enumerate(properties):
            cell = summary.cell(summary.select(findings, implementation, name))
            colour = _COLOURS[cell.outcome]
            grid.add_patch(Rectangle((x, y), 0.96, 0.94, color=colour))
            grid.text(x + 0.48, y + 0.47, cell.text, ha="center", va="center", fontsize=8)
    grid.set(xlim=(0, len(properties)), ylim=(len(names), 0))
    grid.set_xticks([x + 0.5 for x in range(len(properties))], properties, rotation=40, ha="left")
    grid.set_yticks([y + 0.5 for y in range(len(names))], names)
    grid.xaxis.tick_top()
    grid.tick_params(length=0)
    grid.spines[:].set_visible(False)
    smallest = 1e-8
    for y, name in enumerate(names):
        size = summary.meaning(findings, name).largest
        if size > smallest:
            drift.barh(y + 0.5, size - smallest, left=smallest, color=_COLOURS["broken"])
        else:
            drift.text(smallest * 1.2, y + 0.5, "exactly 0", va="center", fontsize=8)
    drift.set(xscale="log", xlim=(smallest, 1.0), ylim=(len(names), 0), yticks=[])
    drift.set_xlabel("largest drift of logp, nats", fontsize=8)
    place = machine.get("gpu", "CPU")
    figure.suptitle(f"detlogp audit: {place}, torch {machine['torch']}, {machine['date']}")
    return figure


def render(
    findings: Sequence[Finding], machine: dict[str, str], absent: Sequence[str], svg: str
) -> str:
    names = list(dict.fromkeys(finding.implementation for finding in findings))
    versions = {finding.implementation: finding.version for finding in reversed(findings)}
    return page.render(
        "audit.html",
        machine=machine,
        absent=absent,
        svg=svg[svg.index("<svg") :],
        versions={name: versions[name] for name in names},
        meanings={name: summary.meaning(findings, name) for name in names},
        offenders=summary.first_offenders(findings),
        findings=[finding for finding in findings if finding.outcome != "held"],
        held=sum(finding.outcome == "held" for finding in findings),
    )
