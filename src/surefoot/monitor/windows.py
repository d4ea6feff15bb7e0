"""The loss over the newest steps: mean, deviation and quantiles over a short and a long window. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

WINDOWS = (128, 500)
"""Steps. The short one is that of the common rules; over the long one a slow drift shows."""

_QUANTILES = (10, 50, 90)


def with_loss(losses: Sequence[float], loss: float) -> tuple[float, ...]:
    """The newest finite losses, one more added. What is not finite enters nothing."""
    return (*losses[-max(WINDOWS) + 1 :], loss) if math.isfinite(loss) else tuple(losses)


def loss_figures(losses: Sequence[float]) -> Mapping[str, float]:
    """`loss_mean_128` and so on, in nats per token; over as many as there are, and none before two are."""
    if len(losses) < 2:
        return {}
    figures: dict[str, float] = {}
    for window in WINDOWS:
        newest = np.sort(np.asarray(losses[-window:]))
        figures[f"loss_mean_{window}"] = float(newest.mean())
        figures[f"loss_std_{window}"] = float(newest.std(ddof=1))
        for percent in _QUANTILES:
            figures[f"loss_p{percent}_{window}"] = _quantile(newest, percent / 100)
    return figures


def _quantile(ascending: np.ndarray, share: float) -> float:
    """Between its two neighbours, in proportion: numpy's default, at a tenth of its cost for so few values."""
    place = share * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return float(ascending[below] + (place - below) * (ascending[above] - ascending[below]))
