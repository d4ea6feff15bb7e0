"""One-sided cumulative sums: many small excesses in a row count as much as a large one (Page, Biometrika 41, 1954)."""

from __future__ import annotations

from dataclasses import dataclass

MOST_Z = 4.0
"""One value counts for so many sigmas at most, so no single outlier reaches a threshold of 12."""

REPEAT = 64
"""Observations after which an excess that goes on is said again: votes of other tiers may come later."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`slack` sigmas a step are forgiven; above `height` it speaks, and again every `repeat` observations while it stays there."""

    slack: float
    height: float
    repeat: float = REPEAT


@dataclass(frozen=True, slots=True)
class Cusum:
    """`onset_step` is where `total` last left zero, -1 at zero; `told` counts the observations since it spoke, 0 when it may speak."""

    total: float = 0.0
    onset_step: int = -1
    told: int = 0

    def add(self, z: float, *, step: int, limits: Limits) -> tuple[Cusum, bool]:
        """The sum after one more value, and whether it speaks now.

        The sum stops a little above its height, so that it is back soon after the excess ends, and speaks anew only after it fell to half.
        """
        total = self.total + max(-MOST_Z, min(MOST_Z, z)) - limits.slack
        if total <= 0.0:
            return Cusum(), False
        total = min(total, limits.height + MOST_Z)
        onset_step = self.onset_step if self.total > 0.0 else step
        above = total > limits.height
        if self.told and total >= limits.height / 2.0:
            speaks = above and self.told >= limits.repeat
            return Cusum(total, onset_step, 1 if speaks else self.told + 1), speaks
        return Cusum(total, onset_step, int(above)), above


AT_ZERO = Cusum()
