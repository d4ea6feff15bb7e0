"""Detectors over made series: silent on healthy ones of any noise, and each rule on the fault that it is for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from surefoot.core.errors import ConfigError, Incompatible
from surefoot.core.records import Asks, Finding
from surefoot.core.sections import HealSection, MonitorSection
from surefoot.monitor.detectors import (
    RULES,
    DetectorState,
    Observation,
    bindings,
    bound_by_hand,
    observe,
    state_from_json,
    thresholds_of,
)
from surefoot.monitor.detectors.ranks import RankState, watch_ranks
from surefoot.monitor.probe_figures import ACTIVATION_SUMS, GRADIENT_SUMS, MOMENT_SUMS, PROBE_KINDS, probe_figures

Floats = NDArray[np.float64]
DEFAULT = bindings(HealSection())
ACTS = (Asks.SKIP, Asks.ROLL_BACK, Asks.PAUSE)


def learning(num: int, *, seed: int, df: float = 5.0, sigma: float = 0.03, fall: float = 0.4) -> Floats:
    """A loss that falls as a power of the step, with Student's noise of scale `sigma`."""
    generator = np.random.default_rng(seed)
    return np.asarray(2.0 + 9.0 * (1.0 + np.arange(num)) ** -fall + sigma * generator.standard_t(df, num))


def steady(num: int, *, seed: int, df: float = 5.0) -> Floats:
    """Late in a run."""
    noise = 0.03 * np.random.default_rng(seed).standard_t(df, num)
    return np.asarray(2.55 + noise - 1e-5 * np.arange(num))


def norms(num: int, *, seed: int, sigma: float = 0.08) -> Floats:
    generator = np.random.default_rng(seed + 1000)
    return np.asarray(np.exp(sigma * generator.standard_t(5.0, num)) * (0.3 + 15.0 / (1.0 + np.arange(num))))


def run(
    losses: Floats,
    *,
    grad_norms: Floats | None = None,
    rules: Mapping[str, Asks] = DEFAULT,
    stride: int = 1,
    state: DetectorState | None = None,
    first: int = 1,
    change: Callable[[Observation], Observation] = lambda seen: seen,
) -> tuple[DetectorState, list[tuple[int, Finding]]]:
    state, told = state or DetectorState(), []
    for row, loss in enumerate(losses.tolist()):
        norm = float(grad_norms[row]) if grad_norms is not None else math.nan
        seen = change(Observation(first + row * stride, loss, grad_norm=norm))
        state, findings = observe(state, seen, rules)
        told += [(seen.step, finding) for finding in findings]
    return state, told


def acting(told: list[tuple[int, Finding]]) -> list[str]:
    return [f"{step} {finding.rule}" for step, finding in told if finding.asks in ACTS]


def rounded(values: Floats, digits: int) -> Floats:
    return np.asarray(np.round(values, digits))


@pytest.mark.parametrize("df", [3.0, 4.0, 5.0])
def test_heavy_tails_hardly_act(df: float) -> None:
    """At 3 degrees of freedom single losses of 17 scales are noise: 3 in 10,000, where the plain rule has 8."""
    _, told = run(learning(3000, seed=int(df), df=df), grad_norms=norms(3000, seed=int(df)))
    assert len(acting(told)) <= (4 if df == 3.0 else 1), acting(told)


@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    df=st.floats(4.0, 30.0),
    sigma=st.floats(0.002, 0.1),
    lingers=st.floats(0.0, 0.1),
    drift=st.floats(-2e-4, 0.0),
    fall=st.floats(0.1, 0.5),
)
def test_what_no_threshold_was_fitted_to_is_hardly_disturbed(
    seed: int, df: float, sigma: float, lingers: float, drift: float, fall: float
) -> None:
    """Heavy tails, drift and noise that lingers a little, of any size: few roll-backs are asked for, and few skips."""
    generator, num = np.random.default_rng(seed), 1500
    noise, norm_noise = sigma * generator.standard_t(df, num), 0.1 * generator.standard_t(df, num)
    noise[1:] += lingers * noise[:-1]
    steps = np.arange(num)
    losses = 2.0 + 9.0 * (1.0 + steps) ** -fall + drift * steps + noise
    _, told = run(np.asarray(losses), grad_norms=np.asarray(0.3 * np.exp(norm_noise)))
    asked = [finding.rule for _, finding in told if finding.asks in ACTS]
    assert len(asked) <= 3, asked


