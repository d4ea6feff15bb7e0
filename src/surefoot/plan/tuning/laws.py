"""Published laws of the best learning rate and batch, side by side with how far they disagree. Pure.

They were fitted to small models, in different settings, and are a factor of up to four apart where large ones are planned. One is taken,
by a rule that is stated; all are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from surefoot.plan.records import Reason

Quantity = Literal["learning rate", "batch"]

Band = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Run:
    """What such laws ask of a run. `n` without embedding and head; `loss` is the one at its end, None where no law knows it."""

    n: float
    tokens: float
    loss: float | None = None

    @property
    def flops(self) -> float:
        return 6.0 * self.n * self.tokens


@dataclass(frozen=True, slots=True)
class Exponents:
    """95% of the exponents of N and D, fitted to runs around `centre`, where the law itself is best known."""

    centre: Run
    n: Band
    tokens: Band

    def log_half_width(self, run: Run) -> float:
        """Of the 95% band of log value at `run`; errors of both exponents are taken as independent, that of the level is not published."""
        by_n = (self.n[1] - self.n[0]) / 2.0 * math.log(run.n / self.centre.n)
        by_tokens = (self.tokens[1] - self.tokens[0]) / 2.0 * math.log(run.tokens / self.centre.tokens)
        return math.hypot(by_n, by_tokens)


@dataclass(frozen=True, slots=True)
class TuningLaw:
    """`value` in tokens for a batch; None where the law says nothing of the run."""

    name: str
    quantity: Quantity
    formula: str
    source: str
    corpus: str
    value: Callable[[Run], float | None]
    exponents: Exponents | None = None

    def band(self, run: Run) -> Band | None:
        """95% at `run`; None where nothing is published."""
        value = self.value(run)
        if self.exponents is None or value is None:
            return None
        off = self.exponents.log_half_width(run)
        return value * math.exp(-off), value * math.exp(off)


@dataclass(frozen=True, slots=True)
class Suggestion:
    law: str
    value: float
    band: Band | None
    source: str


@dataclass(frozen=True, slots=True)
class SideBySide:
    """`disagreement` is the largest over the smallest. `chosen` is one of them, for `reason`."""

    quantity: Quantity
    suggestions: tuple[Suggestion, ...]
    chosen: Suggestion
    reason: Reason

    @property
    def disagreement(self) -> float:
        values = [suggestion.value for suggestion in self.suggestions]
        return max(values) / min(values)


STEPLAW_CENTRE = Run(n=2.5e8, tokens=1.4e10)
"""Geometric middle of its grid: 60M to 1B parameters, 2B to 100B tokens."""

STEPLAW_SMALLEST = 6e7

_STEPLAW = "Step Law (Li et al.), arXiv 2503.04715; constants are medians of their 1000 bootstrap fits"
_STEPLAW_CORPUS = "web, code, mathematics (English and Chinese)"
_DEEPSEEK = "DeepSeek LLM, arXiv 2401.02954"
_DEEPSEEK_CORPUS = "DeepSeek's own (Chinese and English web)"

LEARNING_RATES: tuple[TuningLaw, ...] = (
    TuningLaw(
        "steplaw",
        "learning rate",
        "1.78 N^-0.712 D^0.307",
        _STEPLAW,
        _STEPLAW_CORPUS,
        lambda run: 1.78 * run.n**-0.712 * run.tokens**0.307,
        exponents=Exponents(STEPLAW_CENTRE, n=(-0.774, -0.655), tokens=(0.271, 0.345)),
    ),
    TuningLaw(
        "deepseek",
        "learning rate",
        "0.3118 C^-0.125",
        _DEEPSEEK,
        _DEEPSEEK_CORPUS,
        lambda run: 0.3118 * run.flops**-0.125,
    ),
)

BATCHES: tuple[TuningLaw, ...] = (
    TuningLaw(
        "steplaw",
        "batch",
        "0.573 D^0.571",
        _STEPLAW,
        _STEPLAW_CORPUS,
        lambda run: 0.573 * run.tokens**0.571,
        exponents=Exponents(STEPLAW_CENTRE, n=(0.0, 0.0), tokens=(0.534, 0.606)),
    ),
    TuningLaw(
        "deepseek",
        "batch",
        "0.292 C^0.3271",
        _DEEPSEEK,
        _DEEPSEEK_CORPUS,
        lambda run: 0.292 * run.flops**0.3271,
    ),
    TuningLaw(
        "mccandlish",
        "batch",
        "2e8 / L^4.76",
        "Kaplan et al., arXiv 2001.08361, section 5.1, after McCandlish et al., arXiv 1812.06162: the critical batch",
        "WebText2 (English web)",
        lambda run: None if run.loss is None else critical_by_loss(run.loss),
    ),
    TuningLaw(
        "critical-batch",
        "batch",
        "22.91 (D / 1e6)^0.47 sequences of 512",
        "Zhang et al., arXiv 2410.21676: a fifth more steps than ideal at that batch; grows with data, hardly with N",
        "C4 (English web)",
        lambda run: critical_by_data(run.tokens),
    ),
)


def critical_by_loss(loss: float) -> float:
    """Tokens. Kaplan et al., section 5.1: the loss alone decides."""
    return float(2e8 / loss**4.76)


def critical_by_data(tokens: float) -> float:
    """Tokens. Their fits by N at 20 tokens a parameter, by D and by N alone meet at 151M parameters, which tells the units."""
    return float(22.91 * (tokens / 1e6) ** 0.47 * 512.0)


def learning_rates(run: Run) -> SideBySide:
    """`steplaw` is taken where its grid reaches: alone among them it knows N and D apart, and it was tested on the most models. Below its
    smallest model the least of all is taken: a rate too low trains slowly, one too high not at all."""
    found = _asked(LEARNING_RATES, run)
    if run.n < STEPLAW_SMALLEST:
        least = min(found, key=lambda suggestion: suggestion.value)
        return SideBySide(
            "learning rate", found, least, Reason("the smallest of what the laws say: the model is below the grid of either", least.source)
        )
    reason = Reason("fitted to 3,700 models, by size and data apart; the others know compute alone", found[0].source)
    return SideBySide("learning rate", found, found[0], reason)


def batches(run: Run) -> SideBySide:
    """`steplaw` again, for its rate and its batch were searched for together. Below its grid the smallest is taken: a batch too small is
    only less parallel, one too large wastes tokens."""
    found = _asked(BATCHES, run)
    if run.n < STEPLAW_SMALLEST:
        least = min(found, key=lambda suggestion: suggestion.value)
        why = "the smallest of what the laws say: a batch too small costs parallelism, one too large costs tokens"
        return SideBySide("batch", found, least, Reason(why, least.source))
    return SideBySide("batch", found, found[0], Reason("found together with the learning rate, on 3,700 models", found[0].source))


def transferred_lr(lr: float, *, width: int, to_width: int) -> float:
    """muP (Yang et al., arXiv 2203.03466): Adam's best rate of hidden matrices goes as 1 / width, under that parametrization only."""
    return lr * width / to_width


def lr_for_batch(lr: float, *, batch: float, to_batch: float) -> float:
    """Adam's square-root rule (Malladi et al., arXiv 2205.10287), downwards only: beyond the critical batch no rate makes up for it."""
    return lr * math.sqrt(min(1.0, to_batch / batch))


def _asked(laws: tuple[TuningLaw, ...], run: Run) -> tuple[Suggestion, ...]:
    values = ((law, law.value(run)) for law in laws)
    return tuple(Suggestion(law.name, value, law.band(run), law.source) for law, value in values if value is not None)
