"""Logits of a text under a local Hugging Face causal model, window by window."""

import argparse
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from detlogp.cli._command import CommandError, import_extra
from detlogp.cli._sources import DEFAULT_WINDOW, DTYPES, Source, Window, device_of, require_file


class Span(NamedTuple):
    """One forward pass: it reads tokens [start, stop); its rows from `first_new` on are scored.

    Row i predicts token i + 1, so a span scores the tokens first_new + 1 up to stop.
    """

    start: int
    first_new: int
    stop: int


def window_spans(row_count: int, length: int) -> list[Span]:
    """Windows of `length` tokens that advance by half their length; each row is new in one."""
    stride = max(1, length // 2)
    spans = [Span(0, 0, min(length, row_count))]
    while spans[-1].stop < row_count:
        last = spans[-1]
        start = last.start + stride
        spans.append(Span(start, last.stop, min(start + length, row_count)))
    return spans


def open_model(args: argparse.Namespace) -> Source:
    """--model and --text. Nothing is downloaded, and no code of the folder is run."""
    folder: Path = args.model
    if args.text is None:
        raise CommandError("--text must name the file to score when --model is given, got nothing")
    require_file("--text", args.text)
    if not (folder / "config.json").is_file():
        raise CommandError(
            f"--model must be the folder of a saved model, with its config.json, got {folder}"
        )
    device = device_of(args.device)
    text = _read_text(args.text)
    tokenizer, model = _load(folder, DTYPES.get(args.dtype, "auto"))
    # The warning about texts longer than the model's context is no concern: windows are scored.
    token_ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    length = _window_length(args.window, model)
    _check_tokens(args.text, token_ids, model)
    spans = window_spans(len(token_ids) - 1, length)
    tokens = torch.tensor(token_ids, device=device)
    windows = _windows(model.to(device), tokens, spans)
    decode = cache(lambda token_id: str(tokenizer.decode([token_id])))
    return Source(windows, len(spans), 1, decode)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"--text must be UTF-8, got {path} ({error})") from error


def _load(folder: Path, dtype: torch.dtype | str) -> tuple[Any, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = import_extra("transformers", "hf", "--model")
    transformers.utils.logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **local)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CommandError(
            f"--model must be a causal language model and its tokenizer, got {folder} ({error})"
        ) from error
    return tokenizer, model.eval()


def _window_length(asked: int | None, model: Any) -> int:
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return min(DEFAULT_WINDOW, limit or DEFAULT_WINDOW)
    if limit is not None and asked > limit:
        raise CommandError(f"--window must be at most the model's {limit} positions, got {asked}")
    return asked


def _check_tokens(path: Path, token_ids: list[int], model: Any) -> None:
    if len(token_ids) < 2:
        raise CommandError(
            f"--text must have at least 2 tokens (the first has no prediction), "
            f"got {len(token_ids)} in {path}"
        )
    vocab = model.get_input_embeddings().num_embeddings
    if max(token_ids) >= vocab:
        raise CommandError(
            f"--model must have a tokenizer that fits its vocabulary of {vocab}, "
            f"got token id {max(token_ids)}"
        )


def _windows(model: Any, tokens: Tensor, spans: list[Span]) -> Iterator[Window]:
    for start, first_new, stop in spans:
        with torch.inference_mode():
            logits = model(input_ids=tokens[None, start:stop], use_cache=False).logits[0]
        yield Window(logits[first_new - start :], tokens[first_new + 1 : stop + 1])
