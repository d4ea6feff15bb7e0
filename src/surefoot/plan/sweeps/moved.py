"""What a sweep changed of what was assumed: best sizes, tokens per parameter, and the exponent, fitted beside expected. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.plan.sizing.laws import Law

COLUMN_OF = {"all": "n", "active": "n", "body": "n_without_embedding", "without embedding": "n", "flops/6": "n"}
"""The column of a gathered table whose N is the law's, or comes nearest to it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Of one budget: the best size found and the one that was expected."""

    flops: float
    n: float
    n_expected: float
    tokens_per_parameter: float
    tokens_per_parameter_expected: float

    @property
    def factor(self) -> float:
        return self.n / self.n_expected


def moved(law: Law, optima: Sequence[Mapping[str, Any]]) -> tuple[Moved, ...]:
    """`optima` as `fit --law isoflop` answers them."""
    found = []
    for one in optima:
        expected = law.best_n(one["flops"])
        ratio = law.cost.tokens(expected, one["flops"]) / expected
        found.append(Moved(one["flops"], one["n"], expected, one["tokens"] / one["n"], ratio))
    return tuple(found)


def expected_exponent(law: Law, *, low: float, high: float) -> float:
    """Of N* between two budgets."""
    return math.log(law.best_n(high) / law.best_n(low)) / math.log(high / low)


def sentences(law: Law, answer: Mapping[str, Any]) -> list[str]:
    """What moved, one line for each budget and one for the exponent, and whether the bands of the fit still hold what was assumed."""
    rows = moved(law, answer["optima"])
    lines = [
        f"at {row.flops:.3g} FLOPs: N* {row.n:.3g}, expected {row.n_expected:.3g} by {law.name} (x {row.factor:.2f}); "
        f"{row.tokens_per_parameter:.3g} tokens per parameter, expected {row.tokens_per_parameter_expected:.3g}"
        for row in rows
    ]
    assumed = expected_exponent(law, low=rows[0].flops, high=rows[-1].flops) if len(rows) > 1 else None
    if assumed is not None:
        low, high = answer["bands"]["a"]
        holds = "inside" if low <= assumed <= high else "outside of"
        lines.append(f"N* ~ C^{answer['a']:.3f}, expected C^{assumed:.3f}: {holds} the band {low:.3f} to {high:.3f}")
    at = answer["at"][-1]
    if "n" in at["bands"]:
        low, high = at["bands"]["n"]
        expected = law.best_n(at["flops"])
        verdict = "holds" if low <= expected <= high else "does not hold here: plan with this fit, not with it"
        lines.append(f"at {at['flops']:.3g} FLOPs the band of N* is {low:.3g} to {high:.3g}, expected {expected:.3g}: {law.name} {verdict}")
    return lines
