"""Runs an implementation through the properties that a reinforcement-learning run needs.

A job is one property at one size and type, and gives findings. Nothing here writes or prints.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from detlogp.evidence import accuracy
from detlogp.evidence.layouts import LAYOUTS, PROPERTIES, Index, Parts
from detlogp.evidence.matrix import audited_routes, judge_implementation
from detlogp.evidence.peers import Implementation, Peer, one_line
from detlogp.testing import assert_same_bits, bits

ACCURACY = ("accuracy", "offset", "near-certain", "masked")
NAMES = (*PROPERTIES, "inputs", *ACCURACY, "bad ids", "routes")
"""Every property, in the order of the table."""


class Job(NamedTuple):
    """One property, on `rows` rows of `vocab` N(0, 3) logits of a dtype."""

    property: str
    dtype: str
    vocab: int
    rows: int
    gradient_rows: int
    device: str
    seed: int
    item: int = 0  # which of the bad ids


class Finding(NamedTuple):
    """What a job found about the value, the gradient or a route. Differences in the value are in
    nats; in the gradient they are absolute, and relative to what is allowed for accuracy."""

    implementation: str
    version: str
    device: str
    dtype: str
    vocab: int
    property: str
    quantity: str
    outcome: str  # "held", "broken", "refused" (it raised) or "crashed" (the process died)
    rows: int = 0
    drifting: int = 0
    largest_ulp: float = 0.0
    largest: float = 0.0
    largest_ratio: float = 1.0
    k3_kl: float = 0.0
    detail: str = ""
    reproduce: str = ""
    layout: str = ""


def jobs(
    properties: tuple[str, ...],
    dtypes: tuple[str, ...],
    vocabs: tuple[int, ...],
    rows: int,
    device: str,
    seed: int,
) -> Iterator[Job]:
    """Bad ids come last, because they may end the process."""
    gradient_rows = min(rows, 256 if device.startswith("cuda") else 16)
    for dtype in dtypes:
        for vocab in vocabs:
            size = (dtype, vocab, rows, gradient_rows, device, seed)
            for name in properties:
                if name not in ("bad ids", "routes"):
                    yield Job(name, *size)
    small = ("float32", min(vocabs), min(rows, 8), min(rows, 8), device, seed)
    if "routes" in properties:
        yield Job("routes", *small)
    if "bad ids" in properties:
        for item in range(len(accuracy.BAD_IDS)):
            yield Job("bad ids", *small, item)


def run(job: Job, peer: Peer, implementation: Implementation) -> Iterator[Finding]:
    base = Finding(
        *(peer.name, peer.version(), job.device, job.dtype, job.vocab, job.property, "value", ""),
        reproduce=reproduction(job, peer),
    )
    if job.property == "routes":
        for route in audited_routes():
            outcome, detail = judge_implementation(implementation, route, job.device)
            yield base._replace(quantity=route, outcome=outcome, detail=detail)
        return
    for quantity in ("value", "gradient") if peer.has_gradient else ("value",):
        finding = base._replace(quantity=quantity)
        try:
            yield from _CHECKS.get(job.property, _check_accuracy)(job, implementation, finding)
        except Exception as error:
            # Other people's code raises whatever it likes; that it raised is the finding.
            yield finding._replace(outcome="refused", detail=one_line(error))


def reproduction(job: Job, peer: Peer) -> str:
    """The command that runs this job again, and prints the first row that offends."""
    size = f"--device {job.device} --dtype {job.dtype} --vocab {job.vocab} --rows {job.rows}"
    name = f"'{job.property}'" if " " in job.property else job.property
    return f"detlogp audit {peer.name} --property {name} {size} --seed {job.seed}"


def make_batch(job: Job, quantity: str) -> Parts:
    """logits, token_ids and the cotangent of each row."""
    rows = job.rows if quantity == "value" else job.gradient_rows
    dtype = getattr(torch, job.dtype)
    logits, token_ids = accuracy.random_rows(rows, job.vocab, dtype, job.device, job.seed)
    generator = torch.Generator(job.device).manual_seed(job.seed + 1)
    return logits, token_ids, torch.randn(rows, device=job.device, generator=generator)


def answer(implementation: Implementation, parts: Parts, quantity: str) -> Tensor:
    """The value [n] or the gradient [n, V]. The logits are put back if they were written to."""
    logits, token_ids, cotangent = parts
    before = logits.clone()
    try:
        if quantity == "value":
            with torch.no_grad():
                return implementation(logits, token_ids).detach().clone()
        leaf = logits.detach().requires_grad_()
        value = implementation(leaf, token_ids)
        (gradient,) = torch.autograd.grad(value, leaf, cotangent.to(value.dtype))
        return gradient.clone()
    finally:
        logits.copy_(before)


def _check_layouts(job: Job, implementation: Implementation, base: Finding) -> Iterator[Finding]:
    """One finding a layout."""
    parts = make_batch(job, base.quantity)
    expected = answer(implementation, parts, base.quantity)
    if not bool(expected.isfinite().all()):
        # The logits are finite. Bits that are NaN would all be equal.
        count = int((~expected.isfinite()).view(len(expected), -1).any(-1).sum())
        detail = f"{count} of {len(expected)} rows are not finite"
        yield base._replace(outcome="broken", rows=len(expected), drifting=count, detail=detail)
        return
    generator = torch.Generator().manual_seed(job.seed)
    for name in PROPERTIES[job.property]:
        finding = base._replace(layout=name)
        try:
            for call in LAYOUTS[name](parts, generator):
                found = answer(implementation, call.parts, finding.quantity)[call.take]
                finding = _count(finding, _rows_text(call.rows), found, expected[call.rows])
            yield _with_meaning(finding)
        except Exception as error:
            yield base._replace(layout=name, outcome="refused", detail=one_line(error))


def _rows_text(rows: Index) -> str:
    if isinstance(rows, slice) and rows.start is not None:
        return f"rows from {rows.start}"
    return "all rows"


def _count(finding: Finding, place: str, found: Tensor, expected: Tensor) -> Finding:
    """The finding with one more call in it; k3_kl is a sum until `_with_meaning`."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        kinds = [f"{part.dtype} {tuple(part.shape)}" for part in (found, expected)]
        raise TypeError(f"{kinds[0]} came where {kinds[1]} came before")
    differs = bits(found) != bits(expected)
    by_row = differs if differs.dim() == 1 else differs.any(-1)
    rows, drifting = finding.rows + len(by_row), finding.drifting + int(by_row.sum())
    finding = finding._replace(rows=rows, drifting=drifting)
    if not bool(differs.any()):
        return finding
    one, other = found[differs].double(), expected[differs].double()
    gap = (other - one).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)
    ulp = _ulp(finding, found, other)
    finite = gap.isfinite()
    k3 = float((gap[finite].expm1() - gap[finite]).sum()) if bool(finite.all()) else math.inf
    return finding._replace(
        largest=max(finding.largest, float(gap.abs().max())),
        largest_ulp=max(finding.largest_ulp, float((gap.abs() / ulp).max())),
        k3_kl=finding.k3_kl + k3,
        detail=finding.detail or f"{place}: {_first_difference(found, expected)}",
    )


