"""One step through all rules: pure, the same on every rank, and the same code for a run and for `surefoot calibrate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.advice import watch_signals, without_ratios
from surefoot.monitor.detectors.classics import watch_classics
from surefoot.monitor.detectors.loss import outlier, read_loss, sustained, take_loss
from surefoot.monitor.detectors.norms import read_norm, take_norm, watch_norm
from surefoot.monitor.detectors.observation import Observation
from surefoot.monitor.detectors.plateau import watch_plateau
from surefoot.monitor.detectors.ranks import watch_ranks
from surefoot.monitor.detectors.rates import watch_rate
from surefoot.monitor.detectors.state import DetectorState
from surefoot.monitor.detectors.thresholds import DEFAULT, Thresholds

_GRAVEST_FIRST = tuple(reversed(tuple(Asks)))


def observe(
    state: DetectorState,
    observation: Observation,
    rules: Mapping[str, Asks],
    *,
    frozen: bool = False,
    thresholds: Thresholds = DEFAULT,
) -> tuple[DetectorState, tuple[Finding, ...]]:
    """The state after this step and what the bound rules say of it, the gravest first.

    A value that is not finite enters no statistic, nor does a step without live tokens. `frozen`: an episode is under way, no window takes
    this step. A step that is computed again is told with the state of before.
    """
    if observation.rebased:
        state = rebased(state)
    rate, findings = watch_rate(
        state.rate,
        step=observation.step,
        lr=observation.lr,
        applied_ratio=observation.lr_applied_ratio,
        rebased=observation.rebased,
        rules=rules,
    )
    state = replace(state, rate=rate)
    if not observation.num_live_tokens:
        return state, _ordered(findings)
    if (found := nonfinite(observation, rules=rules)) is not None:
        return state, _ordered([found, *findings])
    for watch in (_watch_figures, _watch_ranks, _watch_rest):
        state, more = watch(state, observation, rules, frozen, thresholds)
        findings += more
    return state, _ordered(findings)


def rebased(state: DetectorState) -> DetectorState:
    """What is no measure any more is forgotten; rates are told apart by their own rules, and what was probed goes on."""
    return DetectorState(rate=state.rate, signals=without_ratios(state.signals))


def nonfinite(observation: Observation, *, rules: Mapping[str, Asks]) -> Finding | None:
    """Of the loss, the gradient norm, or what one rank contributes. A norm that is nan on all ranks alike was not measured."""
    norms = observation.rank_norms
    measured = any(not math.isnan(norm) for norm in norms)
    ranks = sorted(
        {rank for rank, loss in enumerate(observation.rank_losses) if not math.isfinite(loss)}
        | {rank for rank, norm in enumerate(norms) if measured and not math.isfinite(norm)}
    )
    no_loss, no_norm = not math.isfinite(observation.loss), math.isinf(observation.grad_norm) or observation.num_nonfinite > 0
    if "nonfinite" not in rules or not (ranks or no_loss or no_norm):
        return None
    what = "the loss" if no_loss else f"the gradient of {observation.num_nonfinite} tensors" if no_norm else "what a rank contributes"
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    evidence = {"num_nonfinite": observation.num_nonfinite, "loss": observation.loss, "ranks": ranks}
    return Finding("nonfinite", rules["nonfinite"], f"{what} is not finite{where}", observation.step, evidence)


def _watch_figures(
    state: DetectorState, observation: Observation, rules: Mapping[str, Asks], frozen: bool, thresholds: Thresholds
) -> tuple[DetectorState, list[Finding]]:
    """Loss and global norm, each against its own past, and both together."""
    step, loss, norm = observation.step, observation.loss, observation.grad_norm
    findings: list[Finding] = []
    loss_reading, norm_reading = read_loss(state.loss, loss), read_norm(state.norm, norm)
    norm_state, loss_state = state.norm, state.loss
    if norm_reading is not None:
        norm_state, found = watch_norm(norm_state, norm_reading, step=step, rules=rules, thresholds=thresholds)
        findings += found
    if loss_reading is not None:
        norm_z = norm_reading.z if norm_reading is not None else 0.0
        if (single := outlier(step, loss_reading, norm_z=norm_z, rules=rules, thresholds=thresholds)) is not None:
            findings.append(single)
        loss_state, found = sustained(loss_state, loss, step=step, rules=rules, thresholds=thresholds)
        findings += found
    if not frozen:
        loss_state = take_loss(loss_state, loss, reading=loss_reading)
        norm_state = take_norm(norm_state, norm, reading=norm_reading)
    return replace(state, loss=loss_state, norm=norm_state), findings


def _watch_ranks(
    state: DetectorState, observation: Observation, rules: Mapping[str, Asks], frozen: bool, thresholds: Thresholds
) -> tuple[DetectorState, list[Finding]]:
    ranks, findings = watch_ranks(
        state.ranks,
        step=observation.step,
        losses=observation.rank_losses,
        norms=observation.rank_norms,
        tokens=observation.rank_tokens,
        rules=rules,
        frozen=frozen,
    )
    return replace(state, ranks=ranks), findings


def _watch_rest(
    state: DetectorState, observation: Observation, rules: Mapping[str, Asks], frozen: bool, thresholds: Thresholds
) -> tuple[DetectorState, list[Finding]]:
    step = observation.step
    signals, findings = watch_signals(
        state.signals,
        step=step,
        probes=observation.probes,
        update_ratios=observation.update_ratios,
        rules=rules,
        frozen=frozen,
        is_warming=state.rate.growth > 0.0,
    )
    classic, found = watch_classics(
        state.classic,
        step=step,
        loss=observation.loss,
        norm=observation.grad_norm,
        rank_norms=observation.rank_norms,
        rules=rules,
        thresholds=thresholds,
        frozen=frozen,
    )
    if frozen:
        return replace(state, signals=signals, classic=classic), [*findings, *found]
    plateau, flat = watch_plateau(state.plateau, observation.loss, step=step, rules=rules)
    return replace(state, signals=signals, classic=classic, plateau=plateau), [*findings, *found, *flat]


def _ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: _GRAVEST_FIRST.index(finding.asks)))
