"""What the commands share: their entry in the table, and errors without a traceback."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Command(NamedTuple):
    """One subcommand."""

    name: str
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class CommandError(Exception):
    """An argument that does not fit: main prints the message and returns 2."""


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Imports a module of an optional extra; says what to install when it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CommandError(
            f"{purpose} needs {package}, which could not be imported ({error}); "
            f"install it with: pip install detlogp[{extra}]"
        ) from error


def import_report(module: str, purpose: str) -> Any:
    """A module of detlogp.evidence that draws, which takes the extra `evidence`."""
    import_extra("matplotlib", "evidence", purpose)
    return importlib.import_module(f"detlogp.evidence.{module}")


def choose_device(name: str | None) -> str:
    """The device that --device names, or CUDA where there is one; CommandError for any other."""
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = chosen.partition(":")
    there = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise CommandError(f"--device must be cpu, cuda or cuda:N, got {chosen!r}")
    if int(index or 0) >= there:
        raise CommandError(f"--device {chosen}: there are {there} of that kind")
    return chosen
