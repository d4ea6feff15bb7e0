"""The answers of `surefoot fit --law lr` and `--law batch`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from surefoot.core.errors import ConfigError
from surefoot.plan.fits.answer_parts import Question, count_warnings, origin
from surefoot.plan.fits.table import Table, numbers, read_runs
from surefoot.plan.fits.tuning import VARIABLES, TuningFit, fit_tuning

OTHER = {"lr": "batch", "batch": "lr"}
"""What is often varied beside, and moves the best value."""


def tuning_answer(table: Table, *, law: str, question: Question) -> dict[str, Any]:
    if question.at:
        raise ConfigError(
            f"--law {law} is no law of compute", where="--at", hint="it predicts from N and D; the page shows the largest sweep"
        )
    runs = read_runs(table, count=question.count)
    value = numbers(table, law)
    beside = numbers(table, OTHER[law]) if table.name_of(OTHER[law]) else None
    varied = beside if beside is not None and len(np.unique(beside)) > 1 else None
    found = fit_tuning(runs.n, runs.tokens, value, runs.loss, law=law, also=varied, seed=question.seed)
    return {
        "coef": found.coef,
        "exponents": found.exponents,
        "bands": {name: list(limits) for name, limits in found.bands.items()},
        "held_out_error": math.expm1(float(np.mean(np.abs(np.log(found.held_out))))),
        "column": table.name_of(law),
        "varied_beside": table.name_of(OTHER[law]) if varied is not None else None,
        "sweeps": [asdict(one) for one in found.sweeps],
        "left_out": [asdict(one) for one in found.left_out],
        **origin(table, runs),
        "at": [_at_largest(found)],
        "smallest_flops": min(6.0 * one.n * one.tokens for one in found.sweeps),
        "largest_flops": max(6.0 * one.n * one.tokens for one in found.sweeps),
        "warnings": [*_warnings(law, found), *count_warnings(runs)],
        "draws": [list(drawn) for drawn in found.draws],
    }


def _at_largest(found: TuningFit) -> dict[str, Any]:
    largest = max(found.sweeps, key=lambda one: one.n * one.tokens)
    where = {"n": largest.n, "tokens": largest.tokens}
    return {**where, "value": found(**where), "bands": {"value": list(found.band_at(**where))}, "best_seen": largest.value}


def _warnings(law: str, found: TuningFit) -> list[str]:
    said = []
    missing = [name for name in VARIABLES[law] if name not in found.exponents]
    if law == "lr" and missing:
        said.append(f"{' and '.join(missing)} did not vary apart: the law is one of {' and '.join(found.exponents)} alone")
    if law == "batch" and "tokens" not in found.exponents:
        said.append("tokens did not vary: the law is one of n alone, though it is tokens that a batch is known to follow")
    if len(found.left_out) > len(found.sweeps):
        said.append(f"{len(found.left_out)} sweeps of {len(found.left_out) + len(found.sweeps)} show no best value: widen their grids")
    return said
