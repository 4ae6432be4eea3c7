"""The error of logp where a token is almost certain, by contract: the picture of docs/exact.md."""

import argparse
import json
from pathlib import Path

import matplotlib
import torch

import detlogp
from detlogp import reference

matplotlib.use("agg")
from matplotlib import pyplot as plt

VOCAB = 32000
ROWS = 4096
# What the quanta alone may cost (docs/exact.md).
FLOOR = 0.712 * VOCAB * 2.0**-43
COLOURS = {"locked": "#D55E00", "exact": "#0072B2"}


def near_certain_rows(seed: int) -> torch.Tensor:
    """[ROWS, VOCAB] of N(0, 3), one logit a row so large that logp is between -1e-6 and -1e-3."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    wanted = 10.0 ** (-6 + 3 * torch.rand(ROWS, generator=generator, dtype=torch.float64))
    # logp = -log(1 + rest / exp(x)) = -wanted, rest the sum of the others.
    rest = logits[:, 1:].double().logsumexp(-1)
    logits[:, 0] = (rest - wanted.expm1().log()).float()
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/near-certain"))
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    logits = near_certain_rows(0)
    ids = torch.zeros(ROWS, dtype=torch.int64)
    exact = reference.logp(logits, ids).logp
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    medians = {}
    for contract, colour in COLOURS.items():
        error = (detlogp.logp(logits, ids, contract=contract).double() - exact).abs()
        medians[contract] = error.median().item()
        label = f"{contract}: median {medians[contract]:.1e}"
        axes.scatter(-exact, error, s=3, color=colour, label=label, linewidths=0)
    axes.axhline(FLOOR, color="black", linestyle="--", linewidth=1)
    axes.annotate("0.712 V 2^-43", (1.1e-6, FLOOR * 1.4))
    axes.set(xscale="log", yscale="log", xlabel="-logp, nats", ylabel="error of logp, nats")
    axes.legend(loc="lower right", markerscale=4)
    figure.savefig(output / "near-certain.png", dpi=150)
    record = {"rows": ROWS, "vocab": VOCAB, "median_error": medians}
    (output / "near-certain.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"median error: {medians}, ratio {medians['locked'] / medians['exact']:.0f}")


if __name__ == "__main__":
    main()
