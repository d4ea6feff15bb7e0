"""Whether the best learning rate of a narrow model is that of a wide one: learning rates tried at several widths. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from surefoot.core.errors import DataError


@dataclass(frozen=True, slots=True)
class TriedRate:
    d_model: int
    lr: float
    loss: float


@dataclass(frozen=True, slots=True)
class BestRate:
    """Of one width: the vertex of the parabola through the best rate and its neighbours, over log lr. At the edge, the best one tried."""

    d_model: int
    best_lr: float
    loss: float
    is_inside: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """`exponent` of the width in the best rate, from the widths whose best is inside; None with fewer than two of them.

    `price_of_first`: how much more loss a width has at the rate, among those tried, that was best for the narrowest. A width without
    a run at that rate is not in it.
    """

    widths: tuple[BestRate, ...]
    exponent: float | None
    price_of_first: Mapping[int, float]


def transfer(tried: Sequence[TriedRate]) -> Transfer:
    """Raises DataError where no rate was tried at two widths."""
    ordered = sorted(tried, key=lambda one: (one.d_model, one.lr))
    by_width = {width: list(group) for width, group in groupby(ordered, key=lambda one: one.d_model)}
    if len(by_width) < 2:
        raise DataError(f"{len(by_width)} widths", where="transfer", hint="train the others: surefoot sweep run DIR")
    widths = tuple(_best(rates) for rates in by_width.values())
    inside = [one for one in widths if one.is_inside]
    exponent = None
    if len(inside) > 1:
        logs = np.log([one.d_model for one in inside]), np.log([one.best_lr for one in inside])
        exponent = float(np.polyfit(*logs, 1)[0])
    narrow = min(next(iter(by_width.values())), key=lambda one: one.loss).lr
    prices = {width: _price(rates, lr=narrow) for width, rates in by_width.items()}
    return Transfer(widths, exponent, {width: price for width, price in prices.items() if price is not None})


def _best(rates: Sequence[TriedRate]) -> BestRate:
    place = min(range(len(rates)), key=lambda index: rates[index].loss)
    best = rates[place]
    if not 0 < place < len(rates) - 1:
        return BestRate(best.d_model, best.lr, best.loss, is_inside=False)
    near = rates[place - 1 : place + 2]
    x = np.log([one.lr / best.lr for one in near])
    curve, slope, level = (float(part) for part in np.polyfit(x, [one.loss for one in near], 2))
    at = -slope / (2 * curve)
    return BestRate(best.d_model, best.lr * math.exp(at), level + at * slope / 2, is_inside=True)


def _price(rates: Sequence[TriedRate], *, lr: float) -> float | None:
    there = [one.loss for one in rates if math.isclose(one.lr, lr, rel_tol=1e-6)]
    return min(there) - min(one.loss for one in rates) if there else None
