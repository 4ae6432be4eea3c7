"""`detlogp score`: scores a text or saved logits, then checks the bits over batch layouts."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from detlogp.cli import _layouts, _summary
from detlogp.cli._command import Command, CommandError
from detlogp.cli._model import open_model
from detlogp.cli._rows import check_output, write_rows
from detlogp.cli._scores import score_source
from detlogp.cli._sources import DEFAULT_WINDOW, DTYPES, Source, open_logits

DESCRIPTION = """\
Scores each token of a text under a local Hugging Face causal model, or saved
logits, prints a summary, and writes one row a token. Then scores the same
logits (at most 256 rows) in several batch layouts and says whether the
log-probabilities have the same bits, beside torch's own log_softmax (and
gather) and logsumexp (subtracted from the token's logit). Half types are
widened to float32 for torch's two, as detlogp does by itself.

How a text is cut: the model reads windows of --window tokens that advance by
half a window. Each token is scored once, in the first window that predicts it,
so every token has at least half a window of context, or all the text before
it. The first token has no prediction and no row. A later window begins in the
middle of the text, at position 0 of the model and without the special token
that the tokenizer may put before a text.

Saved logits: tensors `logits` [..., V] and `token_ids` [...]; each row scores
its own id. A row whose id is outside [0, V), such as -100, is left out of the
mean; it is written with logp 0. An npz file is read at once, a safetensors
file as its rows are scored.

Rows: position, token_id, token (with a model), logp and lse, in nats. In JSON
Lines, logp reads back to the same number, logp_bits has its bits in
hexadecimal, and null stands for a number that is not finite.

Nothing is downloaded. Exit code: 0; 1 when detlogp's own bits differ in a
layout; 2 on an error.
"""


def _count(minimum: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, at least {minimum}, got {text!r}"
            )
        return int(text)

    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a Hugging Face causal model"
    )
    source.add_argument(
        "--logits", type=Path, metavar="FILE", help="saved logits and ids, .safetensors or .npz"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="the text to score, UTF-8, with --model"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write a row a token, .jsonl or .parquet"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if available)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the model's weights, or of the saved logits (default: as saved); float64 logits "
        "are scored in double",
    )
    parser.add_argument(
        "--window",
        type=_count(1),
        metavar="N",
        help="tokens a forward pass, or rows of saved logits at a time (default: "
        f"{DEFAULT_WINDOW}, or the model's positions if fewer)",
    )
    parser.add_argument(
        "--least",
        type=_count(0),
        default=10,
        metavar="K",
        help="how many of the least likely tokens to print (default: 10)",
    )


def _open(args: argparse.Namespace) -> Source:
    if args.model is not None:
        return open_model(args)
    if args.text is not None:
        raise CommandError(f"--text goes with --model alone, got --logits and {args.text}")
    return open_logits(args)


def run(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_output(args.output)
    scores = score_source(_open(args))
    console = Console(highlight=False)
    _summary.print_summary(console, scores)
    _summary.print_least_likely(console, scores, args.least)
    if args.output is not None:
        write_rows(scores, args.output)
        console.print(f"\n{len(scores.logp)} rows written to {args.output}", soft_wrap=True)
    if len(scores.kept_ids) == 0:
        console.print("No row has an id within the vocabulary, so there is no layout to check.")
        return 0
    comparisons = _layouts.compare_layouts(scores.kept_logits, scores.kept_ids)
    _summary.print_layouts(console, comparisons)
    equal, sentence = _summary.verdict(comparisons)
    console.print(sentence, style="green" if equal else "bold red", soft_wrap=True)
    return 0 if equal else 1


COMMAND = Command(
    "score",
    "score a text or saved logits, and check the bits over batch layouts",
    DESCRIPTION,
    add_arguments,
    run,
)
