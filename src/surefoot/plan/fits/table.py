"""Tables of finished runs, as CSV: which column is which, and every cell a number or an error that names its line. Pure but for the read.

A table has parameters, tokens or FLOPs, and a loss; of the first three, two are enough. It may count parameters in more than one way, and
may have any number of further columns, which are not looked at.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import ConfigError, DataError

Floats = NDArray[np.float64]

FLOPS_PER_TOKEN_AND_PARAMETER = 6.0
"""C = 6 N D, where a table has only two of the three."""

COUNTS: Mapping[str, str] = {
    "n_active": "parameters that one token passes through",
    "n": "parameters as the table counts them",
    "n_total": "all parameters, experts that a token does not meet included",
    "n_with_embedding": "all parameters, embedding and head included",
    "n_without_embedding": "parameters without embedding and head",
    "n_without_head": "parameters without the head",
}
"""Ways to count N, the one that is fitted first where a table has several. Laws of mixtures of experts are in active parameters."""

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "n": ("params", "parameters", "num_parameters", "num_params", "model_size", "n_opt"),
    "tokens": ("d", "num_tokens", "training_tokens", "tokens_opt"),
    "flops": ("c", "flop", "num_flops", "compute", "training_flop", "training_flops"),
    "loss": ("final_loss", "val_loss", "loss_opt"),
    "log_n_std": ("n_log_std",),
    "lr": ("learning_rate",),
    "batch": ("batch_tokens", "batch_size", "global_batch_size"),
}
"""What else a column may be called. Capitals and spaces do not matter."""

MOST_ERRORS = 5
"""Bad cells that one message names."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they were written, by column, and the line that each row stands on. Names are lower case, with underscores for spaces."""

    path: Path
    columns: Mapping[str, tuple[str, ...]]
    lines: tuple[int, ...]

    def name_of(self, wanted: str) -> str | None:
        """The column that holds `wanted`, by its own or another name."""
        return next((name for name in (wanted, *OTHER_NAMES.get(wanted, ())) if name in self.columns), None)


@dataclass(frozen=True, slots=True)
class Runs:
    """Columns of equal length. `count` is the column of N, `other_counts` those that it might be, `derived` what C = 6 N D gave."""

    n: Floats
    tokens: Floats
    flops: Floats
    loss: Floats
    lines: tuple[int, ...]
    count: str
    other_counts: tuple[str, ...]
    derived: tuple[str, ...]

    def take(self, rows: NDArray[np.intp]) -> Runs:
        columns = {name: getattr(self, name)[rows] for name in ("n", "tokens", "flops", "loss")}
        return replace(self, **columns, lines=tuple(self.lines[row] for row in rows))


