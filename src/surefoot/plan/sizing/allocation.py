"""Which N and D a budget buys: the least loss, the least cost of a whole life, or a size that is given. Pure.

A life costs p N D to train and 2 N T to serve T tokens, and a FLOP of serving may be dearer than one of training. Sardana et al. (arXiv
2401.00448) look for its least cost at a given loss. Whatever is held fixed, loss, training budget or life, the best point obeys one
condition: a per cent of N and a per cent of D buy loss at the same price.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.plan.sizing.epochs import LimitedData, Losses
from surefoot.plan.sizing.laws import SIX_ND, Law, TokenCost
from surefoot.plan.sizing.published import EPOCH
from surefoot.plan.surface_record import Surface

SERVING_FLOPS = 2.0
"""Per parameter and token: the forward alone."""

_REACH = 1e4
"""Sizes are looked for within this factor of the best one."""

_STEP = 1e-4
"""Of log N and log D, for slopes: the surface is smooth, and rounding is 1e-12 of it."""


@dataclass(frozen=True, slots=True)
class Serving:
    """`tokens` over the whole life of the model. `relative_cost`: of a FLOP of serving, in FLOPs of training. Serving at 15% of the
    peak what was trained at 40% costs 2.7."""

    tokens: float
    relative_cost: float = 1.0

    def flops(self, n: float) -> float:
        return SERVING_FLOPS * n * self.tokens

    def cost(self, n: float) -> float:
        """In FLOPs of training."""
        return self.relative_cost * self.flops(n)


@dataclass(frozen=True, slots=True)
class Bowl:
    """Losses around a budget's optimum, and what a token costs. `borrowed` names the law that the shape is from, where it is another's."""

    losses: Losses
    surface: Surface
    cost: TokenCost = SIX_ND
    borrowed: str = ""

    def at(self, n: float, flops: float) -> Point:
        return Point(n, self.cost.tokens(n, flops), self.losses.loss(n, self.cost.tokens(n, flops)))

    def train_flops(self, point: Point) -> float:
        return self.cost.flops(point.n, point.tokens)


@dataclass(frozen=True, slots=True)
class Point:
    """`loss` in nats per token."""

    n: float
    tokens: float
    loss: float

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.n


def bowl(law: Law, flops: float, *, unique_tokens: float | None = None) -> Bowl:
    """Of the law itself, or for a law that knows sizes alone: the shape of `epoch`, moved so that its optimum is where the law puts it."""
    surface = law.surface or centred(EPOCH, n=law.best_n(flops), tokens=law.best_tokens(flops), cost=law.cost)
    return bowl_of(surface, law.cost, unique_tokens, borrowed="" if law.surface else "epoch")


def bowl_of(surface: Surface, cost: TokenCost, unique_tokens: float | None = None, *, borrowed: str = "") -> Bowl:
    losses: Losses = LimitedData(surface, unique_tokens) if unique_tokens else surface
    return Bowl(losses, surface, cost=cost, borrowed=borrowed)


def centred(surface: Surface, *, n: float, tokens: float, cost: TokenCost) -> Surface:
    """The same exponents, E and B, with the A that makes (n, tokens) the best point of its cost."""
    price = cost.per_parameter * n / (cost.per_parameter * n + cost.per_token)
    return replace(surface, A=price * surface.beta * surface.B * tokens**-surface.beta * n**surface.alpha / surface.alpha)


def best(of: Bowl, flops: float) -> Point:
    """The least loss that `flops` of training buy."""
    if isinstance(of.losses, Surface) and not of.cost.per_token:
        return of.at(of.surface.best_n(flops * 6.0 / of.cost.per_parameter), flops)
    return _where_balanced(of, lambda n: of.at(n, flops), lambda point: 0.0, near=of.surface.best_n(flops))


def for_serving(of: Bowl, flops: float, *, serving: Serving) -> Point:
    """The point of Sardana et al. whose *training* costs exactly `flops`: no other model of its loss has a cheaper life."""
    return _where_balanced(of, lambda n: of.at(n, flops), lambda point: serving.cost(point.n), near=of.surface.best_n(flops))


def for_life(of: Bowl, flops: float, *, serving: Serving) -> Point:
    """The least loss where training and serving *together* cost `flops`, in FLOPs of training."""

    def at(n: float) -> Point:
        return of.at(n, max(flops - serving.cost(n), flops * 1e-9))

    return _where_balanced(of, at, lambda point: serving.cost(point.n), near=of.surface.best_n(flops))


def served_as_much_as_trained(of: Bowl, flops: float) -> Point:
    """Best where serving will cost as much as training: what to take a look at while nobody has said how much will be served."""
    return _where_balanced(of, lambda n: of.at(n, flops), lambda point: flops, near=of.surface.best_n(flops))


def cheapest_life(of: Bowl, loss: float, *, serving: Serving) -> Point:
    """The least cost of training and serving among models of that loss. Raises PlanInfeasible where no model reaches it."""
    if loss <= of.surface.E:
        raise PlanInfeasible(
            f"a loss of {loss:.4g} is below the {of.surface.E:.4g} that no model of this law gets under",
            where="--loss",
            hint="ask for more, or use a law fitted to your own data",
            got=loss,
            limit=of.surface.E,
        )
    smallest = (of.surface.A / (loss - of.surface.E)) ** (1.0 / of.surface.alpha)
    return _where_balanced(of, lambda n: of_loss(of, n, loss), lambda point: serving.cost(point.n), near=3.0 * smallest, least=smallest)


def of_loss(of: Bowl, n: float, loss: float) -> Point:
    """A model of `n` trained until it has that loss; infinite tokens where it never does."""
    if isinstance(of.losses, Surface):
        missing = loss - of.surface.E - of.surface.A * n**-of.surface.alpha
        return Point(n, (of.surface.B / missing) ** (1.0 / of.surface.beta) if missing > 0 else math.inf, loss)
    low, high = 1.0, 1e24
    if of.losses.loss(n, high) > loss:
        return Point(n, math.inf, loss)
    return Point(n, _bisected(lambda tokens: loss - of.losses.loss(n, tokens), low, high), loss)


@dataclass(frozen=True, slots=True)
class Saving:
    """Two models of one loss: `usual` trained as far as its size is best for, `instead` smaller and trained longer. FLOPs of training."""

    usual: Point
    instead: Point
    flops: float
    share: float


def saving(of: Bowl, n: float, *, serving: Serving, instead: float | None = None) -> Saving:
    """What the cheapest life of the quality of a best-trained `n` saves; of the size `instead`, where that is given."""
    tokens = of.surface.tokens_for(n)
    usual = Point(n, tokens, of.losses.loss(n, tokens))
    other = of_loss(of, instead, usual.loss) if instead else cheapest_life(of, usual.loss, serving=serving)
    before = life_cost(of, usual, serving)
    saved = before - life_cost(of, other, serving)
    return Saving(usual, other, saved, saved / before)


def life_cost(of: Bowl, point: Point, serving: Serving) -> float:
    """Training and serving, in FLOPs of training."""
    return of.train_flops(point) + serving.cost(point.n)


def as_good_at(of: Bowl, point: Point) -> float:
    """The FLOPs at which the best model has the loss of `point`; never more than the point itself took to train."""
    spent = of.train_flops(point)
    if best(of, spent).loss >= point.loss:
        return spent
    return _bisected(lambda flops: point.loss - best(of, flops).loss, spent * 1e-6, spent)


def at_size(of: Bowl, n: float, flops: float) -> Point:
    """Raises ConfigError where `n` is no size."""
    if not 0 < n < math.inf:
        raise ConfigError(f"{n:g} parameters", where="--params", hint="give a number above 0", got=n)
    return of.at(n, flops)


def _where_balanced(
    of: Bowl, at: Callable[[float], Point], serving_cost: Callable[[Point], float], *, near: float, least: float = 0.0
) -> Point:
    """Where d(cost)/d(log N) : d(cost)/d(log D) equals the same ratio of the loss. The difference falls with N, so bisection finds it."""

    def excess(n: float) -> float:
        point = at(n)
        if not math.isfinite(point.tokens):
            return 1.0
        by_n, by_tokens = _slopes(of.losses, point)
        of_n = of.cost.per_parameter * point.n * point.tokens + serving_cost(point)
        return by_n * of.train_flops(point) - by_tokens * of_n

    smallest = max(near / _REACH, least)
    if excess(smallest) < 0:
        raise PlanInfeasible(
            f"the best model would have less than {smallest:.3g} parameters, a {_REACH:.0e}th of the best one without serving",
            where="allocation",
            hint="look at how many tokens are served at what price, and how many unique ones there are",
            limit=smallest,
        )
    return at(_bisected(lambda n: -excess(n), smallest, near * _REACH))


def _slopes(losses: Losses, point: Point) -> tuple[float, float]:
    """How much loss falls with log N, and with log D."""
    up, down = math.exp(_STEP), math.exp(-_STEP)
    by_n = losses.loss(point.n * down, point.tokens) - losses.loss(point.n * up, point.tokens)
    by_tokens = losses.loss(point.n, point.tokens * down) - losses.loss(point.n, point.tokens * up)
    return by_n, by_tokens


def _bisected(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where `rising` passes 0, in logs, to nine digits."""
    log_low, log_high = math.log(low), math.log(high)
    for _ in range(48):
        middle = (log_low + log_high) / 2.0
        if rising(math.exp(middle)) < 0:
            log_low = middle
        else:
            log_high = middle
    return math.exp((log_low + log_high) / 2.0)
