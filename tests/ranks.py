"""Processes of torch.distributed that run functions of the tests, each on its own part."""

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

from detlogp import _agreement

WORLDS = (1, 2, 3, 4, 8)
TIMEOUT_S = 120.0
GRACE_S = 30.0


class Ranks:
    """Processes that share one torch.distributed, and groups of the first 1, 2, 3, ... of them."""

    def __init__(self, count: int, backend: str) -> None:
        self.count, self.backend = count, backend
        self.worlds = [world for world in WORLDS if world <= count]
        self._start()

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(group, *args) in each of `world` processes; what they return, in rank order.

        Raises AssertionError with the traceback of one that raises, or where they hang.
        """
        pipes = self._pipes[:world]
        for pipe in pipes:
            pipe.send((world, function, args))
        answers: dict[int, Any] = {}
        wait_s = TIMEOUT_S
        while len(answers) < world:
            ready = wait([p for rank, p in enumerate(pipes) if rank not in answers], wait_s)
            if not ready:
                break
            for rank, pipe in enumerate(pipes):
                if pipe not in ready:
                    continue
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = ("the process has died", None)
                answers[rank] = answer
                # The others may wait for the one that has left.
                wait_s = TIMEOUT_S if answer[0] is None else GRACE_S
        errors = {rank: error for rank, (error, _) in answers.items() if error is not None}
        if errors or len(answers) < world:
            self.close()
            self._start()
            missing = sorted(set(range(world)) - set(answers))
            errors.setdefault(-1, f"processes {missing} hang in {function.__name__}")
        for rank, error in sorted(errors.items(), reverse=True):
            raise AssertionError(f"process {rank} of {world}: {error}")
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            args = (rank, self.count, self.backend, store, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)


def _serve(rank: int, count: int, backend: str, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no NVLink multicast
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=count)
    worlds = [world for world in WORLDS if world <= count]
    groups = {world: dist.new_group(range(world)) for world in worlds}
    while True:
        world, function, args = pipe.recv()
        _agreement._agreed.clear()  # every check is the first call of its group
        try:
            pipe.send((None, function(groups[world], *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