def read_table(path: Path) -> Table:
    """Raises DataError that names the line of what is not a table."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=str(path), hint="UTF-8, a header line, then one run per line") from error
    if not rows:
        raise DataError("is empty", where=str(path), hint="a header line, then one run per line")
    header = _header(path, *rows[0])
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise DataError(f"{len(row)} cells under {len(header)} columns", where=f"{path}:{line}", hint="quote cells that hold commas")
    if len(rows) == 1:
        raise DataError("a header and no runs", where=f"{path}:{rows[0][0]}", hint="one finished run per line")
    columns = {name: tuple(row[index].strip() for _, row in rows[1:]) for index, name in enumerate(header)}
    return Table(path, columns, tuple(line for line, _ in rows[1:]))


def read_runs(table: Table, *, count: str = "") -> Runs:
    """The runs of `table` with N from the column `count`, or from the first of `COUNTS` that is there."""
    counts = [name for name in COUNTS if table.name_of(name)]
    chosen = next((name for name in counts if table.name_of(name) == _plain(count)), _plain(count)) or (counts[0] if counts else "n")
    if count and table.name_of(chosen) is None:
        raise ConfigError(f"no column {count!r} in {table.path}", where="--count", hint=f"there are {', '.join(table.columns)}")
    first = counts[0] if counts else chosen
    known = {name: numbers(table, name) for name in ("tokens", "flops", "loss") if table.name_of(name)}
    of_compute = numbers(table, first) if table.name_of(first) else None
    derived = _derive(known, of_compute)
    _refuse_missing(table, known if of_compute is None else {**known, "n": of_compute})
    n = known["n"] if of_compute is None else of_compute if chosen == first else numbers(table, chosen)
    others = tuple(name for name in counts if name != chosen)
    return Runs(n, known["tokens"], known["flops"], known["loss"], table.lines, chosen, others, derived)


def numbers(table: Table, wanted: str) -> Floats:
    """A column, all of it finite and above 0."""
    name = table.name_of(wanted)
    if name is None:
        raise _missing(table, [wanted])
    values, bad = np.empty(len(table.lines)), []
    for index, (line, text) in enumerate(zip(table.lines, table.columns[name], strict=True)):
        values[index] = _number(text)
        if not (math.isfinite(values[index]) and values[index] > 0):
            bad.append(_bad_cell(table.path, line, name=name, text=text))
    if bad:
        first, others = bad[0], bad[1:MOST_ERRORS]
        raise DataError(first.what, where=first.where, hint=first.hint, others=others, count=len(bad))
    if wanted in ("n", "tokens", "flops", *COUNTS) and float(values.max()) < 1.0:
        raise DataError(f"no {name} reaches 1", where=f"{table.path}:{table.lines[0]}", hint="in units: not in billions, nor as logarithms")
    return values


def _bad_cell(path: Path, line: int, *, name: str, text: str) -> DataError:
    if not text:
        return DataError(f"{name} is empty", where=f"{path}:{line}", hint="leave out runs that did not finish")
    hint = "decimal points, and nothing between thousands" if "," in text else "finite numbers above 0: leave out runs that did not finish"
    return DataError(f"{name} is {text!r}", where=f"{path}:{line}", hint=hint)


def _header(path: Path, line: int, cells: Sequence[str]) -> list[str]:
    names = [_plain(cell) for cell in cells]
    if len(names) == 1:
        for separator, called in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if separator in cells[0]:
                raise DataError(f"separated by {called}", where=f"{path}:{line}", hint="CSV has commas between columns, and decimal points")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise DataError(f"two columns {twice[0]!r}", where=f"{path}:{line}", hint="rename one of them")
    if any(_number(name) == _number(name) for name in names if name):
        raise DataError("the first line has numbers in it", where=f"{path}:{line}", hint="begin with the names of the columns")
    return [name or f"column {index + 1}" for index, name in enumerate(names)]


def _derive(known: dict[str, Floats], n: Floats | None) -> tuple[str, ...]:
    """The third of N, D and C from the other two."""
    if n is None and {"tokens", "flops"} <= known.keys():
        known["n"] = known["flops"] / (FLOPS_PER_TOKEN_AND_PARAMETER * known["tokens"])
        return ("n",)
    if n is not None and "tokens" not in known and "flops" in known:
        known["tokens"] = known["flops"] / (FLOPS_PER_TOKEN_AND_PARAMETER * n)
        return ("tokens",)
    if n is not None and "flops" not in known and "tokens" in known:
        known["flops"] = FLOPS_PER_TOKEN_AND_PARAMETER * n * known["tokens"]
        return ("flops",)
    return ()


def _refuse_missing(table: Table, known: Mapping[str, Floats]) -> None:
    missing = [name for name in ("loss", "n", "tokens", "flops") if name not in known]
    if missing:
        raise _missing(table, missing)


def _missing(table: Table, names: Sequence[str]) -> DataError:
    named = " nor ".join(repr(name) for name in names)
    hint = f"has {', '.join(table.columns)}; of n, tokens and flops two are enough"
    return DataError(f"no column {named}", where=f"{table.path}:1", hint=hint)


def _number(text: str) -> float:
    try:
        return float(text) if "_" not in text else math.nan
    except ValueError:
        return math.nan


def _plain(name: str) -> str:
    return "_".join(name.strip().lower().split())
