"""The series that `surefoot calibrate` judges: a CSV, a Parquet file, or the metrics of a run folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.core.errors import DataError
from surefoot.monitor.calibrate import Series

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "step": ("iteration", "iter", "global_step"),
    "loss": ("train_loss", "lm_loss"),
    "grad_norm": ("gradient_norm", "norm", "grad-norm"),
}
"""What is looked for, and what else it may be called. Capitals and spaces do not matter; `grad_norm` may be missing."""

Where = Callable[[int], str]


def read_series(path: Path) -> Series:
    """Raises DataError that names the line, or the row, of what is not a series."""
    if path.is_dir():
        return _of_run(path)
    if not path.exists():
        raise DataError("there is no such file or run", where=str(path), hint="a CSV, a Parquet file, or a run folder")
    if path.suffix.lower() in (".parquet", ".pq"):
        return _of_parquet(path)
    return _of_csv(path)


def _of_csv(path: Path) -> Series:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=str(path), hint="UTF-8, a header line, then a line per step") from error
    if not rows:
        raise DataError("is empty", where=str(path), hint="a header line with step and loss, then a line per step")
    line, header = rows[0]
    names = [_plain(cell) for cell in header]
    places = {name: _place(names, name, where=f"{path}:{line}") for name in COLUMNS}
    for number, row in rows[1:]:
        if len(row) != len(names):
            raise DataError(f"{len(row)} cells under {len(names)} columns", where=f"{path}:{number}", hint="one cell per column")
    lines = [number for number, _ in rows[1:]]
    cells = {name: [row[place].strip() for _, row in rows[1:]] for name, place in places.items() if place is not None}
    return series_of(cells, where=lambda row: f"{path}:{lines[row]}", source=str(path))


def _of_parquet(path: Path) -> Series:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot be read as Parquet: {error}", where=str(path)) from error
    places = {name: _place([_plain(column) for column in table.column_names], name, where=str(path)) for name in COLUMNS}
    cells = {name: table.column(place).to_pylist() for name, place in places.items() if place is not None}
    return series_of(cells, where=lambda row: f"{path}, row {row + 1}", source=str(path))


def _of_run(path: Path) -> Series:
    """Of each step the row of its newest attempt: what a roll-back threw out is no part of the run."""
    from surefoot.observe.metrics import read_steps

    if not (path / "metrics").is_dir():
        raise DataError("holds no metrics", where=str(path), hint="the folder of a run that has finished a step, or a CSV")
    table = read_steps(path, columns=tuple(COLUMNS))
    newest: dict[int, tuple[Any, ...]] = {}
    for row in zip(*(table.column(name).to_pylist() for name in COLUMNS), strict=True):  # sorted by generation and attempt
        newest[row[0]] = row
    steps = sorted(newest)
    cells = {name: [newest[step][place] for step in steps] for place, name in enumerate(COLUMNS)}
    return series_of(cells, where=lambda row: f"{path}, step {steps[row]}", source=str(path))


def series_of(cells: Mapping[str, Sequence[Any]], *, where: Where, source: str) -> Series:
    """The series of columns of text or numbers. A loss may be nan, a norm may be empty, a step must be a whole number above the last."""
    if not cells["step"]:
        raise DataError("a header and no steps", where=source, hint="a line per step")
    steps: list[int] = []
    for row, cell in enumerate(cells["step"]):
        value = _number(cell)
        if not value.is_integer():
            raise DataError(f"step is {_shown(cell)}", where=where(row), hint="a whole number")
        if steps and value <= steps[-1]:
            what = f"step {int(value)} twice" if value == steps[-1] else f"step {int(value)} after step {steps[-1]}"
            raise DataError(what, where=where(row), hint="steps ascend; of those that a restart repeats, keep the last")
        steps.append(int(value))
    losses = [_figure(cell, name="loss", where=where, row=row) for row, cell in enumerate(cells["loss"])]
    norms = [math.nan] * len(steps)
    if "grad_norm" in cells:
        norms = [_norm(cell, where=where, row=row) for row, cell in enumerate(cells["grad_norm"])]
    return Series(tuple(steps), tuple(losses), tuple(norms))


def _place(names: Sequence[str], wanted: str, *, where: str) -> int | None:
    found = [place for place, name in enumerate(names) if name in (wanted, *COLUMNS[wanted])]
    if not found and wanted != "grad_norm":
        raise DataError(f"no column {wanted!r}", where=where, hint=f"has {', '.join(names)}; step and loss are needed, grad_norm helps")
    if len(found) > 1:
        raise DataError(f"two columns for {wanted!r}", where=where, hint="rename one of them")
    return found[0] if found else None


def _figure(cell: Any, *, name: str, where: Where, row: int) -> float:
    """nan and inf are figures: a detector is there for them."""
    value = _number(cell)
    if math.isnan(value) and not _says_nan(cell):
        what = f"{name} is empty" if cell in (None, "") else f"{name} is {_shown(cell)}"
        raise DataError(what, where=where(row), hint="a number in nats; nan and inf may stand for what they are")
    return value


def _norm(cell: Any, *, where: Where, row: int) -> float:
    """Empty is not measured; nan was measured, and is as bad as inf."""
    if cell in (None, ""):
        return math.nan
    value = _figure(cell, name="grad_norm", where=where, row=row)
    if value < 0.0:
        raise DataError(f"grad_norm is {_shown(cell)}", where=where(row), hint="a norm is 0 at least")
    return math.inf if math.isnan(value) else value


def _number(cell: Any) -> float:
    try:
        return float(cell) if "_" not in str(cell) else math.nan
    except (TypeError, ValueError):
        return math.nan


def _says_nan(cell: Any) -> bool:
    return isinstance(cell, float) or str(cell).strip().lower().lstrip("+-") == "nan"


def _shown(cell: Any) -> str:
    return repr(cell) if isinstance(cell, str) else str(cell)


def _plain(name: str) -> str:
    return "_".join(name.strip().lower().split())
