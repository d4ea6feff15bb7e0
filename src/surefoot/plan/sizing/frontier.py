"""One budget spent in all ways that make sense: a row for each size, with its loss, bands, and what serving it would cost. Pure.

The choice among the rows is the person's: the plan says what each costs, chooses by the one rule that fits what was asked, and says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.core.errors import ConfigError
from surefoot.plan.bands import band
from surefoot.plan.records import Reason
from surefoot.plan.sizing import allocation
from surefoot.plan.sizing.allocation import Bowl, Point, Serving
from surefoot.plan.sizing.epoch_draws import epoch_draws
from surefoot.plan.sizing.epochs import epochs_warning
from surefoot.plan.sizing.laws import ORDINARY_RATIO, Law
from surefoot.plan.sizing.published import EPOCH
from surefoot.plan.surface_record import Surface

LADDER = tuple(2.0 ** (-step / 2.0) for step in range(-2, 8))
"""Sizes that are shown, as shares of the best one: twice as large down to a twelfth, by steps of the square root of 2."""

Band = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Wish:
    """What is known of the model's life. None where nobody said. `n` fixes the size."""

    serving: Serving | None = None
    unique_tokens: float | None = None
    n: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`over_best`: nats above the best row. `as_good_at`: the share of the budget at which the best model would be as good.
    `serve_ratio`: FLOPs of serving over FLOPs of training. `mark` says what the row is, where it is something special."""

    n: float
    tokens: float
    loss: float
    loss_band: Band | None
    over_best: float
    over_best_band: Band | None
    as_good_at: float
    serve_ratio: float | None
    epochs: float | None
    mark: str = ""

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.n


@dataclass(frozen=True, slots=True)
class Frontier:
    """Rows from the largest size to the smallest. `larger_by_2` and `smaller_by_2`: nats that a size twice or half the best one costs."""

    law: Law
    flops: float
    rows: tuple[Row, ...]
    choice: Row
    best: Row
    n_band: Band | None
    ratio_band: Band | None
    extrapolation: float
    larger_by_2: float
    smaller_by_2: float
    reason: Reason
    warnings: tuple[str, ...]


def frontier(law: Law, flops: float, *, wish: Wish | None = None, sizes: Sequence[float] = ()) -> Frontier:
    """What `flops` of training buy by `law`. `sizes` replaces the ladder. Raises ConfigError for a budget or size that is none."""
    wish = wish or Wish()
    _check(flops, (*sizes, *([wish.n] if wish.n is not None else [])), wish.serving)
    bowl = allocation.bowl(law, flops, unique_tokens=wish.unique_tokens)
    levels, drawn = _levels(law, bowl, flops, wish.unique_tokens)
    best = allocation.best(bowl, flops)
    special = _special(bowl, flops, wish)
    ladder = sizes or tuple(_rounded(best.n * share) for share in LADDER)
    shown = [(bowl.at(n, flops), "") for n in ladder if all(abs(math.log(n / point.n)) > 0.02 for point, _ in special)]
    rows = [_row(levels, drawn, point, flops, wish, mark) for point, mark in sorted((*shown, *special), key=lambda row: -row[0].n)]
    chosen = special[-1][0]
    choice = next(row for row in rows if row.n == chosen.n)
    return Frontier(
        law=law,
        flops=flops,
        rows=tuple(rows),
        choice=choice,
        best=next(row for row in rows if row.n == best.n),
        n_band=law.n_band(flops),
        ratio_band=law.ratio_band(flops),
        extrapolation=law.extrapolation(flops),
        larger_by_2=bowl.at(2.0 * best.n, flops).loss - best.loss,
        smaller_by_2=bowl.at(best.n / 2.0, flops).loss - best.loss,
        reason=_reason(law, wish, choice),
        warnings=(*law.warnings(flops), *_warnings(law, bowl, choice, wish)),
    )


def _check(flops: float, sizes: Sequence[float], serving: Serving | None) -> None:
    if not 0 < flops < math.inf:
        raise ConfigError(f"a budget of {flops:g} FLOPs", where="--flops", hint="give a number above 0", got=flops)
    if serving and not (0 < serving.tokens < math.inf and 0 < serving.relative_cost < math.inf):
        what = f"{serving.tokens:g} served tokens at {serving.relative_cost:g} of the price of training"
        raise ConfigError(what, where="--serve-tokens", hint="give numbers above 0, or leave it out", got=serving.tokens)
    for n in sizes:
        if not 0 < n < math.inf:
            raise ConfigError(f"{n:g} parameters", where="--params", hint="give a number above 0", got=n)


def _special(bowl: Bowl, flops: float, wish: Wish) -> list[tuple[Point, str]]:
    """Points that are always shown, each once; the last is the one that is chosen."""
    best = allocation.best(bowl, flops)
    points = [(best, "least loss" if not bowl.borrowed else "best by the law")]
    if wish.serving:
        points.append((allocation.for_serving(bowl, flops, serving=wish.serving), "cheapest life"))
    elif wish.n is None:
        points.insert(0, (allocation.served_as_much_as_trained(bowl, flops), "best if serving will cost as much as training"))
    if wish.n is not None:
        points.append((bowl.at(wish.n, flops), "asked for"))
    return points


def _levels(law: Law, bowl: Bowl, flops: float, unique_tokens: float | None) -> tuple[Bowl, list[tuple[Bowl, float]]]:
    """Where losses are read off, and its draws, each with the least loss of the budget. A law that knows sizes alone lends no level: the
    surface that was fitted to the same runs does, or `epoch`'s, unmoved, so that a bad size is seen to be one."""
    if law.surface:
        levels, draws = bowl, [draw for draw in law.draws if isinstance(draw, Surface)]
    else:
        levels = allocation.bowl_of(law.reference or EPOCH, law.cost, unique_tokens)
        draws = [] if law.reference else list(epoch_draws())
    bowls = [allocation.bowl_of(draw, law.cost, unique_tokens) for draw in draws]
    return levels, [(one, allocation.best(one, flops).loss) for one in bowls]


