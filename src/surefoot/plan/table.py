"""Tables of finished runs, as CSV: `n`, `tokens` or `flops`, `loss`, and what else a law asks for. Further columns may be there."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import DataError

Floats = NDArray[np.float64]

FLOPS_PER_TOKEN_AND_PARAMETER = 6.0
"""C = 6 N D, where a table has only two of the three."""


def read_columns(path: Path, *, needed: Sequence[str]) -> dict[str, Floats]:
    """The columns `needed`, all finite and above 0, of equal length. Of `n`, `tokens` and `flops` the third follows from two.

    Raises DataError that names the file, the line and the column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=str(path), hint="a header line, then one run per line") from error
    if not rows:
        raise DataError("no rows", where=str(path), hint="a header line, then one run per line")
    known = {name.strip().lower(): name for name in rows[0] if name}
    columns = {name: _numbers(path, rows, known[name]) for name in ("n", "tokens", "flops", *needed) if name in known}
    _derive(columns)
    missing = [name for name in needed if name not in columns]
    if missing:
        raise DataError(
            f"no column {' nor '.join(repr(name) for name in missing)}",
            where=f"{path}:1",
            hint=f"has {', '.join(known)}; of n, tokens and flops two are enough",
        )
    return {name: columns[name] for name in needed}


def _derive(columns: dict[str, Floats]) -> None:
    if "tokens" not in columns and {"n", "flops"} <= columns.keys():
        columns["tokens"] = columns["flops"] / (FLOPS_PER_TOKEN_AND_PARAMETER * columns["n"])
    if "flops" not in columns and {"n", "tokens"} <= columns.keys():
        columns["flops"] = FLOPS_PER_TOKEN_AND_PARAMETER * columns["n"] * columns["tokens"]
    if "n" not in columns and {"tokens", "flops"} <= columns.keys():
        columns["n"] = columns["flops"] / (FLOPS_PER_TOKEN_AND_PARAMETER * columns["tokens"])


def _numbers(path: Path, rows: Sequence[dict[str, str | None]], name: str) -> Floats:
    values = np.empty(len(rows))
    for index, row in enumerate(rows):
        text = row.get(name)
        try:
            values[index] = float(text) if text is not None else math.nan
        except ValueError:
            values[index] = math.nan
        if not (math.isfinite(values[index]) and values[index] > 0):
            hint = "numbers above 0 only: leave out runs that did not finish"
            raise DataError(f"{name} is {text!r}", where=f"{path}:{index + 2}", hint=hint)
    return values