@pytest.mark.parametrize(
    ("losses", "stride"),
    [
        (learning(1200, seed=1), 5),
        (rounded(learning(1200, seed=2), 4), 1),
        (rounded(learning(1200, seed=3, sigma=0.004), 2), 1),
        (np.full(1200, 2.5), 1),
        (learning(1200, seed=4, fall=0.1), 1),
        (learning(1200, seed=5, sigma=1e-5), 1),
        (np.concatenate([learning(700, seed=6), learning(1200, seed=7)[600:]]), 1),
    ],
    ids=["every 5th", "4 digits", "2 digits", "constant", "slow", "quiet", "restart"],
)
def test_healthy_series_of_any_kind_are_left_alone(losses: Floats, stride: int) -> None:
    _, told = run(losses, grad_norms=norms(len(losses), seed=9), stride=stride)
    assert not acting(told)


@pytest.mark.parametrize("seed", range(6))
def test_the_first_steps_of_small_runs_are_left_alone(seed: int) -> None:
    """Warm-up, a steep fall, noise of a tenth of a nat."""
    losses = 1.9 + 3.6 * np.exp(-np.arange(200) / 40.0) + 0.15 * np.random.default_rng(seed).standard_t(5.0, 200)
    rates = [1e-3 * min(1.0, step / 50.0) for step in range(1, 201)]
    _, told = run(
        np.asarray(losses),
        grad_norms=norms(200, seed=seed, sigma=0.2),
        change=lambda seen: replace(seen, lr=rates[seen.step - 1], lr_applied_ratio=1.0),
    )
    assert not acting(told)


def test_an_outlier_acts_or_is_recorded_and_does_not_hide_the_next() -> None:
    losses = steady(1200, seed=11, df=50.0)
    losses[[1000, 1010]] += 1.0
    losses[1100] = np.median(losses[972:1100]) + 0.26
    _, told = run(losses)
    assert [(step, finding.rule, finding.asks) for step, finding in told] == [
        (1001, "outlier_loss", Asks.SKIP),
        (1011, "outlier_loss", Asks.SKIP),
        (1101, "outlier_loss_mild", Asks.RECORD),
    ]


def test_loss_and_norm_together_act_sooner_than_the_loss_alone() -> None:
    losses, grad_norms = steady(1200, seed=12), norms(1200, seed=12)
    losses[1000] += 0.31
    grad_norms[1000] *= 3.0
    assert [finding.rule for _, finding in run(losses, grad_norms=grad_norms)[1]] == ["outlier_loss_and_norm"]
    grad_norms[1000] /= 3.0
    assert "outlier_loss_and_norm" not in [finding.rule for _, finding in run(losses, grad_norms=grad_norms)[1]]


def test_a_level_that_stays_up_is_found_with_its_onset_and_repeated() -> None:
    losses = steady(1400, seed=13)
    losses[1100:] += 0.1
    _, told = run(losses)
    found = [(step, finding) for step, finding in told if finding.rule == "sustained_loss"]
    assert 1101 <= found[0][0] <= 1140
    assert 1095 <= found[0][1].onset_step <= 1110
    assert found[0][1].asks is Asks.ROLL_BACK
    assert found[1][0] - found[0][0] >= 64
    assert found[1][1].onset_step == found[0][1].onset_step


@pytest.mark.parametrize("count", [300, 700])
def test_young_runs_are_guarded(count: int) -> None:
    losses = 2.5 + 0.03 * np.random.default_rng(count).standard_normal(count + 60)
    losses[count:] += 0.3
    steps = [step for step, finding in run(np.asarray(losses))[1] if finding.rule == "sustained_loss"]
    assert count < steps[0] <= count + 10


def test_a_gradient_level_and_a_burst() -> None:
    grad_norms = norms(900, seed=14)
    grad_norms[700:] *= 1.5
    found = {finding.rule: step for step, finding in reversed(run(steady(900, seed=14), grad_norms=grad_norms)[1])}
    assert 701 <= found["grad_level"] <= 725
    grad_norms = norms(900, seed=14)
    grad_norms[10] = 1000.0 * grad_norms[9]
    grad_norms[500] *= 8.0
    found = {finding.rule: step for step, finding in run(steady(900, seed=14), grad_norms=grad_norms)[1]}
    assert found == {"grad_burst": 11, "grad_outlier": 501}


