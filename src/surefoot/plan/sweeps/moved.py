"""What a sweep changed of what was assumed: best sizes, tokens per parameter, and the exponent, fitted beside expected. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.core.errors import DataError
from surefoot.plan.sizing.laws import Counted, Law

if TYPE_CHECKING:
    from surefoot.plan.fits.table import Table

COLUMN_OF: Mapping[Counted, str] = {
    "all": "n",
    "active": "n",  # a sweep trains no experts
    "body": "n_without_embedding",
    "without embedding": "n_body_and_head",
    "flops/6": "n_flops_6",
}
"""The column of a gathered table whose N is the law's: what was found is compared with what was expected in one and the same count."""

PLANNED_BY = ("n", "n_without_embedding")
"""Of these columns, those that a law of one's own may be in: whoever plans by it counts a model so."""


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


def compared(law: Law, answer: Mapping[str, Any], table: Table, *, seed: int = 0) -> tuple[list[str], dict[str, Any]]:
    """(sentences, what was assumed) in the N of `law`: where `answer` counts otherwise, the runs are fitted once more in that count."""
    from surefoot.plan.fits.answer import Question, answer_of

    column = COLUMN_OF[law.counts]
    assumed: dict[str, Any] = {"law": law.name, "counts": law.counts, "count": column, "optima": []}
    try:
        same = answer if column == answer["count"] else answer_of(table, law="isoflop", question=Question(count=column, seed=seed))
    except DataError as error:
        return [f"no verdict on {law.name}, whose N is counted as: {law.counts}. In that count {error.what}"], assumed
    assumed["optima"] = [{"flops": row.flops, "n": row.n_expected, "n_found": row.n} for row in moved(law, same["optima"])]
    other = f"N is here what {law.name} counts ({law.counts}; column {column}), above it is column {answer['count']}"
    return ([] if same is answer else [other]) + sentences(law, same), assumed
