"""What the answers of all laws have in common: the question, which N and which columns, predictions with their distance, warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.plan.bands import band
from surefoot.plan.fits.table import COUNTS, Runs, Table

FAR = 1e4
"""Times the largest budget. Four decades out an exponent that is off by 0.02 moves N* by 20%, and few tables know it better."""

WIDE_BAND = 4.0
"""High over low of N*: a size that is not known to a factor of 2 either way decides nothing."""

USUAL_FLOPS = (0.8, 1.25)
"""Of the FLOPs of a table over 6 N D: attention, a head that is not counted, and recomputation make up such differences."""

FEW: Mapping[str, float] = {"n": 1e4, "tokens": 1e6}
"""What the largest value of a table exceeds, however small its models: below, it is in millions or billions."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a table. `at` are budgets in FLOPs; `num_draws` is of surfaces, whose draws are fits of their own."""

    count: str = ""
    at: tuple[float, ...] = ()
    drop_highest: int = 0
    num_draws: int = 200
    seed: int = 0


def origin(table: Table, runs: Runs) -> dict[str, Any]:
    """Which N, which columns, and what C = 6 N D filled in."""
    wanted = (runs.count, *(name for name in ("n", "tokens", "flops", "loss") if name != runs.count))
    return {
        "num_rows": len(runs.n),
        "count": runs.count,
        "count_is": COUNTS.get(runs.count, f"the column {runs.count}") if runs.count not in runs.derived else "C / 6 D",
        "columns": {name: table.name_of(name) for name in wanted if table.name_of(name)},
        "derived": list(runs.derived),
    }


def prediction(flops: float, *, largest: float, values: Mapping[str, float], draws: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What a law says of one budget, and how far beyond the runs that is."""
    bands = {name: list(band(drawn)) for name, drawn in draws.items() if len(drawn)}
    return {"flops": flops, "times_largest": flops / largest, **values, "bands": bands}


def prediction_warnings(predictions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of budgets that are too far out, and of sizes that are hardly known."""
    said = []
    for one in predictions:
        if one["times_largest"] > FAR:
            said.append(
                f"{one['flops']:.3g} FLOPs is {one['times_largest']:.3g} times the largest budget: beyond 4 decades this is a guess"
            )
        low, high = one["bands"].get("n", (1.0, 1.0))
        if high > WIDE_BAND * low:
            said.append(f"N* at {one['flops']:.3g} FLOPs is known to a factor of {high / low:.2g} only")
    return said


def count_warnings(runs: Runs) -> list[str]:
    """Of a table that counts its N or its FLOPs in a way that misleads."""
    said = []
    for name, values in (("n", runs.n), ("tokens", runs.tokens)):
        if float(values.max()) < FEW[name]:
            told = runs.count if name == "n" else name
            said.append(f"{told} is from {values.min():.4g} to {values.max():.4g}: counts are expected, not millions or billions")
    ratio = float(np.median(runs.flops / (6.0 * runs.n * runs.tokens)))
    if not USUAL_FLOPS[0] <= ratio <= USUAL_FLOPS[1]:
        said.append(f"flops are {ratio:.3g} times 6 N D with N = {runs.count}: predictions take C = 6 N D")
    if runs.count == "n_without_embedding":
        said.append("N leaves out the head, whose FLOPs are real: that alone moved the exponent of N* from .71 to .84 (arXiv 2406.19146)")
    return said


def unfinished(table: Table) -> list[str]:
    """A run that was cut short has a loss that its schedule had not yet brought down."""
    cells = table.columns.get("finished", ())
    lines = [str(line) for line, cell in zip(table.lines, cells, strict=False) if cell.lower() in ("0", "false", "no")]
    if not lines:
        return []
    return [f"{len(lines)} runs are not finished (line {', '.join(lines[:5])}): cut short, their losses are above those of finished ones"]