def test_what_is_not_finite_is_found_and_enters_nothing() -> None:
    losses = learning(600, seed=15)
    clean, _ = run(losses)
    state, told = run(losses[:300])
    for step in range(301, 311):
        state, findings = observe(state, Observation(step, math.nan, num_nonfinite=3, rank_losses=(1.0, math.nan)), DEFAULT)
        assert [finding.rule for finding in findings] == ["nonfinite"]
        assert findings[0].evidence["ranks"] == [1]
    state, more = run(losses[300:], state=state, first=311)
    assert not told
    assert not more
    assert state.loss.values == clean.loss.values


def test_norms_that_nobody_measured_are_no_fault_and_one_that_is_nan_is() -> None:
    seen = Observation(1, 2.0, rank_losses=(2.0, 2.0), rank_norms=(math.nan, math.nan), rank_tokens=(1, 1))
    assert not observe(DetectorState(), seen, DEFAULT)[1]
    (found,) = observe(DetectorState(), replace(seen, rank_norms=(1.0, math.inf)), DEFAULT)[1]
    assert (found.rule, found.evidence["ranks"]) == ("nonfinite", [1])
    assert not observe(DetectorState(), replace(seen, loss=math.nan, num_live_tokens=0), DEFAULT)[1]


def ranked(num: int, *, seed: int, num_ranks: int = 3) -> list[Observation]:
    """Micro-batches of few sequences: norms differ by a fifth, losses by a tenth."""
    generator = np.random.default_rng(seed)
    rows = []
    for step, loss in enumerate(learning(num, seed=seed).tolist(), start=1):
        rank_norms = 30.0 * np.exp(0.2 * generator.standard_t(6.0, num_ranks))
        rank_losses = 100.0 * (loss + 0.1 * generator.standard_t(6.0, num_ranks))
        rows.append(
            Observation(
                step, loss, rank_losses=tuple(rank_losses.tolist()), rank_norms=tuple(rank_norms.tolist()), rank_tokens=(100,) * num_ranks
            )
        )
    return rows


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_of_healthy_noise_are_not_named(num_ranks: int) -> None:
    state, told = DetectorState(), []
    for seen in ranked(500, seed=num_ranks, num_ranks=num_ranks):
        state, findings = observe(state, seen, DEFAULT)
        told += [finding.rule for finding in findings if finding.rule.startswith("rank")]
    assert not told


@pytest.mark.parametrize("df", [5.0, 6.0])
def test_a_thousand_ranks_of_healthy_noise_are_not_named(df: float) -> None:
    generator, num = np.random.default_rng(int(df)), 1024
    rules = {"rank_norm": Asks.SKIP, "rank_loss": Asks.RECORD}
    state = RankState()
    for step in range(1, 801):
        rank_norms, rank_losses = 30.0 * np.exp(0.2 * generator.standard_t(df, num)), 300.0 + 10.0 * generator.standard_t(df, num)
        state, findings = watch_ranks(
            state, step=step, losses=rank_losses.tolist(), norms=rank_norms.tolist(), tokens=(100,) * num, rules=rules, frozen=False
        )
        assert not findings
    rank_norms[700] *= 1e12
    (found,) = watch_ranks(state, step=801, losses=(), norms=rank_norms.tolist(), tokens=(100,) * num, rules=rules, frozen=False)[1]
    assert found.evidence["ranks"] == [700]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("at", [5, 300])
def test_the_rank_with_a_flipped_exponent_is_named(num_ranks: int, at: int) -> None:
    state = DetectorState()
    for seen in ranked(at, seed=21, num_ranks=num_ranks):
        last, state = state, observe(state, seen, DEFAULT)[0]
    sick = (*seen.rank_norms[:1], seen.rank_norms[1] * 1e12, *seen.rank_norms[2:])
    (found,) = observe(last, replace(seen, rank_norms=sick), DEFAULT)[1]
    assert (found.rule, found.asks, found.evidence["ranks"]) == ("rank_norm", Asks.SKIP, [1])


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("excess", [30.0, 40.0, 400.0])
def test_the_rank_whose_loss_stays_off_is_recorded_and_no_other(num_ranks: int, excess: float) -> None:
    state, told = DetectorState(), []
    for seen in ranked(500, seed=22, num_ranks=num_ranks):
        losses = (seen.rank_losses[0], seen.rank_losses[1] + (excess if seen.step > 300 else 0.0), *seen.rank_losses[2:])
        state, findings = observe(state, replace(seen, rank_losses=losses), DEFAULT)
        told += [(seen.step, finding) for finding in findings]
    assert {(finding.rule, finding.asks, str(finding.evidence["ranks"])) for _, finding in told} == {("rank_loss", Asks.RECORD, "[1]")}
    assert 300 < told[0][0] < 345


