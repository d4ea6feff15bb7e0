"""Fits of published runs: the points of Hoffmann et al. as Epoch AI read them off a figure, and the isoFLOP sweeps of Porian et al."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy.special import huber

from surefoot.cli.main import run
from surefoot.plan.bands import band
from surefoot.plan.fits.isoflop import IsoFlopFit, Optimum, fit_isoflop, law_through
from surefoot.plan.fits.surface import SurfaceFit, fit_surface, without_highest
from surefoot.plan.fits.surface_answer import constants_of
from surefoot.plan.fits.table import read_runs, read_table
from surefoot.plan.surface_record import Points, Surface

Setting = tuple[str, ...]
SETTING = ("hparams", "warmup", "decay", "param_count", "split")
KAPLAN_TO_TUNED: tuple[Setting, ...] = (
    ("base", "long", "kaplan", "kaplan", "train"),
    ("base", "long", "kaplan", "standard", "val"),
    ("base", "short", "kaplan", "standard", "val"),
    ("base", "short", "chinchilla", "standard", "val"),
    ("tuned", "short", "const", "standard", "val"),
)
"""From Kaplan's setting to one that is tuned, one change at a time."""

PLAIN_PARABOLAS = (0.825, 0.696, 0.598, 0.547, 0.509)
"""Exponents of the same settings by vertices of plain parabolas over a factor of 4, all budgets of equal weight."""


def huber_sum(surface: Surface, points: Points) -> float:
    """The objective that is published: the sum of Huber losses, delta 1e-3, of the error of log loss."""
    return float(huber(1e-3, np.log(surface.losses(points)) - np.log(points.loss)).sum())


@pytest.fixture(scope="module")
def epoch(planning_data: Path) -> Points:
    runs = read_runs(read_table(planning_data / "chinchilla_epoch_svg_extracted.csv"))
    return Points(runs.n, runs.tokens, runs.loss)


@pytest.fixture(scope="module")
def of_240(epoch: Points) -> SurfaceFit:
    return fit_surface(epoch.take(without_highest(epoch, 5)), num_draws=150)


