"""Where logits come from: a saved file here, a model in `_model.py`; both in windows of rows."""

import argparse
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from detlogp.cli._command import CommandError, import_extra

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DEFAULT_WINDOW = 256
LOGITS_SUFFIXES = (".safetensors", ".npz")


class Window(NamedTuple):
    """Rows to score, which follow those of the window before."""

    logits: Tensor  # [n, V]
    token_ids: Tensor  # [n], int64


@dataclass(frozen=True)
class Source:
    """Logits of a text, window by window."""

    windows: Iterator[Window]
    window_count: int
    first_position: int  # of the first row's token in the text; 0 for saved logits
    decode: Callable[[int], str] | None  # token id -> text, where there is a tokenizer


def device_of(name: str | None) -> torch.device:
    """--device, or CUDA when it is there."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"--device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise CommandError(
            f"--device must be there, got {name!r}, but torch {torch.__version__} sees "
            f"{count} CUDA devices"
        )
    return device


def require_file(option: str, path: Path) -> None:
    if not path.is_file():
        came = "a folder" if path.is_dir() else "no such file"
        raise CommandError(f"{option} must be a file, got {path} ({came})")


def open_logits(args: argparse.Namespace) -> Source:
    """--logits: tensors `logits` [..., V] and `token_ids` [...] of a safetensors or npz file."""
    path: Path = args.logits
    require_file("--logits", path)
    if path.suffix not in LOGITS_SUFFIXES:
        expected = " or ".join(LOGITS_SUFFIXES)
        raise CommandError(f"--logits must end in {expected}, got {path.name}")
    device = device_of(args.device)
    read = _read_npz if path.suffix == ".npz" else _read_safetensors
    logits, token_ids = read(path)
    _check_saved(path, logits, token_ids)
    rows = logits.reshape(-1, logits.shape[-1])
    ids = token_ids.reshape(-1).to(torch.int64)
    dtype = DTYPES.get(args.dtype, logits.dtype)
    size = args.window or DEFAULT_WINDOW
    windows = (
        Window(rows[start : start + size].to(device, dtype), ids[start : start + size].to(device))
        for start in range(0, len(rows), size)
    )
    return Source(windows, -(-len(rows) // size), 0, None)


def _check_names(path: Path, names: list[str]) -> None:
    for expected in ("logits", "token_ids"):
        if expected not in names:
            came = ", ".join(sorted(names)) or "none"
            raise CommandError(
                f"--logits must hold tensors named logits and token_ids, got {came} in {path}"
            )


def _read_safetensors(path: Path) -> tuple[Tensor, Tensor]:
    """The tensors stay in the mapped file, so pages are read as their rows are scored."""
    safetensors = import_extra("safetensors", "hf", f"--logits {path.name}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            _check_names(path, list(file.keys()))
            return file.get_tensor("logits"), file.get_tensor("token_ids")
    except safetensors.SafetensorError as error:
        raise CommandError(f"--logits must be a safetensors file, got {path} ({error})") from error


def _read_npz(path: Path) -> tuple[Tensor, Tensor]:
    try:
        # numpy leaves a file that it opened itself open when the archive is broken.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            _check_names(path, list(file))
            return torch.from_numpy(file["logits"]), torch.from_numpy(file["token_ids"])
    except (ValueError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CommandError(
            "--logits must be an npz file of numbers, as numpy.savez writes it, "
            f"got {path} (broken, or something else)"
        ) from error


def _check_saved(path: Path, logits: Tensor, token_ids: Tensor) -> None:
    if logits.dtype not in DTYPES.values():
        expected = ", ".join(DTYPES)
        raise CommandError(f"logits in {path} must be one of {expected}, got {logits.dtype}")
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise CommandError(f"token_ids in {path} must be integers, got {token_ids.dtype}")
    if logits.dim() == 0 or logits.numel() == 0:
        raise CommandError(
            f"logits in {path} must be [..., V] with at least one row and one column, "
            f"got shape {tuple(logits.shape)}"
        )
    if token_ids.shape != logits.shape[:-1]:
        raise CommandError(
            f"token_ids in {path} must have logits' leading shape, {tuple(logits.shape[:-1])}, "
            f"got {tuple(token_ids.shape)}"
        )
