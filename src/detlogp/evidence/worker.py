"""Audits in a process of its own, because other people's kernels may end it.

The parent starts `python -m detlogp.evidence.worker`, writes one JSON object to its standard input,
and reads a line of JSON once the implementation is loaded, and one for every job: what it found.
When the process dies in a job, that is recorded as crashed, and another process takes the next.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch

from detlogp.evidence.audit import Finding, Job, reproduction, run
from detlogp.evidence.peers import Peer, find


class Stop:
    """Ends the children of every thread: Ctrl-C would otherwise only start the next ones."""

    def __init__(self) -> None:
        self.children: set[subprocess.Popen[str]] = set()
        self.asked = False

    def __call__(self) -> None:
        self.asked = True
        for child in list(self.children):
            child.kill()


def run_isolated(peer: Peer, jobs: Sequence[Job], stop: Stop) -> Iterator[list[Finding]]:
    """The findings of each job, in order."""
    first = 0
    while first < len(jobs) and not stop.asked:
        loaded = False
        with tempfile.TemporaryFile("w+") as errors:
            for message in _child(peer.name, jobs[first:], errors, stop):
                if "failed" in message:
                    yield [_crash(peer, jobs[first], "not loaded", message["failed"])]
                    return
                if "findings" in message:
                    yield [Finding(*finding) for finding in message["findings"]]
                    first += 1
                loaded = True
            if first < len(jobs) and not stop.asked:
                outcome = "crashed" if loaded else "not loaded"
                yield [_crash(peer, jobs[first], outcome, _last_line(errors))]
                first = first + 1 if loaded else len(jobs)


def _crash(peer: Peer, job: Job, outcome: str, detail: str) -> Finding:
    size = (job.device, job.dtype, job.vocab, job.property)
    return Finding(
        *(peer.name, "unknown", *size, "value", outcome),
        detail=detail,
        reproduce=reproduction(job, peer),
    )


def _last_line(file: IO[str]) -> str:
    file.seek(0)
    lines = [line.strip() for line in file if line.strip()]
    return f"the process died: {lines[-1][:200]}" if lines else "the process died"


def _child(name: str, jobs: Sequence[Job], errors: IO[str], stop: Stop) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "detlogp.evidence.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        stop.children.add(process)
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            json.dump({"name": name, "jobs": jobs}, process.stdin)
            process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)
        stop.children.discard(process)


def main() -> None:
    # What a peer prints goes to standard error, so that the messages stay alone.
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    sys.path.insert(0, os.getcwd())
    warnings.simplefilter("ignore")
    peer = find(request["name"])
    try:
        implementation = peer.load()
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]}), file=messages)
        return
    print(json.dumps({"loaded": True}), file=messages)
    for item in request["jobs"]:
        findings = list(run(Job(*item), peer, implementation))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises when a kernel has poisoned the device
        print(json.dumps({"findings": findings}), file=messages)


if __name__ == "__main__":
    main()
