"""Audits in a process of its own, because other people's kernels may end it.

The parent starts `python -m detlogp.evidence.worker`, writes one JSON object to its standard input,
and reads a line of JSON for every job: what it found. When the process dies in a job, the job is
recorded as crashed, and another process takes the next.
"""

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


def run_isolated(peer: Peer, jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Finding]]]:
    """Each job with its findings, in order."""
    first = 0
    while first < len(jobs):
        with tempfile.TemporaryFile("w+") as errors:
            for message in _child(peer.name, jobs[first:], errors):
                job = jobs[first]
                findings = [Finding(*finding) for finding in message.get("findings", ())]
                if "failed" in message:
                    yield job, [_crash(peer, job, "not loaded", message["failed"])]
                    return
                yield job, findings
                first += 1
            if first < len(jobs):
                job = jobs[first]
                yield job, [_crash(peer, job, "crashed", _last_line(errors))]
                first += 1


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


def _child(name: str, jobs: Sequence[Job], errors: IO[str]) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "detlogp.evidence.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        json.dump({"name": name, "jobs": jobs}, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            yield json.loads(line)


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
    for item in request["jobs"]:
        findings = list(run(Job(*item), peer, implementation))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises when a kernel has poisoned the device
        print(json.dumps({"findings": findings}), file=messages)


if __name__ == "__main__":
    main()