def test_of_two_ill_ranks_one_is_named_and_then_the_other() -> None:
    state, named = DetectorState(), []
    for seen in ranked(500, seed=22, num_ranks=8):
        losses = tuple(loss + (40.0 if rank in (2, 5) and seen.step > 300 else 0.0) for rank, loss in enumerate(seen.rank_losses))
        state, findings = observe(state, replace(seen, rank_losses=losses), DEFAULT)
        named += [str(finding.evidence["ranks"]) for finding in findings]
    assert sorted(named) == ["[2]", "[5]"]


def rate_findings(rates: list[float], **changes: Mapping[int, object]) -> list[tuple[int, str]]:
    state, told = DetectorState(), []
    for step, rate in enumerate(rates, start=1):
        seen = replace(Observation(step, 2.0, lr=rate), **{name: at[step] for name, at in changes.items() if step in at})  # type: ignore[arg-type]
        state, findings = observe(state, seen, DEFAULT)
        told += [(step, finding.rule) for finding in findings]
    return told


def test_schedules_do_not_jump_and_mistakes_do() -> None:
    warm_up = [1e-3 * step / 20 for step in range(1, 21)]
    again = [1e-3 * (0.1 + 0.3 * step) for step in range(1, 4)]
    assert not rate_findings([*warm_up, *[1e-3] * 20, *np.linspace(1e-3, 1e-4, 30).tolist()])
    assert not rate_findings([*warm_up, 1e-4, *again], rebased={22: True})
    wrong = [*warm_up[:9], 30 * warm_up[9], 30 * warm_up[10], 30 * warm_up[11], *warm_up[12:]]
    assert rate_findings(wrong) == [(10, "lr_jump"), (11, "lr_jump"), (12, "lr_jump")]
    assert not rate_findings([1e-3, 5e-3], rebased={2: True})


def test_an_update_with_another_rate_is_that_of_the_step_before() -> None:
    seen = Observation(7, 2.0, lr=1e-3, lr_applied_ratio=30.0)
    (found,) = observe(DetectorState(), seen, DEFAULT)[1]
    assert (found.rule, found.asks, found.onset_step, found.evidence["cause"]) == ("lr_not_applied", Asks.ROLL_BACK, 6, "schedule")
    assert not observe(DetectorState(), replace(seen, lr_applied_ratio=1.0 + 1e-7), DEFAULT)[1]


def advised(
    rows: int, probes: Callable[[int], Mapping[str, float]], ratios: Callable[[int], Mapping[str, float]], **changes: Mapping[int, object]
) -> list[tuple[int, Finding]]:
    state, told = DetectorState(), list[tuple[int, Finding]]()
    rules = {**DEFAULT, "cusum:act_zero": Asks.ALERT}
    for step in range(1, rows + 1):
        seen = Observation(step, 2.0, probes=probes(step), update_ratios=ratios(step))
        seen = replace(seen, **{name: at[step] for name, at in changes.items() if step in at})  # type: ignore[arg-type]
        state, findings = observe(state, seen, rules)
        told += [(step, finding) for finding in findings]
    return told


def test_advice_on_probes_never_acts() -> None:
    noise = np.random.default_rng(3).normal(size=121)
    told = advised(
        120,
        lambda step: {"log_z": 5.0 + 0.1 * noise[step] + (2.0 if step > 80 else 0.0), "act_zero:head": 0.0},
        lambda step: {"head": 1e-3 * (40.0 if step == 60 else 1.0)},
    )
    assert [(finding.rule, finding.asks) for _, finding in told] == [("update_ratio_burst", Asks.ALERT), ("cusum", Asks.RECORD)]
    assert 75 <= told[1][1].onset_step <= 82


def test_signals_that_rise_together_are_one_finding_with_the_worst_first() -> None:
    def probes(step: int) -> dict[str, float]:
        return {f"act_rms:blocks.{block}": 1.0 + (0.2 * block if step > 200 else 0.0) for block in range(64)}

    ((step, found),) = advised(600, probes, lambda step: {})
    assert 200 < step <= 205
    assert (found.rule, found.evidence["num_signals"]) == ("cusum", 63)
    signals = found.evidence["signals"]
    assert isinstance(signals, list)
    assert (signals[0]["signal"], len(signals)) == ("act_rms:blocks.63", 16)


