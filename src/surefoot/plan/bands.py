"""95% bands of draws. Standard library only: what asks a law needs no numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable


def band(values: Iterable[float]) -> tuple[float, float]:
    """(2.5%, 97.5%) of the finite values, between order statistics as numpy does; NaN where there is none."""
    ordered = sorted(value for value in map(float, values) if math.isfinite(value))
    return (_quantile(ordered, 0.025), _quantile(ordered, 0.975)) if ordered else (math.nan, math.nan)


def _quantile(ordered: list[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
