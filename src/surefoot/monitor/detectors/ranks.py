"""Rules of single ranks: one's gradient or loss against the others' of the same step, and against what it usually is beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.cusum import Cusum, Limits

Floats = NDArray[np.float64]

NORM_FACTOR = 8.0
"""A rank's norm beside the others' must be so many times what it usually is: a document of one repeated byte makes two or three, a flipped
high bit of an exponent ten thousand and more."""

NORM_SPREADS, LOSS_SPREADS = 12.0, 10.0
LOSS = Limits(slack=1.0, height=20.0)
NUM_LEAST = 16
LEAST_SHARE = 0.25
"""A rank with fewer live tokens than this share of the median is not judged: its noise is its own."""

RATE, PATIENCE = 1.0 / 32.0, 3.0
"""Centres and spreads move by this share of what is new, and what is further than `PATIENCE` spreads counts as that far."""

NORM_SPREAD_FLOOR, LOSS_SPREAD_FLOOR = 0.05, 1e-4


@dataclass(frozen=True, slots=True)
class RankState:
    """After `count` steps of as many ranks as `centres` has. Norms: log ratio to the median of the others. Losses: nats per token above it.

    Spreads are mean absolute deviations, over steps and ranks together.
    """

    count: int = 0
    centres: tuple[float, ...] = ()
    norm_spread: float = math.nan
    loss_spread: float = math.nan
    above: tuple[Cusum, ...] = ()
    below: tuple[Cusum, ...] = ()


def beside_others(values: Floats) -> Floats:
    """Each value less the median of the others; nan where it, or all others, are nan. At least two."""
    if len(values) >= 16:
        return np.asarray(values - np.nanmedian(values))  # leaving one of many out moves nothing
    others = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    known = np.isfinite(others).any(axis=1)
    middle = np.full(len(values), np.nan)
    if known.any():
        middle[known] = np.nanmedian(others[known], axis=1)
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
        state = RankState(0, (0.0,) * num, above=(Cusum(),) * num, below=(Cusum(),) * num)
    live = np.asarray(tokens, dtype=np.float64)
    per_token = np.where(live >= max(1.0, LEAST_SHARE * float(np.median(live))), live, np.nan)
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
    excess = beside_others(logs) - np.asarray(state.centres)
    spread = max(state.norm_spread, NORM_SPREAD_FLOOR) if state.count else math.inf
    limit = max(math.log(NORM_FACTOR), NORM_SPREADS * spread) if state.count >= NUM_LEAST else math.log(NORM_FACTOR) * 2.0
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
    new = np.clip(np.nan_to_num(excess), -far, far)
    spread = _moved(state.norm_spread, float(np.abs(new).mean()), count=state.count)
    centres = np.asarray(state.centres) + _rate(state.count) * new
    return replace(state, centres=tuple(centres.tolist()), norm_spread=spread), findings


def _losses(
    state: RankState, losses: Floats, *, live: Floats, step: int, rules: Mapping[str, Asks], frozen: bool
) -> tuple[RankState, list[Finding]]:
    """Sampling noise shrinks with the square root of the tokens."""
    if np.count_nonzero(np.isfinite(losses)) < 2:
        return state, []
    excess = np.nan_to_num(beside_others(losses) * np.sqrt(live / max(1.0, float(live.mean()))))
    spread = max(state.loss_spread, LOSS_SPREAD_FLOOR) if state.count else math.inf
    z = excess / spread
    findings: list[Finding] = []
    above, below = list(state.above), list(state.below)
    if state.count >= NUM_LEAST:
        ill, onset_step = _outstanding(z, above, below, step=step)
        if ill and "rank_loss" in rules:
            worst = max(ill, key=lambda rank: abs(float(z[rank])))
            told = f"the loss of rank {worst} is {float(losses[worst]):.4g}, {float(z[worst]):+.1f} spreads from the other ranks'"
            evidence = {"ranks": ill, "loss": float(losses[worst]), "z": float(z[worst])}
            findings.append(Finding("rank_loss", rules["rank_loss"], told, onset_step, evidence))
    state = replace(state, above=tuple(above), below=tuple(below))
    if frozen:
        return state, findings
    far = PATIENCE * spread if math.isfinite(spread) else math.inf
    return replace(
        state, loss_spread=_moved(state.loss_spread, float(np.abs(np.clip(excess, -far, far)).mean()), count=state.count)
    ), findings


def _outstanding(z: Floats, above: list[Cusum], below: list[Cusum], *, step: int) -> tuple[list[int], int]:
    """The ranks that stand out now or have for a while, and since when; both lists of sums are moved on."""
    ill, onset_step = [], step
    for rank, value in enumerate(z.tolist()):
        above[rank], is_above = above[rank].add(value, step=step, limits=LOSS)
        below[rank], is_below = below[rank].add(-value, step=step, limits=LOSS)
        if is_above or is_below or abs(value) > LOSS_SPREADS:
            ill.append(rank)
        if is_above or is_below:
            onset_step = min(onset_step, (above if is_above else below)[rank].onset_step)
    return ill, onset_step


def _rate(count: int) -> float:
    return max(RATE, 1.0 / (count + 1))


def _moved(spread: float, new: float, *, count: int) -> float:
    return new if not math.isfinite(spread) else spread + _rate(count) * (new - spread)