def _ulp(finding: Finding, found: Tensor, other: Tensor) -> Tensor:
    """Of a value at max(1, |value|), since training feels its absolute error; of an element of a
    gradient at that element."""
    info = torch.finfo(found.dtype)
    smallest = 1.0 if finding.quantity == "value" else info.smallest_normal
    return info.eps * other.abs().clamp_min(smallest).log2().floor().exp2()


def _first_difference(found: Tensor, expected: Tensor) -> str:
    try:
        assert_same_bits(found, expected)
    except AssertionError as error:
        return str(error)
    return "equal"


def _with_meaning(finding: Finding) -> Finding:
    """What the drift of a value means for training: pi_new / pi_old where nothing was trained, and
    the estimate k3 = ratio - 1 - log(ratio) of the KL divergence, its mean over the rows."""
    outcome = "broken" if finding.drifting else "held"
    if finding.quantity == "gradient":
        return finding._replace(outcome=outcome, k3_kl=0.0)
    ratio = math.exp(finding.largest) if finding.largest < 700.0 else math.inf
    mean = finding.k3_kl / max(finding.rows, 1)
    return finding._replace(outcome=outcome, largest_ratio=ratio, k3_kl=mean)


def _check_accuracy(
    job: Job, implementation: Implementation, finding: Finding
) -> Iterator[Finding]:
    logits, token_ids, cotangent = make_batch(job, "gradient")
    case = accuracy.CASES["random" if job.property == "accuracy" else job.property]
    logits, token_ids = case(logits, token_ids)
    found = answer(implementation, (logits, token_ids, cotangent), finding.quantity)
    if finding.quantity == "value":
        error, allowed = accuracy.value_error(found, logits, token_ids)
    else:
        error, allowed = accuracy.gradient_error(found, logits, token_ids, cotangent)
    beyond = error > allowed
    worst = int((error / allowed).argmax())
    detail = f"row {worst}: error {float(error[worst]):.2e}, allowed {float(allowed[worst]):.2e}"
    yield finding._replace(
        outcome="broken" if bool(beyond.any()) else "held",
        rows=len(error),
        drifting=int(beyond.sum()),
        largest=float(error.max()),
        detail=detail,
    )


def _check_inputs(job: Job, implementation: Implementation, finding: Finding) -> Iterator[Finding]:
    """The logits have the same bits after the call, and after its backward."""
    logits, token_ids, cotangent = make_batch(job, "gradient")
    before = logits.clone()
    leaf = logits.detach().requires_grad_(finding.quantity == "gradient")
    value = implementation(leaf, token_ids)
    if finding.quantity == "gradient":
        torch.autograd.grad(value, leaf, cotangent.to(value.dtype))
    yield _with_meaning(_count(finding, "the logits after the call", logits, before))


def _check_bad_id(job: Job, implementation: Implementation, finding: Finding) -> Iterator[Finding]:
    """Value 0 (or NaN) and gradient 0 in the row of the bad id, and nothing new in the others; or
    an error."""
    parts = make_batch(job, finding.quantity)
    bad_id = accuracy.BAD_IDS[job.item]
    bad_id += job.vocab if 0 <= bad_id <= 5 else 0
    ids = parts[1].clone()
    ids[1] = bad_id
    expected = answer(implementation, parts, finding.quantity)
    found = answer(implementation, (parts[0], ids, parts[2]), finding.quantity)
    if found.is_cuda:
        torch.cuda.synchronize()
    others = torch.arange(len(ids), device=ids.device) != 1
    kept = torch.equal(bits(found[others]), bits(expected[others]))
    of_row = found[1]
    silent = not bool(((of_row == 0) | of_row.isnan()).all())
    detail = f"id {bad_id}"
    if silent:
        detail += f": a silent {float(of_row.double().abs().max()):.6g}, not 0"
    if not kept:
        detail += ": other rows changed"
    yield finding._replace(outcome="held" if kept and not silent else "broken", detail=detail)


_CHECKS = {
    **dict.fromkeys(PROPERTIES, _check_layouts),
    "inputs": _check_inputs,
    "bad ids": _check_bad_id,
}
