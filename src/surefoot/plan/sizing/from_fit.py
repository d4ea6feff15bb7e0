"""A fit of one's own runs as a law that a plan can be made by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError
from surefoot.plan.fits.fitted import FittedIsoFlop, FittedSurface, read_fit
from surefoot.plan.sizing.laws import Counted, Law, Power, Rule
from surefoot.plan.surface_record import Surface

_COUNTS: Mapping[str, Counted] = {"n_without_embedding": "body", "n_active": "active"}
"""Columns of a table that do not count all parameters."""


def fitted_law(path: Path) -> Law:
    """From what `surefoot fit --json` printed. Raises ConfigError for a fit of learning rates or batches, which says no size."""
    fit = read_fit(path)
    if isinstance(fit, FittedSurface):
        return _law(path, fit, fit.surface, fit.draws)
    if isinstance(fit, FittedIsoFlop):
        draws = tuple(Power(math.exp(log_coef), exponent) for log_coef, exponent in fit.n_law.draws)
        return replace(_law(path, fit, Power(fit.n_law.coef, fit.n_law.exponent), draws), reference=_beside(path))
    raise ConfigError(
        f"is a fit of {fit.column}, which says no size",
        where=str(path),
        hint="fit with --law parametric or --law isoflop for this",
        got=fit.law,
    )


def _beside(path: Path) -> Surface | None:
    """The surface that `sweep fit` puts beside an isoFLOP law, where the runs allowed one."""
    told = strict_json.loads(path.read_text(encoding="utf-8")).get("parametric")
    return Surface(*(float(told[name]) for name in ("E", "A", "B", "alpha", "beta"))) if isinstance(told, dict) else None


def _law(path: Path, fit: FittedSurface | FittedIsoFlop, rule: Rule, draws: tuple[Rule, ...]) -> Law:
    return Law(
        str(path),
        rule,
        counts=_COUNTS.get(fit.count, "all"),
        source=f"fitted to {fit.source}, N from its column {fit.count}",
        corpus="that of the runs in the table",
        flops_range=(fit.smallest_flops, fit.largest_flops),
        draws=draws,
    )
