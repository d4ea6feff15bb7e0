"""Rules that are told in books and repositories, as they are told, outliers in their own windows included. Bound by name alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.thresholds import Thresholds

NUM_LOSSES, NUM_LOSSES_LEAST = 128, 64
NUM_NORMS = 1000
REPLICA_FACTOR = 2.0
RECOVERED_SHARE, RECOVER_STEPS = 1.05, 200
NAMES = frozenset(
    {"norm_over_clip", "norm_5x_mean_1000", "norm_100x_mean_1000", "loss_n_sigma", "recover_5pct_200", "replica_norm_compare"}
)


@dataclass(frozen=True, slots=True)
class ClassicState:
    """`spike_step` is that of the last loss over N sigma that is not settled yet, -1 for none, and `before` the mean then."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    spike_step: int = -1
    before: float = math.nan


def watch_classics(
    state: ClassicState,
    *,
    step: int,
    loss: float,
    norm: float,
    rank_norms: tuple[float, ...],
    rules: Mapping[str, Asks],
    thresholds: Thresholds,
    frozen: bool,
) -> tuple[ClassicState, list[Finding]]:
    """Keeps nothing, and costs nothing, where none of them is bound."""
    if NAMES.isdisjoint(rules):
        return state, []
    findings = _norm_rules(state, step=step, norm=norm, rank_norms=rank_norms, rules=rules, thresholds=thresholds)
    state, found = _loss_rules(state, step=step, loss=loss, rules=rules, thresholds=thresholds)
    if not frozen:
        losses = (*state.losses[-(NUM_LOSSES - 1) :], loss)
        norms = (*state.norms[-(NUM_NORMS - 1) :], norm) if math.isfinite(norm) else state.norms
        state = replace(state, losses=losses, norms=norms)
    return state, [*findings, *found]


def _norm_rules(
    state: ClassicState, *, step: int, norm: float, rank_norms: tuple[float, ...], rules: Mapping[str, Asks], thresholds: Thresholds
) -> list[Finding]:
    findings = []
    if "norm_over_clip" in rules and norm > thresholds.classic_max_norm:
        told = f"the gradient norm {norm:.3g} is over {thresholds.classic_max_norm:g}"
        findings.append(
            Finding("norm_over_clip", rules["norm_over_clip"], told, step, {"value": norm, "limit": thresholds.classic_max_norm})
        )
    if state.norms:
        mean = math.fsum(state.norms) / len(state.norms)
        for name, factor in (("norm_100x_mean_1000", 100.0), ("norm_5x_mean_1000", 5.0)):
            if name in rules and norm > factor * mean:
                told = f"the gradient norm {norm:.3g} is over {factor:g} times its mean of {mean:.3g}"
                findings.append(Finding(name, rules[name], told, step, {"value": norm, "mean": mean}))
    known = [value for value in rank_norms if math.isfinite(value) and value > 0.0]
    if "replica_norm_compare" in rules and len(known) > 1 and max(known) > REPLICA_FACTOR * min(known):
        worst = rank_norms.index(max(known))
        told = f"the gradient norm of rank {worst} is {max(known) / min(known):.3g} times the smallest of all ranks"
        evidence = {"ranks": [worst], "times": max(known) / min(known)}
        findings.append(Finding("replica_norm_compare", rules["replica_norm_compare"], told, step, evidence))
    return findings


def _loss_rules(
    state: ClassicState, *, step: int, loss: float, rules: Mapping[str, Asks], thresholds: Thresholds
) -> tuple[ClassicState, list[Finding]]:
    findings = []
    if len(state.losses) >= NUM_LOSSES_LEAST:
        mean = math.fsum(state.losses) / len(state.losses)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in state.losses) / (len(state.losses) - 1))
        limit = mean + thresholds.classic_sigmas * sigma
        if loss > limit:
            if "loss_n_sigma" in rules:
                told = f"the loss {loss:.4g} is over {limit:.4g}, {thresholds.classic_sigmas:g} sigma above its mean of {mean:.4g}"
                evidence = {"value": loss, "mean": mean, "sigma": sigma}
                findings.append(Finding("loss_n_sigma", rules["loss_n_sigma"], told, step, evidence))
            if state.spike_step < 0:
                state = replace(state, spike_step=step, before=mean)
    if state.spike_step < 0 or step < state.spike_step + RECOVER_STEPS:
        return state, findings
    if loss > RECOVERED_SHARE * state.before and "recover_5pct_200" in rules:
        told = f"the loss {loss:.4g} is not back within 5% of {state.before:.4g}, {RECOVER_STEPS} steps after step {state.spike_step}"
        evidence = {"value": loss, "before": state.before}
        findings.append(Finding("recover_5pct_200", rules["recover_5pct_200"], told, state.spike_step, evidence))
    return replace(state, spike_step=-1, before=math.nan), findings
