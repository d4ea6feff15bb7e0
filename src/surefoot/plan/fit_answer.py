"""What `surefoot fit` answers, as one object: the law with its bands, what it rests on, what it says, and what is wrong with it.

Everything that the page shows is read off this object, and so is a saved fit (`plan.fitted`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surefoot.core.errors import ConfigError
from surefoot.plan.bands import band
from surefoot.plan.table import COUNTS, Runs, Table

LAWS = ("parametric", "isoflop", "lr", "batch")

FAR = 1e4
"""Times the largest budget. Four decades out an exponent that is printed with two digits moves N* by 20%: no table supports that."""

WIDE_BAND = 4.0
"""High over low of N*: a size that is not known to a factor of 2 either way decides nothing."""

USUAL_FLOPS = (0.8, 1.25)
"""Of the FLOPs of a table over 6 N D: attention, a head that is not counted, and recomputation make up such differences."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a table. `at` are budgets in FLOPs; `num_draws` is of surfaces, whose draws are fits of their own."""

    count: str = ""
    at: tuple[float, ...] = ()
    drop_highest: int = 0
    num_draws: int = 200
    seed: int = 0


def answer_of(table: Table, *, law: str, question: Question | None = None) -> dict[str, Any]:
    """Raises DataError where the table does not determine the law, ConfigError where the question does not fit it."""
    from surefoot.plan.isoflop_answer import isoflop_answer
    from surefoot.plan.surface_answer import surface_answer
    from surefoot.plan.tuning_answer import tuning_answer

    asked = question or Question()
    for flops in asked.at:
        if not (math.isfinite(flops) and flops > 0):
            raise ConfigError(f"{flops:g} FLOPs is no budget", where="--at", hint="a number above 0, such as 1e24")
    if asked.drop_highest and law != "parametric":
        raise ConfigError(f"--law {law} drops no rows", where="--drop-highest", hint="it is for --law parametric")
    if law in ("lr", "batch"):
        found = tuning_answer(table, law=law, question=asked)
    else:
        found = (surface_answer if law == "parametric" else isoflop_answer)(table, question=asked)
    found["warnings"] += unfinished(table)
    return {"law": law, "table": str(table.path), **found}


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
