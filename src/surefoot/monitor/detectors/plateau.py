"""A plateau: the loss stopped falling while its own past says that it should still fall."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from surefoot.core.records import Asks, Finding
from surefoot.monitor.detectors.robust import SIGMA_OF_MAD, median

BLOCK, NUM_BLOCKS = 64, 16
"""Medians of 64 losses, 8 of them for the forecast and 8 for what came: 1,024 losses in all."""

SLOWER = 0.5
"""Learning slows down: half of the fall of the first half is what is expected of the second."""

SURE = 5.0
"""Standard errors that the expected fall must exceed before its absence says anything."""


@dataclass(frozen=True, slots=True)
class PlateauState:
    """`losses` of the block under way, `blocks` the medians of those before; `is_told` until the loss falls again."""

    losses: tuple[float, ...] = ()
    blocks: tuple[float, ...] = ()
    is_told: bool = False


def watch_plateau(state: PlateauState, loss: float, *, step: int, rules: Mapping[str, Asks]) -> tuple[PlateauState, list[Finding]]:
    losses = (*state.losses, loss)
    if len(losses) < BLOCK:
        return replace(state, losses=losses), []
    blocks = (*state.blocks[-(NUM_BLOCKS - 1) :], median(sorted(losses)))
    state = PlateauState((), blocks, state.is_told)
    if len(blocks) < NUM_BLOCKS:
        return state, []
    half = NUM_BLOCKS // 2
    first, second = _line(blocks[:half]), _line(blocks[half:])
    error = max(first[1], second[1], 1e-4 * abs(blocks[-1]))
    expected = SLOWER * -first[0]
    is_flat = expected > SURE * error and second[0] > -error
    if not is_flat or state.is_told or "plateau" not in rules:
        return replace(state, is_told=is_flat), []
    told = f"the loss fell by {-first[0]:.4g} nats in {half * BLOCK} steps, and by {-second[0]:.4g} in as many since"
    evidence = {"fell": -first[0], "falls": -second[0], "noise": error, "level": blocks[-1]}
    return replace(state, is_told=True), [Finding("plateau", rules["plateau"], told, step - half * BLOCK, evidence)]


def _line(blocks: tuple[float, ...]) -> tuple[float, float]:
    """(change over all blocks, its standard error) of a least-squares line."""
    num = len(blocks)
    centre = (num - 1) / 2.0
    spread = sum((place - centre) ** 2 for place in range(num))
    slope = sum((place - centre) * value for place, value in enumerate(blocks)) / spread
    mean = math.fsum(blocks) / num
    residuals = [value - mean - slope * (place - centre) for place, value in enumerate(blocks)]
    sigma = SIGMA_OF_MAD * median(sorted(map(abs, residuals)))
    return slope * num, sigma * num / math.sqrt(spread)
