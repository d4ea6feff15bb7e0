"""The answer of `surefoot fit --law parametric`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.core.errors import ConfigError, DataError
from surefoot.plan.fits.answer_parts import Question, count_warnings, origin, prediction, prediction_warnings
from surefoot.plan.fits.surface import CONSTANTS, LEAST_ROWS_FOR_BANDS, SurfaceFit, fit_surface, summary_of, without_highest
from surefoot.plan.fits.table import COUNTS, Runs, Table, read_runs
from surefoot.plan.surface_record import Points, Surface

Floats = NDArray[np.float64]

HIGH_CONDITION = 100.0
"""Tables with sizes and tokens varied apart come to 20 to 50."""

HIGHEST_SHARE = 0.02
"""Of the rows, those of the highest losses, without which the fit is shown again: arXiv 2404.10102 leaves out 5 of 245."""

SENSITIVE = 0.02
"""Change of the exponent a that is worth a warning: over two decades of compute it is 10% of N*."""

FAR_WORSE = 4.0
"""Mean error of the runs that were held out over that of the others; a good surface comes to 1 to 2."""

NEGLIGIBLE = 1e-3
"""Relative error of a loss that is worth no warning."""

REPEATS_APART = 0.01
"""Of log loss: more than another seed explains."""

NUM_WORST = 3


def surface_answer(table: Table, *, question: Question) -> dict[str, Any]:
    runs = read_runs(table, count=question.count)
    kept = _kept(runs, question.drop_highest)
    points = points_of(kept)
    found = fit_surface(points, num_draws=question.num_draws, seed=question.seed)
    held_out = found.held_out
    at = [predict(found, flops) for flops in question.at or (found.largest_flops,)]
    beside = None if question.drop_highest else _without_highest(points, found.surface)
    return {
        **constants_of(found.surface),
        "objective": found.objective,
        "bands": {name: list(limits) for name, limits in found.bands.items()},
        "condition": found.condition,
        "held_out_error": held_out.mean if held_out else None,
        "held_out": asdict(held_out) if held_out else None,
        "residuals": {**summary_of(found.residuals), "worst": _worst(found.residuals, kept)},
        **origin(table, kept),
        "num_dropped": question.drop_highest,
        "without_highest": beside,
        "other_counts": [_of_count(table, name, question) for name in runs.other_counts],
        "at": at,
        "smallest_flops": float(points.flops.min()),
        "largest_flops": found.largest_flops,
        "warnings": [*_warnings(found, beside), *_repeats(points), *count_warnings(runs), *prediction_warnings(at)],
        "draws": [[getattr(drawn, name) for name in CONSTANTS] for drawn in found.draws],
    }


def points_of(runs: Runs) -> Points:
    return Points(runs.n, runs.tokens, runs.loss)


def constants_of(surface: Surface) -> dict[str, float]:
    return {name: getattr(surface, name) for name in (*CONSTANTS, "a")}


def predict(fit: SurfaceFit, flops: float) -> dict[str, Any]:
    """The best size and tokens of a budget, the loss there, and what a size twice or half as large loses."""
    values = _best(fit.surface, flops)
    drawn = [_best(surface, flops) for surface in fit.draws]
    draws = {name: [one[name] for one in drawn] for name in values}
    told = prediction(flops, largest=fit.largest_flops, values=values, draws=draws)
    off = [fit.surface.loss(values["n"] * by, values["tokens"] / by) - values["loss"] for by in (0.5, 2.0)]
    return {**told, "loss_of_half_size": off[0], "loss_of_twice_size": off[1]}


def _best(surface: Surface, flops: float) -> dict[str, float]:
    n = surface.best_n(flops)
    tokens = flops / (6.0 * n)
    return {"n": n, "tokens": tokens, "tokens_per_parameter": tokens / n, "loss": surface.loss(n, tokens)}


def _kept(runs: Runs, drop_highest: int) -> Runs:
    if not 0 <= drop_highest < len(runs.n):
        hint = f"from 0 to fewer than the {len(runs.n)} rows"
        raise ConfigError(f"cannot drop {drop_highest} rows", where="--drop-highest", hint=hint)
    return runs.take(without_highest(points_of(runs), drop_highest)) if drop_highest else runs


def _without_highest(points: Points, surface: Surface) -> dict[str, Any] | None:
    count = round(HIGHEST_SHARE * len(points))
    if count == 0:
        return None
    other = fit_surface(points.take(without_highest(points, count)), num_draws=0).surface
    return {"num_dropped": count, **constants_of(other), "change_of_a": other.a - surface.a}


def _of_count(table: Table, name: str, question: Question) -> dict[str, Any]:
    runs = _kept(read_runs(table, count=name), question.drop_highest)
    try:
        found = fit_surface(points_of(runs), num_draws=question.num_draws, seed=question.seed)
    except DataError as error:
        return {"count": name, "count_is": COUNTS[name], "problem": error.what}
    bands = {constant: list(limits) for constant, limits in found.bands.items()}
    return {"count": name, "count_is": COUNTS[name], **constants_of(found.surface), "bands": bands}


def _worst(residuals: Floats, runs: Runs) -> list[dict[str, float]]:
    rows = np.argsort(-np.abs(residuals), kind="stable")[:NUM_WORST]
    return [{"line": runs.lines[row], "loss": float(runs.loss[row]), "error": float(np.expm1(residuals[row]))} for row in rows]


def _repeats(points: Points) -> list[str]:
    """Of runs of one size and number of tokens that differ by more than chance: a sweep of something else is in the table."""
    _, which = np.unique(np.stack([points.n, points.tokens]), axis=1, return_inverse=True)
    logs = np.log(points.loss)
    lowest, highest = np.full(which.max() + 1, np.inf), np.full(which.max() + 1, -np.inf)
    np.minimum.at(lowest, which, logs)
    np.maximum.at(highest, which, logs)
    apart = float((highest - lowest).max())
    if apart <= REPEATS_APART:
        return []
    return [f"runs of the same size and tokens are up to {math.expm1(apart):.1%} apart: of a sweep of learning rates keep the best of each"]


def _warnings(found: SurfaceFit, beside: dict[str, Any] | None) -> Sequence[str]:
    said = []
    if not found.draws:
        said.append(f"fewer than {LEAST_ROWS_FOR_BANDS} different runs: no bands")
    if found.condition > HIGH_CONDITION:
        said.append(
            f"condition {found.condition:.3g}: the runs hardly tell alpha from beta; add some of far more and far fewer tokens a parameter"
        )
    if (held_out := found.held_out) and held_out.mean > max(FAR_WORSE * held_out.of_rest, NEGLIGIBLE):
        said.append(
            f"the largest budgets are missed by {held_out.mean:.2%}, the rest by {held_out.of_rest:.2%}: "
            "no surface of this form holds for both"
        )
    if beside and abs(beside["change_of_a"]) > SENSITIVE:
        said.append(
            f"the {beside['num_dropped']} highest losses decide: without them a is {beside['a']:.4f}; --drop-highest leaves such rows out"
        )
    return said