def test_a_healthy_warm_up_is_no_advice() -> None:
    noise = np.random.default_rng(4).normal(size=(1001, 64))

    def probes(step: int) -> dict[str, float]:
        return {f"moment1:blocks.{block}": min(1.0, step / 500.0) * (1.0 + 0.02 * noise[step, block]) for block in range(16)}

    rates = {step: 1e-3 * min(1.0, step / 500.0) for step in range(1, 601)}
    assert len(advised(600, probes, lambda step: {}, lr=rates)) <= 3
    assert len(advised(600, probes, lambda step: {})) > 3


def test_a_group_that_wakes_is_told_once_and_a_boundary_forgets_what_it_did() -> None:
    wakes = advised(400, lambda step: {}, lambda step: {"head": 1e-8 if step <= 200 else 1e-3})
    assert [step for step, finding in wakes if finding.rule == "update_ratio_burst"] == [201]
    twice = advised(400, lambda step: {}, lambda step: {"head": 1e-3 if step in (200, 300) else 1e-6})
    assert [step for step, finding in twice if finding.rule == "update_ratio_burst"] == [200, 300]
    anew = advised(400, lambda step: {}, lambda step: {"head": 1e-8 if step <= 200 else 1e-3}, rebased={201: True})
    assert not anew


@pytest.mark.parametrize(
    ("bound", "rules"),
    [
        ({"cusum:attn_logit_max:blocks.3": "off"}, ["cusum"]),
        ({"cusum:attn_logit_max": "off"}, []),
        ({"cusum:attn_logit_max": "alert", "cusum": "off"}, ["cusum:attn_logit_max"]),
        ({"cusum:attn_logit_max:blocks.3": "alert"}, ["cusum:attn_logit_max:blocks.3", "cusum"]),
        ({"cusum:attn_logit_max": "off", "cusum:attn_logit_max:blocks.3": "alert"}, ["cusum:attn_logit_max:blocks.3"]),
    ],
)
def test_advice_is_bound_for_all_for_a_kind_and_for_one(bound: Mapping[str, str], rules: list[str]) -> None:
    state, told = DetectorState(), list[Finding]()
    for step in range(1, 100):
        probes = {f"attn_logit_max:blocks.{block}": 9.0 if step > 50 and block in (3, 4) else 5.0 + 0.01 * (step % 3) for block in range(5)}
        state, findings = observe(state, Observation(step, 2.0, probes=probes), bindings(HealSection(rules=tuple(bound.items()))))
        told += findings
    assert [finding.rule for finding in told] == rules


def test_every_kind_of_probe_is_known_by_name() -> None:
    values = {f"{kind}:blocks.0": 2.0 for kind in (*ACTIVATION_SUMS, *GRADIENT_SUMS, *MOMENT_SUMS, "act_max", "attn_logit_max")}
    figures = probe_figures({**values, "log_z_n:head": 2.0, "log_z_sum:head": 1.0})
    assert {name.partition(":")[0] for name in figures} == set(PROBE_KINDS)


def test_a_plateau_is_told_once() -> None:
    losses = np.concatenate([3.0 - 5e-4 * np.arange(1600), np.full(800, 3.0 - 0.8)]) + 0.01 * np.random.default_rng(5).normal(size=2400)
    found = [(step, finding) for step, finding in run(losses)[1] if finding.rule == "plateau"]
    assert len(found) == 1
    assert 1600 < found[0][0] <= 2300


def test_a_boundary_forgets_what_is_no_measure_any_more() -> None:
    losses = learning(1100, seed=31)
    losses[1000:] += 0.5
    assert acting(run(losses)[1])
    assert not acting(run(losses, change=lambda seen: replace(seen, rebased=seen.step == 1001))[1])


def test_frozen_statistics_take_nothing() -> None:
    state, _ = run(learning(700, seed=32), grad_norms=norms(700, seed=32))
    after, findings = observe(state, Observation(701, 9.0, grad_norm=50.0), DEFAULT, frozen=True)
    assert findings
    assert (after.loss.values, after.norm.logs, after.plateau) == (state.loss.values, state.norm.logs, state.plateau)
    assert observe(state, Observation(701, 9.0, grad_norm=50.0), DEFAULT)[0].loss.values != state.loss.values