def _row(levels: Bowl, drawn: Sequence[tuple[Bowl, float]], point: Point, flops: float, wish: Wish, mark: str) -> Row:
    losses = [draw.losses.loss(point.n, point.tokens) for draw, _ in drawn]
    over = [max(0.0, loss - least) for loss, (_, least) in zip(losses, drawn, strict=True)]
    there = Point(point.n, point.tokens, levels.losses.loss(point.n, point.tokens))
    return Row(
        n=point.n,
        tokens=point.tokens,
        loss=there.loss,
        loss_band=band(losses) if losses else None,
        over_best=max(0.0, there.loss - allocation.best(levels, flops).loss),
        over_best_band=band(over) if over else None,
        as_good_at=allocation.as_good_at(levels, there) / flops,
        serve_ratio=wish.serving.flops(point.n) / flops if wish.serving else None,
        epochs=point.tokens / wish.unique_tokens if wish.unique_tokens else None,
        mark=mark,
    )


def _reason(law: Law, wish: Wish, choice: Row) -> Reason:
    if wish.n is not None:
        return Reason("the size that was asked for; its tokens are what the budget leaves", "arithmetic")
    if wish.serving:
        return Reason(
            f"no model of this loss has a cheaper life with {wish.serving.tokens:.3g} served tokens at "
            f"{wish.serving.relative_cost:.3g} of the price of training",
            "Sardana et al., arXiv 2401.00448",
        )
    return Reason("the least loss for the budget; nothing says how much will be served, so the row for that is shown beside", law.source)


def _warnings(law: Law, bowl: Bowl, choice: Row, wish: Wish) -> list[str]:
    told = []
    if bowl.borrowed:
        told.append(
            f"`{law.name}` knows sizes, not losses: they are read off the surface {'of the same runs' if law.reference else 'of `epoch`'}; "
            "what serving moves is by that of `epoch`, shifted to the law's optimum"
        )
    if choice.tokens_per_parameter > ORDINARY_RATIO:
        told.append(
            f"{choice.tokens_per_parameter:.0f} tokens per parameter: few runs behind any law go beyond {ORDINARY_RATIO:g}, and fits to "
            "ordinary ratios overstate what more tokens bring (arXiv 2401.00448)"
        )
    if wish.unique_tokens:
        told.append(epochs_warning(choice.tokens, unique_tokens=wish.unique_tokens))
    return [text for text in told if text]


def _rounded(n: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(n)) - 1)
    return round(n / unit) * unit
