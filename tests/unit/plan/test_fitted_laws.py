"""Fits that were saved, as laws."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, DataError
from surefoot.plan.sizing.from_fit import fitted_law
from surefoot.plan.sizing.published import EPOCH

ORIGIN = {"smallest_flops": 1e18, "largest_flops": 1e20, "count": "n_active", "table": "runs.csv"}


def saved(path: Path, answer: dict[str, object]) -> Path:
    path.write_bytes(strict_json.dumps({**ORIGIN, **answer}).encode())
    return path


def constants(factor: float = 1.0) -> list[float]:
    return [EPOCH.E, EPOCH.A * factor, EPOCH.B, EPOCH.alpha, EPOCH.beta]


def test_a_surface(tmp_path: Path) -> None:
    draws = [constants(1.0 + 0.01 * step) for step in range(-10, 11)]
    answer: dict[str, object] = {
        "law": "parametric",
        **dict(zip(("E", "A", "B", "alpha", "beta"), constants(), strict=True)),
        "draws": draws,
    }
    law = fitted_law(saved(tmp_path / "fit.json", answer))
    assert law.surface == EPOCH
    assert law.counts == "active"
    assert "runs.csv" in law.source
    assert law.extrapolation(1e22) == pytest.approx(100.0)
    assert law.extrapolation(1e16) == pytest.approx(100.0)
    low, high = law.n_band(1e22) or (0.0, 0.0)
    assert low < law.best_n(1e22) < high


def test_a_power_law(tmp_path: Path) -> None:
    told = {"coef": 1.0, "exponent": 0.5}
    answer: dict[str, object] = {"law": "isoflop", "coef": 0.1, "a": 0.5, "draws": [[-2.31, 0.5], [-2.29, 0.5]]}
    laws = {"laws": {"tokens": told, "tokens_per_parameter": told, "loss": None}}
    law = fitted_law(saved(tmp_path / "fit.json", {**answer, **laws}))
    assert law.surface is None
    assert law.best_n(1e20) == pytest.approx(1e9)
    low, high = law.n_band(1e20) or (0.0, 0.0)
    assert low < 1e9 < high < 1.02e9


def test_what_says_no_size(tmp_path: Path) -> None:
    answer: dict[str, object] = {"law": "lr", "coef": 1.0, "exponents": {"n": -0.5}, "draws": [], "column": "lr"}
    with pytest.raises(ConfigError, match="says no size"):
        fitted_law(saved(tmp_path / "lr.json", answer))
    with pytest.raises(DataError):
        fitted_law(saved(tmp_path / "other.json", {"law": "parametric"}))
    with pytest.raises(ConfigError, match="no such file"):
        fitted_law(tmp_path / "absent.json")