def test_a_state_goes_on_from_json_as_if_it_had_never_left() -> None:
    everything = dict.fromkeys(RULES, Asks.RECORD)
    losses, grad_norms = steady(800, seed=33), norms(800, seed=33)
    losses[640:] += 0.2
    _, whole = run(losses, grad_norms=grad_norms, rules=everything)
    for cut in (5, 90, 650):
        state, first = run(losses[:cut], grad_norms=grad_norms[:cut], rules=everything)
        back = state_from_json(json.loads(json.dumps(state.to_json())))
        assert back == state
        _, second = run(losses[cut:], grad_norms=grad_norms[cut:], rules=everything, state=back, first=cut + 1)
        assert first + second == whole
    assert state_from_json({}) == DetectorState()
    with pytest.raises(Incompatible, match="version 99"):
        state_from_json({"version": 99})


def test_classics_by_name_with_their_weakness() -> None:
    rules = bindings(HealSection(preset="classic"))
    losses, grad_norms = learning(1600, seed=34, df=30.0), np.full(1600, 0.5)
    grad_norms[1100], grad_norms[1150], losses[1200] = 3.0, 60.0, 5.0
    losses[1200:1450] += 0.5
    told = run(losses, grad_norms=grad_norms, rules=rules)[1]
    found = {finding.rule: step for step, finding in reversed(told)}
    assert found["norm_5x_mean_1000"] == 1101
    assert found["norm_100x_mean_1000"] == 1151
    assert found["norm_over_clip"] == 1101
    assert found["loss_n_sigma"] == 1201
    assert found["recover_5pct_200"] == 1401
    spiked, _ = run(np.full(1050, 2.0), grad_norms=np.where(np.arange(1050) == 500, 2000.0, 0.5), rules=rules)
    assert not observe(spiked, Observation(1051, 2.0, grad_norm=0.5 * 24.0), {"norm_5x_mean_1000": Asks.ALERT})[1]


def test_presets_and_bindings() -> None:
    assert set(DEFAULT) == {name for name, rule in RULES.items() if rule.tiers is not None}
    heal = HealSection(rules=(("norm_over_clip", "alert"), ("outlier_loss", "off"), ("cusum:log_z", "pause")))
    bound = bindings(heal)
    assert (bound["norm_over_clip"], bound["cusum:log_z"]) == (Asks.ALERT, Asks.PAUSE)
    assert "outlier_loss" not in bound
    assert [line.split()[1] for line in bound_by_hand(heal)] == ["norm_over_clip", "cusum:log_z"]
    classic = HealSection(preset="classic", rules=(("loss_n_sigma", "off"), ("norm_over_clip", "alert")))
    lines = {line.split()[1]: line for line in bound_by_hand(classic)}
    assert {name for name, rule in RULES.items() if rule.tiers is None} - {"loss_n_sigma"} <= set(lines)
    assert "loss_n_sigma" not in lines
    assert "bound to alert; false alarms" in lines["norm_over_clip"]
    assert lines["norm_5x_mean_1000"].endswith("bound to alert by preset classic; false alarms per 10,000 healthy steps: 0.75")
    assert "sustained_loss" not in bindings(HealSection(preset="classic"))


@pytest.mark.parametrize(
    ("rule", "action", "words"),
    [
        ("norm_over", "skip", "there is no rule norm_over"),
        ("grad_level", "explode", "cannot be bound to 'explode'"),
        ("nonfinite", "off", "must skip at least"),
        ("nonfinite", "alert", "must skip at least"),
        ("grad_level:x", "off", "there is no rule grad_level:x"),
        ("cusum:attention_logit", "alert", "there is no signal attention_logit.*cusum:<kind>:<place>"),
        ("cusum:log_z:head", "off", "log_z is one figure of the whole model"),
    ],
)
def test_bindings_that_make_no_sense_are_refused(rule: str, action: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bindings(HealSection(rules=((rule, action),)))


def test_thresholds_are_settings() -> None:
    losses = learning(1100, seed=35)
    losses[1050] += 1.0
    state, _ = run(losses[:1050])
    seen = Observation(1051, float(losses[1050]))
    assert observe(state, seen, DEFAULT)[1]
    deaf = thresholds_of(MonitorSection(outlier_sigmas=500.0, mild_sigmas=500.0))
    assert not observe(state, seen, DEFAULT, thresholds=deaf)[1]
