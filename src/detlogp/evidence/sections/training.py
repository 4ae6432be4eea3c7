"""Ordinary training: SGD against float64 and itself, and a strictly deterministic GRPO run."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import detlogp
from detlogp import reference
from detlogp.evidence.sections._check import DTYPES, Check, Options, Result, dtype_text, same_bits

ROWS, WIDTH, VOCAB, STEPS = 24, 16, 300, 3
RATE = 16.0  # so that an update is large beside the rounding of a half type's weight


def checks(options: Options) -> Iterator[Check]:
    for dtype in DTYPES:
        text = dtype_text(dtype)
        yield Check("a Linear's update", text, partial(_update, dtype, options.device))
        yield Check("three SGD steps, twice", text, partial(_twice, dtype, options.device))
    yield Check("GRPO, three steps, twice", "float32", partial(_grpo, options))


def _problem(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, D], a Linear's weight [V, D] and ids [N], float64; multiples of 1/64."""
    random = torch.Generator().manual_seed(0)
    hidden = (64 * torch.randn(ROWS, WIDTH, generator=random)).round().double() / 64
    weight = (16 * torch.randn(VOCAB, WIDTH, generator=random)).round().double() / 64
    ids = torch.randint(VOCAB, (ROWS,), generator=random)
    return hidden.to(device), weight.to(device), ids.to(device)


def _train(dtype: torch.dtype, device: str, steps: int) -> Tensor:
    hidden, weight, ids = _problem(device)
    parameter = weight.to(dtype).requires_grad_()
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = hidden.to(dtype) @ parameter.t()
        (-detlogp.logp(logits, ids).mean()).backward()
        optimizer.step()
    return parameter.detach()


def _update(dtype: torch.dtype, device: str) -> Result:
    """weight - rate * (p - onehot)^T hidden / N, from the formula in float64 at the same logits."""
    hidden, weight, ids = _problem(device)
    logits = (hidden.to(dtype) @ weight.to(dtype).t()).double()
    cotangent = torch.full((ROWS,), -1.0 / ROWS, dtype=torch.float64, device=device)
    gradient = reference.gradient(logits, ids, cotangent, torch.zeros_like(cotangent))
    update = RATE * gradient.t() @ hidden
    expected = weight - update
    # The rounding of the new weight, and of what the Linear's backward multiplies and adds.
    eps = torch.finfo(dtype).eps
    sizes = gradient.abs().t() @ hidden.abs()
    allowed = eps * (expected.abs() + 4 * RATE * sizes)
    error = (_train(dtype, device, 1).double() - expected).abs()
    worst = int((error / allowed).argmax())
    numbers = (float(error.flatten()[worst]), float(allowed.flatten()[worst]))
    share = float(allowed.max() / update.abs().max())
    reason = f"against the formula in float64; {share:.1%} of the largest update is allowed"
    return Result("pass" if bool((error <= allowed).all()) else "fail", reason, *numbers)


def _twice(dtype: torch.dtype, device: str) -> Result:
    first, second = (_train(dtype, device, STEPS) for _ in range(2))
    _, weight, _ = _problem(device)
    if torch.equal(first, weight.to(dtype)):
        return Result("fail", "the parameters did not change")
    return same_bits(first, second, "the parameters of two runs")


def _grpo(options: Options) -> Result:
    script = options.examples and options.examples / "grpo.py"
    if script is None or not script.is_file():
        return Result("skip", "no examples folder with grpo.py: give --examples")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "grpo.json"
        command = [sys.executable, str(script), "--steps", "3", "--device", options.device]
        done = subprocess.run(
            [*command, "--output", str(output)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0 or not output.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            return Result("fail", f"exit code {done.returncode}: {' '.join(last)[:200]}")
        record = json.loads(output.read_text())
    sources = {step["train_logp_source"] for step in record["steps"]}
    if record["repeated"] is not True or len(record["steps"]) < 3:
        return Result("fail", f"repeated: {record['repeated']}, {len(record['steps'])} steps")
    if not all("detlogp::" in source for source in sources):
        return Result("fail", f"train log-probabilities by {sources}")
    return Result("pass", f"every number equal in two runs; train logp by {', '.join(sources)}")
