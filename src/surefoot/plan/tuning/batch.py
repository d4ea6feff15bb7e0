"""Batches that every number of ranks shares evenly, and the ramp that leads up to one. Pure; sizes in sequences unless a name says tokens.

Training deals atoms of `micro_batch_size` consecutive samples to data ranks and fills up with phantoms, so an uneven batch is legal: it
costs the slots of the phantoms. A run that may lose nodes should choose one that costs nothing at any size it may shrink to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surefoot.core.errors import ConfigError
from surefoot.plan.records import Reason
from surefoot.plan.surface_record import Surface
from surefoot.plan.tuning.laws import critical_by_loss

Ramp = tuple[tuple[int, int], ...]
"""`train.batch_ramp`: (first_sample, batch), the last with the global batch. Empty: no ramp."""

RAMP_REASON = Reason(
    "each size begins when the critical batch, by the loss that is expected there, has come up to it",
    "Kaplan et al., arXiv 2001.08361, section 5.1; that ramps save steps: Merrill et al., arXiv 2505.23971",
)

Critical = Callable[[float], float]
"""The critical batch in tokens, after so many tokens."""

REACH = 0.25
"""A batch up to this far from the wished one is taken for being even: the loss is flat around the best batch (arXiv 2503.04715)."""

MAX_HALVINGS = 4
"""The critical batch is next to nothing at first and rises fast (arXiv 2505.23971): starting lower saves no steps that count."""

LEAST_STEPS = 100
"""A stage of the ramp that is shorter is left out."""

LATEST_SHARE = 0.2
"""Of the samples, by which the global batch is reached, as in Llama 3 405B (18%, arXiv 2407.21783) and DeepSeek-V3 (3%, arXiv 2412.19437):
smaller steps keep fewer devices busy. Where the critical batch never comes up to it in that time, the ramp has only its shape."""


@dataclass(frozen=True, slots=True)
class LegalBatch:
    """`even` are the nearest batches without phantoms at any of the numbers of ranks, below and above; `waste` is by number of ranks."""

    wished: int
    batch: int
    micro_batch_size: int
    even: tuple[int, ...]
    waste: dict[int, float]

    @property
    def worst_waste(self) -> float:
        return max(self.waste.values())

    @property
    def why(self) -> str:
        ranks = ", ".join(str(count) for count in self.waste) if len(self.waste) <= 6 else f"{min(self.waste)} to {max(self.waste)}"
        if self.worst_waste == 0:
            return f"{self.batch} sequences are whole micro-batches on each of {ranks} data ranks{self._instead()}"
        worst = max(self.waste, key=lambda count: self.waste[count])
        near = f"; even: {', '.join(str(batch) for batch in self.even)}" if self.even else ""
        return f"{uneven(self.batch, num_ranks=worst, micro_batch_size=self.micro_batch_size)}{near}"

    def _instead(self) -> str:
        """Which numbers of ranks the wished batch would not have been even on."""
        told = (uneven(self.wished, num_ranks=count, micro_batch_size=self.micro_batch_size) for count in self.waste)
        return "".join(f"; {text}" for text in told if text) if self.batch != self.wished and len(self.waste) <= 6 else ""


def waste(batch: int, *, num_ranks: int, micro_batch_size: int = 1) -> float:
    """The share of computed slots that hold no sample."""
    atoms = -(-batch // micro_batch_size)
    slots = -(-atoms // num_ranks) * num_ranks * micro_batch_size
    return 1.0 - batch / slots


def uneven(batch: int, *, num_ranks: int, micro_batch_size: int = 1) -> str:
    """What dealing `batch` to so many ranks comes to, in words; empty where it goes evenly."""
    lost = waste(batch, num_ranks=num_ranks, micro_batch_size=micro_batch_size)
    if lost == 0:
        return ""
    each = batch / (num_ranks * micro_batch_size)
    return (
        f"{batch} sequences over {num_ranks} data ranks of micro-batch {micro_batch_size} are {each:.2f} micro-steps: "
        f"{math.ceil(each)} are computed, and {lost:.2%} of the slots are phantoms"
    )


def legal_batches(near: int, *, data_ranks: Iterable[int], micro_batch_size: int = 1, given: bool = False) -> LegalBatch:
    """The batch closest to `near` that no number of `data_ranks` shares unevenly, or the one that wastes least where none is close.

    `given` keeps `near` itself and only judges it. Raises ConfigError for what is no batch.
    """
    ranks = tuple(sorted(set(data_ranks)))
    if near < 1 or micro_batch_size < 1 or not ranks or ranks[0] < 1:
        what = f"a batch of {near} in micro-batches of {micro_batch_size} on {list(ranks)} data ranks"
        raise ConfigError(what, where="train.global_batch_size", hint="all of them are whole numbers above 0", got=near)
    unit = math.lcm(*ranks) * micro_batch_size
    below = near // unit * unit
    even = tuple(batch for batch in (below, below + unit) if batch > 0)
    close = [batch for batch in even if abs(batch / near - 1.0) <= REACH]
    if given:
        batch = near
    elif close:
        batch = min(close, key=lambda candidate: abs(candidate - near))
    else:
        batch = _least_waste(near, ranks, micro_batch_size)
    lost = {count: waste(batch, num_ranks=count, micro_batch_size=micro_batch_size) for count in ranks}
    near_even = (near,) if near % unit == 0 else tuple(found for found in even if near / 2.0 <= found <= near * 2.0)
    return LegalBatch(near, batch, micro_batch_size, near_even, lost)


def _least_waste(near: int, ranks: Sequence[int], micro_batch_size: int) -> int:
    """Among `near` and the batches within reach that a number of ranks shares evenly; the worst rank count decides, then the distance."""
    low, high = math.ceil(near * (1.0 - REACH)), math.floor(near * (1.0 + REACH))
    candidates = {batch for count in ranks for batch in _multiples(count * micro_batch_size, low, high)} | {near}

    def price(batch: int) -> tuple[float, int]:
        worst = max(waste(batch, num_ranks=count, micro_batch_size=micro_batch_size) for count in ranks)
        return round(worst, 3), abs(batch - near)

    return min(candidates, key=price)


def _multiples(unit: int, low: int, high: int) -> range:
    return range(-(-low // unit) * unit, high + 1, unit)


def critical_in_run(surface: Surface, n: float) -> Critical:
    """By the loss that the surface expects after so many tokens."""
    return lambda seen: critical_by_loss(surface.loss(n, max(1.0, seen)))


def batch_ramp(
    global_batch: int,
    *,
    seq_len: int,
    num_samples: int,
    critical: Critical,
    data_ranks: Iterable[int] = (1,),
    micro_batch_size: int = 1,
) -> Ramp:
    """Doublings up to `global_batch`, each begun when the critical batch (tokens, of tokens seen) has come up to it.

    Each size is one that all of `data_ranks` share evenly, where the global batch is. Empty where the whole batch is under the critical one
    from the start, or there is nothing even to begin with.
    """
    sizes = _halvings(global_batch, tuple(data_ranks), micro_batch_size)
    latest = LATEST_SHARE * num_samples * seq_len
    too_large = max(1.0, global_batch * seq_len / critical(latest))
    begins = [0.0, *(_reached(critical, batch * seq_len / too_large, latest) / seq_len for batch in sizes[1:])]
    stages = [(begin, batch) for begin, batch in zip(begins, sizes, strict=True)]
    kept: list[tuple[float, int]] = []
    for (begin, batch), (end, _) in pairwise([*stages, (math.inf, 0)]):
        if (end - begin) / batch >= LEAST_STEPS:
            kept.append((begin, batch))
    if not kept or kept[-1][1] != global_batch or len(kept) == 1:
        return ()
    return ((0, kept[0][1]), *((_round_up(begin), batch) for begin, batch in kept[1:]))


def num_steps(num_samples: int, *, global_batch: int, ramp: Ramp = ()) -> int:
    """Steps that take at least `num_samples`, as training counts them: an entry takes effect at the first step at or after its sample."""
    seen, steps = 0, 0
    for (_, batch), (end, _) in pairwise([*(ramp or ((0, global_batch),)), (num_samples, 0)]):
        count = max(0, -(-(min(end, num_samples) - seen) // batch))
        seen, steps = seen + count * batch, steps + count
    return max(1, steps)


def _halvings(global_batch: int, ranks: tuple[int, ...], micro_batch_size: int) -> list[int]:
    """Ascending, ending with the global batch; only sizes that cost no phantoms where the global batch costs none."""
    unit = math.lcm(*ranks) * micro_batch_size
    unit = unit if global_batch % unit == 0 else min(ranks) * micro_batch_size
    sizes = {global_batch}
    for halving in range(1, MAX_HALVINGS + 1):
        size = round(global_batch / 2**halving / unit) * unit
        if 0 < size < global_batch:
            sizes.add(size)
    return sorted(sizes)


def above_critical(global_batch: int, *, seq_len: int, num_samples: int, critical: Critical) -> float:
    """How many times the batch exceeds the critical one at the end of the run; 1 or less is well."""
    return global_batch * seq_len / critical(float(num_samples) * seq_len)


def _reached(critical: Critical, batch_tokens: float, latest: float) -> float:
    """After how many tokens the critical batch is `batch_tokens`; `latest` at the latest."""
    low, high = 0.0, math.log(latest)
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if critical(math.exp(middle)) < batch_tokens else (low, middle)
    return math.exp(high)


def _round_up(samples: float) -> int:
    """To two digits: more would pretend to be known."""
    unit = max(1, int(10.0 ** (math.floor(math.log10(max(1.0, samples))) - 1)))
    return math.ceil(samples / unit) * unit
