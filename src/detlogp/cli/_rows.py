"""Writes one row a token, as JSON Lines or Parquet."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from detlogp.cli._command import CommandError, import_extra
from detlogp.cli._scores import Scores

OUTPUT_SUFFIXES = (".jsonl", ".parquet")


def check_output(path: Path) -> None:
    """Before any work is done: the suffix, the folder, and what writing the format needs."""
    if path.suffix not in OUTPUT_SUFFIXES:
        expected = " or ".join(OUTPUT_SUFFIXES)
        raise CommandError(f"--output must end in {expected}, got {path.name}")
    if not path.parent.is_dir() or path.is_dir():
        raise CommandError(f"--output must be a file in a folder that exists, got {path}")
    if path.suffix == ".parquet":
        import_extra("pyarrow.parquet", "parquet", f"--output {path.name}")


def write_rows(scores: Scores, path: Path) -> None:
    """One row a token, as JSON Lines or Parquet by the suffix."""
    try:
        if path.suffix == ".parquet":
            _write_parquet(scores, path)
        else:
            with path.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in json_lines(scores))
    except OSError as error:
        raise CommandError(
            f"--output must be a file that can be written, got {path} ({error})"
        ) from error


def json_lines(scores: Scores) -> Iterator[str]:
    """logp and lse as doubles of the same value, null where not finite; logp_bits has every bit."""
    digits = 2 * scores.logp.itemsize
    bits = scores.logp.view(f"u{scores.logp.itemsize}")
    for row in range(len(scores.logp)):
        fields: dict[str, Any] = {
            "position": int(scores.positions[row]),
            "token_id": int(scores.token_ids[row]),
        }
        if scores.tokens is not None:
            fields["token"] = scores.tokens[row]
        fields["logp"] = _finite_or_none(float(scores.logp[row]))
        fields["logp_bits"] = f"{int(bits[row]):0{digits}x}"
        fields["lse"] = _finite_or_none(float(scores.lse[row]))
        yield json.dumps(fields, ensure_ascii=False, allow_nan=False)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_parquet(scores: Scores, path: Path) -> None:
    pyarrow = import_extra("pyarrow", "parquet", f"--output {path.name}")
    parquet = import_extra("pyarrow.parquet", "parquet", f"--output {path.name}")
    columns: dict[str, Any] = {"position": scores.positions, "token_id": scores.token_ids}
    if scores.tokens is not None:
        columns["token"] = scores.tokens
    columns |= {"logp": scores.logp, "lse": scores.lse}
    parquet.write_table(pyarrow.table(columns), path)
