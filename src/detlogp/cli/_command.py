"""What the commands share: their entry in the table, and errors without a traceback."""

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


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
