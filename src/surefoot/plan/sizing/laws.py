"""Scaling laws: where compute is best spent, by name, each with who found it, on which corpus, for which N and up to which budget. Pure.

A law is a rule C -> N*; D* follows from what a token costs. `Surface` is such a rule that also knows the loss. Bands are quantiles over
`draws`: the same rule with constants drawn from their uncertainty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.bands import band
from surefoot.plan.surface_record import Surface

Counted = Literal["all", "without embedding", "body", "active", "flops/6"]
"""Which parameters a law's N is.

all                  embedding and head too
without embedding    the head is counted, for it costs FLOPs; the embedding is not, for it costs none
body                 neither; of experts, here and above, those that a token passes through
active               all that one token passes through
flops/6              no count: a sixth of the FLOPs per token outside the head, attention in full
"""

ORDINARY_RATIO = 100.0
"""Tokens per parameter up to which fits are believed without a word: nine tenths of the runs behind `hoffmann` and `epoch` are below 103.
Beyond, they overstate what more tokens bring (Sardana et al., arXiv 2401.00448, section 4)."""


class Rule(Protocol):
    def best_n(self, flops: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Ratio:
    """So many tokens for each parameter, at any budget."""

    tokens_per_parameter: float

    def best_n(self, flops: float) -> float:
        return math.sqrt(flops / (6.0 * self.tokens_per_parameter))


@dataclass(frozen=True, slots=True)
class Power:
    """N* = coef * C^exponent."""

    coef: float
    exponent: float

    def best_n(self, flops: float) -> float:
        return float(self.coef * flops**self.exponent)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """FLOPs of one token in training: `per_parameter` * N + `per_token`."""

    per_parameter: float = 6.0
    per_token: float = 0.0

    def flops(self, n: float, tokens: float) -> float:
        return (self.per_parameter * n + self.per_token) * tokens

    def tokens(self, n: float, flops: float) -> float:
        return flops / (self.per_parameter * n + self.per_token)


SIX_ND = TokenCost()


@dataclass(frozen=True, slots=True)
class Law:
    """`flops_range` is of the runs it was fitted to, None where it is a rule of thumb; `note` is what a user of it should know.
    `reference`: losses of the same runs, where the rule itself knows sizes alone."""

    name: str
    rule: Rule
    counts: Counted
    source: str
    corpus: str
    flops_range: tuple[float, float] | None = None
    draws: tuple[Rule, ...] = ()
    cost: TokenCost = SIX_ND
    note: str = ""
    reference: Surface | None = None

    @property
    def surface(self) -> Surface | None:
        return self.rule if isinstance(self.rule, Surface) else None

    def best_n(self, flops: float) -> float:
        return self.rule.best_n(flops)

    def best_tokens(self, flops: float) -> float:
        return self.cost.tokens(self.best_n(flops), flops)

    def counts_for(self, *, is_mixture: bool) -> Counted:
        """How to count the N of a model by this law: of experts, those that a token passes through, whatever dense models it is from."""
        return "active" if is_mixture and self.counts == "all" else self.counts

    def n_band(self, flops: float) -> tuple[float, float] | None:
        """95%; None where nobody published how uncertain the law is."""
        return band(draw.best_n(flops) for draw in self.draws) if self.draws else None

    def ratio_band(self, flops: float) -> tuple[float, float] | None:
        """95% of tokens per parameter."""
        sizes = [draw.best_n(flops) for draw in self.draws]
        return band(self.cost.tokens(n, flops) / n for n in sizes) if sizes else None

    def extrapolation(self, flops: float) -> float:
        """How many times the budget lies beyond what was fitted, at either end; 1 inside."""
        if self.flops_range is None:
            return 1.0
        low, high = self.flops_range
        return max(1.0, flops / high, low / flops)

    def warnings(self, flops: float) -> tuple[str, ...]:
        """What a reader of N*(flops) must know."""
        told = [self.note] if self.note else []
        far = self.extrapolation(flops)
        if far > 1.0 and self.flops_range:
            is_beyond = flops > self.flops_range[1]
            place, last = ("beyond the largest", self.flops_range[1]) if is_beyond else ("below the smallest", self.flops_range[0])
            told.append(f"{flops:.3g} FLOPs are {far:.3g} times {place} run behind `{self.name}` ({last:.3g})")
        if not self.draws:
            told.append(f"no band is known for `{self.name}`")
        return tuple(told)


def power_draws(rule: Power, *, pivot_flops: float, log_n_std: float, exponent_std: float, num_draws: int = 200) -> tuple[Power, ...]:
    """Lines through the cloud that a fit of log N over log C leaves: error of the level at the pivot, and of the slope, independent there.

    The normal deviates are an additive low-discrepancy sequence, so that the draws need no seed.
    """
    normal = NormalDist()
    golden = 1.3247179572447460  # of two dimensions: x^3 = x + 1
    draws = []
    for index in range(num_draws):
        level, slope = (normal.inv_cdf((0.5 + (index + 1) / golden**power) % 1.0) for power in (1, 2))
        exponent = rule.exponent + exponent_std * slope
        shift = log_n_std * level + (rule.exponent - exponent) * math.log(pivot_flops)
        draws.append(Power(rule.coef * math.exp(shift), exponent))
    return tuple(draws)


def counted(sizes: ModelSizes, counts: Counted, *, seq_len: int = 0) -> float:
    """The N of a model as a law counts it."""
    if counts == "all":
        return float(sizes.num_parameters)
    if counts == "active":
        return float(sizes.num_active_parameters)
    body = sizes.num_active_parameters - sizes.num_embedding_parameters - sizes.num_head_parameters
    if counts == "body":
        return float(body)
    if counts == "without embedding":
        return float(body + sizes.num_embedding_parameters)  # the head is as large, tied or not
    return float(body + 2 * sizes.num_layers * sizes.num_heads * sizes.head_dim * seq_len)