def rows_of(path: Path) -> Iterator[tuple[Setting, dict[str, str]]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield tuple(row[name] for name in SETTING), row


@pytest.fixture(scope="module")
def published(planning_data: Path) -> dict[Setting, float]:
    return {setting: float(row["a_n_exponent"]) for setting, row in rows_of(planning_data / "porian_published_fits_rw.csv")}


@pytest.fixture(scope="module")
def sweeps(planning_data: Path) -> dict[Setting, np.ndarray]:
    """[4, rows] of each setting: n, flops, loss, tokens."""
    rows: dict[Setting, list[list[float]]] = {}
    for setting, row in rows_of(planning_data / "porian_isoflop_points_rw.csv"):
        rows.setdefault(setting, []).append([float(row[name]) for name in ("n", "flops", "loss", "tokens")])
    return {setting: np.array(listed).T for setting, listed in rows.items()}


@pytest.fixture(scope="module")
def fits(sweeps: dict[Setting, np.ndarray]) -> dict[Setting, IsoFlopFit]:
    return {setting: fit_isoflop(n, flops, loss, tokens=tokens) for setting, (n, flops, loss, tokens) in sweeps.items()}


def test_the_optimum_of_the_240_rows(of_240: SurfaceFit) -> None:
    found = of_240.surface
    assert (found.E, found.alpha, found.beta, found.a) == pytest.approx((1.8172, 0.3473, 0.3672, 0.5139), abs=3e-4)
    constants = constants_of(found)
    assert (constants["A"], constants["B"]) == pytest.approx((477.8, 2143.0), rel=1e-3)
    assert of_240.objective <= 1.01828e-3
    best = found.best_n(5.76e23)
    assert 5.76e23 / (6.0 * best * best) == pytest.approx(17.9, abs=0.1)
    assert of_240.condition < 50.0


def test_all_245_rows_have_another_optimum(epoch: Points, of_240: SurfaceFit) -> None:
    fit = fit_surface(epoch, num_draws=0)
    found = fit.surface
    assert (found.E, found.alpha, found.beta, found.a) == pytest.approx((1.8913, 0.3493, 0.4530, 0.5646), abs=3e-4)
    constants = constants_of(found)
    assert (constants["A"], constants["B"]) == pytest.approx((495.7, 12846.0), rel=1e-3)
    assert fit.objective <= 1.82602e-3
    assert found.a - of_240.surface.a > 0.05


def test_one_descent_with_the_usual_tolerance_stops_on_the_published_constants(epoch: Points, of_240: SurfaceFit) -> None:
    """The control: the same points and objective, started near the published fit and left to scipy's defaults."""
    from scipy.optimize import minimize

    points = epoch.take(without_highest(epoch, 5))

    def objective(theta: np.ndarray) -> float:
        return huber_sum(Surface(math.exp(theta[0]), math.exp(theta[1]), math.exp(theta[2]), theta[3], theta[4]), points)

    start = [math.log(1.69), math.log(406.4), math.log(410.7), 0.34, 0.28]
    stopped = minimize(objective, start, method="L-BFGS-B")
    assert stopped.success
    assert stopped.x[3:] == pytest.approx([0.338, 0.284], abs=0.003)
    assert stopped.fun > 1.1 * of_240.objective
    wrong = Surface(*(math.exp(value) for value in stopped.x[:3]), *stopped.x[3:])
    assert 5.76e23 / (6.0 * wrong.best_n(5.76e23) ** 2) > 3.0 * 17.9


def test_bands_of_the_240_rows(of_240: SurfaceFit) -> None:
    low, high = of_240.bands["a"]
    assert low == pytest.approx(0.483, abs=0.01)
    assert high == pytest.approx(0.564, abs=0.015)
    spread = {name: float(np.std([getattr(drawn, name) for drawn in of_240.draws])) for name in ("E", "alpha", "beta")}
    assert spread == pytest.approx({"E": 0.026, "alpha": 0.014, "beta": 0.021}, rel=0.25)
    low, high = band(drawn.best_n(1.026e24) for drawn in of_240.draws)
    assert (low, high) == pytest.approx((70e9, 166e9), rel=0.1)


def test_the_largest_budgets_are_foretold_to_about_one_per_cent(of_240: SurfaceFit) -> None:
    held_out = of_240.held_out
    assert held_out is not None
    assert held_out.num_rows == pytest.approx(24, abs=2)
    assert held_out.mean == pytest.approx(0.0105, abs=0.001)
    assert held_out.max == pytest.approx(0.028, abs=0.002)
    assert held_out.of_rest < 0.006


def test_the_command_reads_the_points_as_published_and_says_that_five_of_them_decide(
    planning_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(planning_data / "chinchilla_epoch_svg_extracted.csv")
    assert run(["fit", path, "--law", "parametric", "--draws", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_rows"], told["alpha"]) == (245, pytest.approx(0.3493, abs=3e-4))
    assert told["without_highest"]["num_dropped"] == 5
    assert told["without_highest"]["a"] == pytest.approx(0.5139, abs=3e-4)
    assert any("the 5 highest losses decide" in warning for warning in told["warnings"])


def test_laws_through_the_published_optima(planning_data: Path, published: dict[Setting, float]) -> None:
    optima: dict[Setting, list[Optimum]] = {}
    for setting, row in rows_of(planning_data / "porian_optimal_pairs_rw.csv"):
        if row["n_opt"]:  # two settings have budgets without a minimum
            flops, n = float(row["flops"]), float(row["n_opt"])
            loss, std = float(row["loss_opt"]), float(row["n_log_std"])
            one = Optimum(flops=flops, n=n, tokens=flops / (6.0 * n), loss=loss, log_n_std=std, num_points=0)
            optima.setdefault(setting, []).append(one)
    assert len(optima) == 10
    for setting, listed in optima.items():
        assert law_through(listed).exponent == pytest.approx(published[setting], abs=5e-4), setting


def test_laws_through_the_points_are_near_the_published(fits: dict[Setting, IsoFlopFit], published: dict[Setting, float]) -> None:
    assert len(fits) == 10
    for setting, fit in fits.items():
        assert fit.a == pytest.approx(published[setting], abs=0.02), setting
        low, high = fit.n_law.exponent_band
        assert low < published[setting] < high
        assert fit.token_law.exponent == pytest.approx(1.0 - fit.a, abs=1e-3)


def test_each_change_from_kaplan_on_lowers_the_exponent(fits: dict[Setting, IsoFlopFit]) -> None:
    exponents = [fits[setting].a for setting in KAPLAN_TO_TUNED]
    assert exponents == sorted(exponents, reverse=True)
    assert exponents == pytest.approx(PLAIN_PARABOLAS, abs=0.02)


def test_the_small_budgets_do_not_foretell_the_large_ones(sweeps: dict[Setting, np.ndarray]) -> None:
    """Why distance is always said: the six smallest budgets, 64 times below the largest, miss it by more than the six largest do."""
    n, flops, loss, tokens = sweeps[KAPLAN_TO_TUNED[-1]]
    small, large = flops <= 4.1e17, flops >= 7.9e17
    largest = fit_isoflop(n, flops, loss, tokens=tokens).optima[-1]
    from_small, from_large = (fit_isoflop(n[rows], flops[rows], loss[rows], tokens=tokens[rows]) for rows in (small, large))
    missed = [abs(math.log(fit.n_law(largest.flops) / largest.n)) for fit in (from_small, from_large)]
    assert missed[0] > 0.08 > missed[1]
    low, high = band(from_small.n_law.values(largest.flops))
    assert low < largest.n * (1.0 + 2.0 * largest.log_n_std)
    assert largest.n * (1.0 - 2.0 * largest.log_n_std) < high
