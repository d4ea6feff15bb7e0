"""The answer of `surefoot fit --law isoflop`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from surefoot.core.errors import DataError
from surefoot.plan.fits.answer_parts import Question, count_warnings, origin, prediction, prediction_warnings
from surefoot.plan.fits.best_loss import LossLaw, fit_best_loss
from surefoot.plan.fits.isoflop import IsoFlopFit, Optimum, PowerLaw, budgets_of, fit_isoflop, fit_optima
from surefoot.plan.fits.table import COUNTS, Runs, Table, numbers, read_runs

EQUAL_LOG_STD = 0.05
"""Of log N* where a table of optima tells no errors: all weigh the same then, and the band is by their scatter."""

OPTIMA = "one row for each budget: taken for the best size of each, not for runs to find it among"

FEW_BUDGETS = 4
"""With fewer a line through logarithms is hardly tested by them."""


def isoflop_answer(table: Table, *, question: Question) -> dict[str, Any]:
    runs = read_runs(table, count=question.count)
    found = _fit(table, runs, question)
    loss_law = fit_best_loss([one.flops for one in found.optima], [one.loss for one in found.optima], seed=question.seed)
    at = [predict(found, loss_law, flops) for flops in question.at or (found.largest_flops,)]
    few = f"{len(found.optima)} budgets have a minimum: the bands rest on errors of single minima more than on how well a line fits them"
    return {
        "a": found.a,
        "coef": found.n_law.coef,
        "bands": {"a": list(found.n_law.exponent_band), "coef": list(found.n_law.coef_band)},
        "optima": [{**asdict(one), "tokens_per_parameter": one.tokens / one.n} for one in found.optima],
        "left_out": [asdict(one) for one in found.left_out],
        "laws": {
            "n": _told(found.n_law),
            "tokens": _told(found.token_law),
            "tokens_per_parameter": _told(found.ratio_law),
            "loss": asdict(loss_law) if loss_law else None,
        },
        **origin(table, runs),
        "other_counts": [_of_count(table, name, question) for name in runs.other_counts],
        "at": at,
        "smallest_flops": min(one.flops for one in found.optima),
        "largest_flops": found.largest_flops,
        "warnings": [
            *([OPTIMA] if has_optima(runs) else []),
            *([few] if len(found.optima) < FEW_BUDGETS else []),
            *count_warnings(runs),
            *prediction_warnings(at),
        ],
        "draws": [list(drawn) for drawn in found.n_law.draws],
    }


def predict(fit: IsoFlopFit, loss_law: LossLaw | None, flops: float) -> dict[str, Any]:
    """The best size and tokens of a budget, and the loss there where enough budgets tell of it."""
    laws: Mapping[str, PowerLaw | LossLaw] = {"n": fit.n_law, "tokens": fit.token_law, "tokens_per_parameter": fit.ratio_law}
    if loss_law is not None:
        laws = {**laws, "loss": loss_law}
    values = {name: law(flops) for name, law in laws.items()}
    draws = {name: law.values(flops) for name, law in laws.items()}
    return prediction(flops, largest=fit.largest_flops, values=values, draws=draws)


def _doubts(found: IsoFlopFit, runs: Runs, few: str) -> list[str]:
    return [*([OPTIMA] if has_optima(runs) else []), *([few] if len(found.optima) < FEW_BUDGETS else [])]


def _fit(table: Table, runs: Runs, question: Question) -> IsoFlopFit:
    if has_optima(runs):
        return fit_optima(_optima(table, runs), seed=question.seed)
    return fit_isoflop(runs.n, runs.flops, runs.loss, tokens=runs.tokens, seed=question.seed)


def has_optima(runs: Runs) -> bool:
    """One row for each of several budgets: there is nothing left to minimise."""
    return len(runs.n) > 1 and len(budgets_of(runs.flops)) == len(runs.n)


def _optima(table: Table, runs: Runs) -> list[Optimum]:
    """Weighted by their errors, where a column tells of them."""
    std = numbers(table, "log_n_std") if table.name_of("log_n_std") else np.full(len(runs.n), EQUAL_LOG_STD)
    rows = zip(runs.flops, runs.n, runs.tokens, runs.loss, std, strict=True)
    return [
        Optimum(flops=float(flops), n=float(n), tokens=float(tokens), loss=float(loss), log_n_std=float(error), num_points=1)
        for flops, n, tokens, loss, error in rows
    ]


def _of_count(table: Table, name: str, question: Question) -> dict[str, Any]:
    try:
        found = _fit(table, read_runs(table, count=name), question)
    except DataError as error:
        return {"count": name, "count_is": COUNTS[name], "problem": error.what}
    bands = {"a": list(found.n_law.exponent_band), "coef": list(found.n_law.coef_band)}
    return {"count": name, "count_is": COUNTS[name], "a": found.a, "coef": found.n_law.coef, "bands": bands}


def _told(law: PowerLaw) -> dict[str, Any]:
    return {"coef": law.coef, "exponent": law.exponent, "bands": {"coef": list(law.coef_band), "exponent": list(law.exponent_band)}}
