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
FEW_RANKS, TAIL_ROOT = 8, 0.25
"""What these figures were measured with. Of more ranks, one weighs less in their sum: the factor grows in proportion. And the farthest of
more is farther out, by the fourth root where tails are as heavy as Student's t of 4 degrees: the numbers of spreads grow so."""

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
    limit = _norm_limit(spread, num_ranks=len(logs), count=state.count)
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


def _norm_limit(spread: float, *, num_ranks: int, count: int) -> float:
    times = max(1.0, num_ranks / FEW_RANKS)
    if count < NUM_LEAST:
        return 2.0 * math.log(NORM_FACTOR) + math.log(times)
    return max(math.log(NORM_FACTOR * times), NORM_SPREADS * spread * math.pow(times, TAIL_ROOT))


def _losses(
    state: RankState, losses: Floats, *, live: Floats, step: int, rules: Mapping[str, Asks], frozen: bool
) -> tuple[RankState, list[Finding]]:
    """Sampling noise shrinks with the square root of the tokens."""
    if np.count_nonzero(np.isfinite(losses)) < 2:
        return state, []
    weights = np.sqrt(live / max(1.0, float(live.mean())))
    spread = max(state.loss_spread, LOSS_SPREAD_FLOOR) if state.count else math.inf
    excess = _beside_usual(losses, weights, named=np.asarray(state.named), reach=PATIENCE * spread)
    is_compared = np.isfinite(excess)
    excess[~is_compared] = 0.0
    findings: list[Finding] = []
    if state.count >= NUM_LEAST_LOSSES:
        z = excess / spread
        state, worst = _add(state, z, step=step)
        if worst is not None and "rank_loss" in rules:
            told = f"the loss of rank {worst} is {losses[worst]:.4g}, {z[worst]:+.1f} spreads from the other ranks'"
            evidence = {"ranks": [worst], "loss": float(losses[worst]), "z": float(z[worst])}
            onset_step = state.onset_steps[worst] if state.onset_steps[worst] >= 0 else step
            findings.append(Finding("rank_loss", rules["rank_loss"], told, onset_step, evidence))
    if frozen or not is_compared.any():
        return state, findings
    far = PATIENCE * spread if math.isfinite(spread) else math.inf
    new = float(np.minimum(np.abs(excess[is_compared]), far).mean())
    return replace(state, loss_spread=_moved(state.loss_spread, new, count=state.count)), findings


def _beside_usual(losses: Floats, weights: Floats, *, named: NDArray[np.bool_], reach: float) -> Floats:
    """Each rank beside the others, of which those that are named and the farthest beyond `reach` do not count: what one has too much
    makes no other look too low. nan where nobody is left to compare with."""
    excess = beside_others(losses) * weights
    out = named.copy()
    worst = _farthest(np.where(np.isnan(excess), 0.0, excess))
    out[worst] |= bool(abs(excess[worst]) > reach)
    if not out.any():
        return excess
    usual = np.where(out, np.nan, losses)
    num = int(np.count_nonzero(np.isfinite(usual)))
    if num == 0:
        return np.full(len(losses), np.nan)
    beside = beside_others(usual) if num > 1 else np.full(len(losses), np.nan)
    return np.asarray(np.where(out, losses - np.nanmedian(usual), beside) * weights)


def _farthest(excess: Floats) -> int:
    """Of two that are as far, as two ranks always are, the one above."""
    high, low = int(np.argmax(excess)), int(np.argmin(excess))
    return high if excess[high] >= -excess[low] else low


def _add(state: RankState, z: Floats, *, step: int) -> tuple[RankState, int | None]:
    """A cumulative sum to each side for each rank, and the one rank that stands out most now, by one loss or by many. As `cusum.Cusum`, for
    all ranks at once; a rank that is named is not named again before its sum fell to half. The sums of the others begin anew then: they
    were held against a median that had it among them."""
    change, most = _within(z, MOST_Z), LOSS.height + MOST_Z
    above = np.minimum(np.maximum(np.asarray(state.above) + change - LOSS.slack, 0.0), most)
    below = np.minimum(np.maximum(np.asarray(state.below) - change - LOSS.slack, 0.0), most)
    before, named = np.asarray(state.onset_steps), np.asarray(state.named)
    far = np.abs(z) > LOSS_SPREADS * max(1.0, len(z) / FEW_RANKS) ** TAIL_ROOT
    ill = np.flatnonzero(((np.maximum(above, below) > LOSS.height) & ~named) | far)
    score = z if far.any() else np.where(above >= below, above, -below)
    worst = int(ill[_farthest(score[ill])]) if len(ill) else None
    if worst is not None:
        others = ~named
        others[worst] = False
        above[others] = below[others] = 0.0
    total = np.maximum(above, below)
    onset_steps = np.where(total > 0.0, np.where(before < 0, step, before), -1)
    if worst is not None:
        named[worst] = True
    named &= total >= LOSS.height / 2.0
    moved = replace(
        state,
        above=tuple(above.tolist()),
        below=tuple(below.tolist()),
        onset_steps=tuple(onset_steps.tolist()),
        named=tuple(named.tolist()),
    )
    return moved, worst


def _within(values: Floats, reach: float) -> Floats:
    return np.asarray(np.minimum(np.maximum(values, -reach), reach))  # a third of the time of np.clip on few ranks


def _rate(count: int) -> float:
    return max(RATE, 1.0 / (count + 1))


def _moved(spread: float, new: float, *, count: int) -> float:
    return new if not math.isfinite(spread) else spread + _rate(count) * (new - spread)
