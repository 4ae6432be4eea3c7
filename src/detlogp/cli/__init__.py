"""The command line, `detlogp COMMAND ...`: one file per command.

Exit codes: 0, done; 1, what was checked does not hold; 2, a bad argument.
"""

import argparse
import sys
from collections.abc import Sequence

from detlogp import __version__
from detlogp.cli import audit, bench, info, probe, score, validate
from detlogp.cli._command import CommandError

__all__ = ["main"]

COMMANDS = (
    info.COMMAND,
    score.COMMAND,
    audit.COMMAND,
    probe.COMMAND,
    validate.COMMAND,
    bench.COMMAND,
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="detlogp", description="Bitwise reproducible log-probabilities of tokens."
    )
    parser.add_argument("--version", action="version", version=f"detlogp {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. A malformed command line raises SystemExit(2)."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except CommandError as error:
        print(f"detlogp {args.command}: error: {error}", file=sys.stderr)
        return 2
    return code
