"""The default detectors over public training curves. With -s every figure of docs/detectors.md is printed."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from surefoot.cli.calibrate_table import read_series
from surefoot.core.records import Asks
from surefoot.core.sections import CanarySection, HealSection, MonitorSection
from surefoot.monitor.calibrate import ACTS, HEALTHY_STEPS, Series, calibrate, episodes, healthy_start
from surefoot.monitor.canary import CanaryState, hear
from surefoot.monitor.detectors import DetectorState, bindings, observe, thresholds_of

RULES = bindings(HealSection())
HEALTHY = ("gpt2_124m_llmc_a", "gpt2_124m_llmc_c", "gpt2_124m_py_1epoch", "gpt2_124m_py_nowarmup", "megatron_gpt3_15b")
LABELLED = {
    "gpt2_124m_llmc_a": (5052, 7435, 9025),
    "gpt2_124m_py_1epoch": (5317,),
    "gpt2_124m_py_nowarmup": (5317,),
    "gpt2_124m_llmc_c": (10822,),
    "gpt2_124m_llmc_nan16k": (1,),
    "megatron_mixtral_8x7b": (2830, 3800, 3850, 4260, 4970),
    "bloom_176b_tr11_windows": (31219,),
}
"""Lone outliers, the beginning of a cluster, of nan, and spikes that recovered."""

MOST_DELAY_ROWS = 2


@dataclass(frozen=True, slots=True)
class Told:
    series: Series
    alarms: dict[str, list[int]]

    @property
    def acting(self) -> list[int]:
        return sorted({step for rule, steps in self.alarms.items() if RULES[rule] in ACTS for step in steps})

    @property
    def num_healthy(self) -> int:
        return sum(step > HEALTHY_STEPS for step in self.series.steps)


@pytest.fixture(scope="module")
def told(stability_data: Path) -> dict[str, Told]:
    found = {}
    for name in {*HEALTHY, *LABELLED}:
        series = read_series(stability_data / f"{name}.csv")
        state, alarms = DetectorState(), dict[str, list[int]]()
        for row in range(len(series.steps)):
            state, findings = observe(state, series.observation(row), RULES)
            for finding in findings:
                alarms.setdefault(finding.rule, []).append(series.steps[row])
        found[name] = Told(series, alarms)
    return found


def test_healthy_runs_are_hardly_disturbed(told: dict[str, Told]) -> None:
    """The cluster of llmc_c counts as false too."""
    num_rows = sum(told[name].num_healthy for name in HEALTHY)
    by_rule: dict[str, int] = {}
    num_acting = 0
    for name in HEALTHY:
        num_acting += sum(step > HEALTHY_STEPS for step in episodes(told[name].acting))
        for rule, steps in told[name].alarms.items():
            by_rule[rule] = by_rule.get(rule, 0) + sum(step > HEALTHY_STEPS for step in episodes(steps))
    for rule, num in sorted(by_rule.items()):
        print(f"{rule} ({RULES[rule]}): {num} episodes, {1e4 * num / num_rows:.2f} per 10,000 of {num_rows} rows")
    print(f"those that act: {num_acting}, {1e4 * num_acting / num_rows:.2f} per 10,000")
    assert 1e4 * num_acting / num_rows <= 2.0
    assert not any(step <= HEALTHY_STEPS for name in HEALTHY for step in told[name].acting)


@pytest.mark.parametrize("name", LABELLED)
def test_what_is_labelled_is_found(name: str, told: dict[str, Told]) -> None:
    run = told[name]
    for label in LABELLED[name]:
        rows = [row for row, step in enumerate(run.series.steps) if step >= label][: MOST_DELAY_ROWS + 1]
        within = {run.series.steps[row]: row - rows[0] for row in rows}
        spoke = {rule: within[step] for rule, steps in run.alarms.items() for step in reversed(steps) if step in within}
        print(f"{name} {label}: {', '.join(f'{rule} after {delay} rows' for rule, delay in spoke.items())}")
        assert spoke, label


def test_spikes_of_the_mixture_of_experts_and_bloom_act(told: dict[str, Told]) -> None:
    for name, steps in (("megatron_mixtral_8x7b", (2830, 3800, 4260, 4970)), ("bloom_176b_tr11_windows", (31219,))):
        assert set(steps) <= set(told[name].acting)


def test_a_single_rank_has_more_outliers_and_few_of_them_act(stability_data: Path) -> None:
    """The loss of one rank alone, not reduced: its outliers are documents, the same ones in two runs of one data order."""
    series = read_series(stability_data / "nanogpt_1b5_c.csv")
    state, alarms = DetectorState(), dict[Asks, list[int]]()
    for row in range(len(series.steps)):
        state, findings = observe(state, series.observation(row), RULES)
        for finding in findings:
            alarms.setdefault(finding.asks, []).append(series.steps[row])
    print({asks.value: len(episodes(steps)) for asks, steps in alarms.items()})
    assert len(episodes(alarms[Asks.SKIP])) <= 4 < len(episodes(alarms[Asks.RECORD]))


def test_injected_faults_are_found_as_soon_as_promised(stability_data: Path) -> None:
    series = read_series(stability_data / "gpt2_124m_py_1epoch.csv")
    half = Series(series.steps[:9000], series.losses[:9000], series.norms[:9000])
    told = calibrate(
        half, from_step=healthy_start(half), thresholds=thresholds_of(MonitorSection()), budget_per_10k=0.5, acting=RULES, seed=3
    )
    powers = {one.name: one.powers for one in told.detectors}
    for name, fault, most_rows in (
        ("sustained_loss", "loss +0.1", 30),
        ("sustained_loss", "loss +0.2", 8),
        ("grad_level", "grad_norm x1.5", 12),
        ("grad_outlier", "grad_norm x10 once", 0),
        ("nonfinite", "loss nan once", 0),
    ):
        power = powers[name][fault]
        print(f"{name}, {fault}: {power.num_found} of {power.num_places}, {power.delay_rows} rows")
        assert power.num_found >= 0.8 * power.num_places > 0
        assert power.delay_rows is not None
        assert power.delay_rows <= most_rows


@pytest.mark.parametrize("name", ["val_gpt2_llmc_a", "val_nanogpt_1b5_a", "val_py_nowarmup", "val_py_smaller"])
def test_real_canaries_are_silent_and_a_slow_harm_is_heard(name: str, stability_data: Path) -> None:
    with (stability_data / "canary" / f"{name}.csv").open(newline="") as file:
        rows = [(int(row["step"]), float(row["val_loss"])) for row in csv.DictReader(file)]
    assert not listen(rows)
    onset = rows[len(rows) // 2][0]
    harmed = [(step, loss + 0.09 * min(1.0, max(0, step - onset) / 2100.0)) for step, loss in rows]
    first = listen(harmed)[0]
    print(f"{name}: +0.09 nats over 2,100 steps is heard after {first - onset} steps")
    assert onset < first <= onset + 5 * 250  # five evaluations of the public runs


def listen(rows: list[tuple[int, float]]) -> list[int]:
    state, told = CanaryState(), []
    for step, loss in rows:
        state, findings = hear(state, step=step, loss=loss, section=CanarySection(), loss_is_high=True)
        told += [step for _ in findings]
    return told
