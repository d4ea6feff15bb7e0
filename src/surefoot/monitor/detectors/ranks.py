"""Rules of single ranks: one's gradient or loss against the others' of the same step, and against what it usually is beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.cusum import MOST_Z, Limits

Floats = NDArray[np.float64]

NORM_FACTOR = 30.0
"""A rank's norm beside the others' must be so many times what it usually is: two sequences per rank reach 8 in the first steps of healthy
small runs, a flipped high bit of an exponent ten thousand and more."""

NORM_SPREADS, LOSS_SPREADS = 12.0, 20.0
LOSS = Limits(slack=1.0, height=20.0)
NUM_LEAST, NUM_LEAST_LOSSES = 16, 64
LEAST_SHARE = 0.25
"""A rank with fewer live tokens than this share of the median is not judged: its noise is its own."""

RATE, PATIENCE = 1.0 / 32.0, 3.0
"""Centres and spreads move by this share of what is new, and what is further than `PATIENCE` spreads counts as that far."""

NORM_SPREAD_FLOOR, LOSS_SPREAD_FLOOR = 0.05, 1e-4


@dataclass(frozen=True, slots=True)
class RankState:
    """After `count` steps of as many ranks as `centres` has. Norms: log ratio to the median of the others. Losses: nats per token above it.

    Spreads are mean absolute deviations, over steps and ranks together. `above` and `below` are cumulative sums of the losses,
    `onset_steps` where they left zero.
    """

    count: int = 0
    centres: tuple[float, ...] = ()
    norm_spread: float = math.nan
    loss_spread: float = math.nan
    above: tuple[float, ...] = ()
    below: tuple[float, ...] = ()
    onset_steps: tuple[int, ...] = ()
    named: tuple[bool, ...] = ()


def beside_others(values: Floats) -> Floats:
    """Each value less the median of the others, nan aside; nan where it is. At least two values must be numbers."""
    order = np.argsort(values)  # nan comes last
    place = np.empty(len(values), dtype=np.intp)
    place[order] = np.arange(len(values))
    ordered, num_others = values[order], int(np.count_nonzero(~np.isnan(values))) - 1
    half = num_others // 2
    middle = ordered[half + (half >= place)]
    if num_others % 2 == 0:
        middle = (middle + ordered[half - 1 + (half - 1 >= place)]) / 2.0
    return np.asarray(values - middle)


def watch_ranks(
    state: RankState,
    *,
    step: int,
    losses: Sequence[float],
    norms: Sequence[float],
    tokens: Sequence[int],
    rules: Mapping[str, Asks],
    frozen: bool,
) -> tuple[RankState, list[Finding]]:
    """Nothing for a single rank: the rules of the global norm and loss see all there is."""
    num = len(tokens)
    if num < 2:
        return RankState(), []
    if len(state.centres) != num:
        zeros = (0.0,) * num
        state = RankState(0, centres=zeros, above=zeros, below=zeros, onset_steps=(-1,) * num, named=(False,) * num)
    live = np.asarray(tokens, dtype=np.float64)
    per_token = np.where(live >= max(1.0, LEAST_SHARE * float(np.sort(live)[num // 2])), live, np.nan)
    state, findings = _norms(state, _logs(norms, per_token), step=step, rules=rules, frozen=frozen)
    if len(losses) == num:
        state, more = _losses(state, np.asarray(losses) / per_token, live=live, step=step, rules=rules, frozen=frozen)
        findings += more
    return state if frozen else replace(state, count=state.count + 1), findings


def _logs(norms: Sequence[float], per_token: Floats) -> Floats:
    values = np.asarray(norms, dtype=np.float64)
    if len(values) != len(per_token):
        return np.full(len(per_token), np.nan)
    values = np.where(np.isfinite(values) & (values > 0.0), values, np.nan) / per_token
    return np.asarray(np.log(values))


def _norms(state: RankState, logs: Floats, *, step: int, rules: Mapping[str, Asks], frozen: bool) -> tuple[RankState, list[Finding]]:
    if np.count_nonzero(np.isfinite(logs)) < 2:
        return state, []
    centres = np.asarray(state.centres)
    excess = beside_others(logs) - centres
    spread = max(state.norm_spread, NORM_SPREAD_FLOOR) if state.count else math.inf
    limit = max(math.log(NORM_FACTOR), NORM_SPREADS * spread) if state.count >= NUM_LEAST else 2.0 * math.log(NORM_FACTOR)
    ill = np.flatnonzero(excess > limit)
    findings = []
    if len(ill) and "rank_norm" in rules:
        worst = int(np.nanargmax(excess))
        times = math.exp(min(700.0, float(excess[worst])))
        told = f"the gradient of rank {worst} is {times:.3g} times what it usually is beside the other ranks'"
        evidence = {"ranks": [int(rank) for rank in ill], "times": times, "limit": math.exp(min(700.0, limit))}
        findings.append(Finding("rank_norm", rules["rank_norm"], told, step, evidence))
    if frozen:
        return state, findings
    far = PATIENCE * (spread if math.isfinite(spread) else 1.0)
    new = _within(np.where(np.isnan(excess), 0.0, excess), far)
    spread = _moved(state.norm_spread, float(np.abs(new).mean()), count=state.count)
    centres += _rate(state.count) * new
    return replace(state, centres=tuple(centres.tolist()), norm_spread=spread), findings


def _losses(
    state: RankState, losses: Floats, *, live: Floats, step: int, rules: Mapping[str, Asks], frozen: bool
) -> tuple[RankState, list[Finding]]:
    """Sampling noise shrinks with the square root of the tokens."""
    if np.count_nonzero(np.isfinite(losses)) < 2:
        return state, []
    excess = beside_others(losses) * np.sqrt(live / max(1.0, float(live.mean())))
    excess[np.isnan(excess)] = 0.0
    spread = max(state.loss_spread, LOSS_SPREAD_FLOOR) if state.count else math.inf
    findings: list[Finding] = []
    if state.count >= NUM_LEAST_LOSSES:
        z = excess / spread
        state, ill = _add(state, z, step=step)
        if len(ill) and "rank_loss" in rules:
            worst = int(ill[np.argmax(np.abs(z[ill]))])
            told = f"the loss of rank {worst} is {losses[worst]:.4g}, {z[worst]:+.1f} spreads from the other ranks'"
            evidence = {"ranks": ill.tolist(), "loss": float(losses[worst]), "z": float(z[worst])}
            onset_step = min(state.onset_steps[rank] if state.onset_steps[rank] >= 0 else step for rank in ill.tolist())
            findings.append(Finding("rank_loss", rules["rank_loss"], told, onset_step, evidence))
    if frozen:
        return state, findings
    far = PATIENCE * spread if math.isfinite(spread) else math.inf
    new = float(np.minimum(np.abs(excess), far).mean())
    return replace(state, loss_spread=_moved(state.loss_spread, new, count=state.count)), findings


def _add(state: RankState, z: Floats, *, step: int) -> tuple[RankState, NDArray[np.intp]]:
    """A cumulative sum to each side for each rank, and the ranks that stand out now, by one loss or by many. As `cusum.Cusum`, for all
    ranks at once; a rank that is named is not named again before its sum fell to half."""
    change, most = _within(z, MOST_Z), LOSS.height + MOST_Z
    above = np.minimum(np.maximum(np.asarray(state.above) + change - LOSS.slack, 0.0), most)
    below = np.minimum(np.maximum(np.asarray(state.below) - change - LOSS.slack, 0.0), most)
    total, named = np.maximum(above, below), np.asarray(state.named)
    before = np.asarray(state.onset_steps)
    onset_steps = np.where(total > 0.0, np.where(before < 0, step, before), -1)
    speaks = ((total > LOSS.height) & ~named) | (np.abs(z) > LOSS_SPREADS)
    named = (total >= LOSS.height / 2.0) & (named | speaks)
    moved = replace(
        state,
        above=tuple(above.tolist()),
        below=tuple(below.tolist()),
        onset_steps=tuple(onset_steps.tolist()),
        named=tuple(named.tolist()),
    )
    return moved, np.flatnonzero(speaks)


def _within(values: Floats, reach: float) -> Floats:
    return np.asarray(np.minimum(np.maximum(values, -reach), reach))  # a third of the time of np.clip on few ranks


def _rate(count: int) -> float:
    return max(RATE, 1.0 / (count + 1))


def _moved(spread: float, new: float, *, count: int) -> float:
    return new if not math.isfinite(spread) else spread + _rate(count) * (new - spread)
