"""Which fault, when and where: drawn from a seed that is printed, so that any of them can be had again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, get_args

from surefoot.core.sections import RunConfig
from surefoot.data.slots import place_of_slot
from tests.ranks.injections.corpus import first_sample_of, row_of
from tests.ranks.injections.faults import Fault, Kind
from tests.ranks.injections.runs import NUM_RANKS, NUM_SHORT_STEPS, NUM_STEPS, SAVE_STEPS, config_of

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Cause = Literal["data", "state", "hardware", "schedule", "config"]

_WINDOW: Final = (165, 200)
"""The loss has been even for long enough, and what follows still shows in the rest of the run."""
_EARLY: Final = (45, 58)
"""For faults that no statistic is needed for: two checkpoints are there."""
_POISONS: Final[Mapping[Kind, str]] = {"repeated-bytes": "repeated", "shuffled-tokens": "shuffled"}
_SHORT: Final = frozenset({"biased-contribution", "lost-moments", "other-seed"})


@dataclass(frozen=True, slots=True)
class Case:
    """A fault in a run. `cause` and `ranks` are what it is to be named; `same_bits`: healed means the bits of a run without it; another
    `exit_code` than 0: it stays, and only a person can end it."""

    seed: int
    fault: Fault
    cause: Cause
    ranks: tuple[int, ...] = ()
    same_bits: bool = False
    exit_code: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def first_step(self) -> int:
        """From here on it can be noticed: what is lost at a resume, from the first step behind the checkpoint."""
        return self.fault.step // SAVE_STEPS * SAVE_STEPS + 1 if self.fault.kind == "lost-moments" else self.fault.step

    @property
    def is_short(self) -> bool:
        return self.fault.kind in _SHORT

    @property
    def sharded(self) -> bool:
        return self.fault.kind == "biased-contribution"

    def config(self, data: Path, run_dir: Path) -> RunConfig:
        steps = NUM_SHORT_STEPS if self.is_short else NUM_STEPS
        return config_of(data, run_dir, sharded=self.sharded, num_steps=steps, shares=self.shares)


def draw(kind: Kind, *, seed: int, data: Path) -> Case:
    """The same case for the same seed and data."""
    luck = random.Random(f"{kind} {seed}")
    step = luck.randint(*(_EARLY if kind in _SHORT else _WINDOW))
    rank, place = luck.randrange(NUM_RANKS), luck.randrange(1 << 20)
    at_one_rank = Fault(kind, step, rank=rank, place=place, bit=luck.randrange(31))
    everywhere = Fault(kind, step, place=place)
    match kind:
        case "nan-in-an-atom" | "flipped-gradient-bit" | "flipped-parameter-bit":
            return Case(seed, at_one_rank, "hardware", (rank,), same_bits=True)
        case "biased-contribution":
            return Case(seed, at_one_rank, "hardware", (rank,), exit_code=6)
        case "rate-not-as-told":
            lasts = luck.random() < 0.5
            return Case(seed, replace(everywhere, lasts=lasts), "schedule", same_bits=not lasts, exit_code=6 if lasts else 0)
        case "rate-as-told":
            return Case(seed, everywhere, "schedule")
        case "lost-moments":
            return Case(seed, everywhere, "state", same_bits=True)
        case "other-seed":
            return Case(seed, at_one_rank, "config", (rank,))
        case "nan-of-a-sample":
            return _of_a_sample(Case(seed, everywhere, "data"), slot=place, data=data)
        case "repeated-bytes" | "shuffled-tokens":
            return _poisoned(Case(seed, everywhere, "data"), luck=luck, data=data)


def _of_a_sample(case: Case, *, slot: int, data: Path) -> Case:
    config = case.config(data, Path())
    slot %= config.train.global_batch_size
    row = row_of(config, step=case.fault.step, slot=slot)
    return replace(case, fault=replace(case.fault, row=row), ranks=_ranks_of(config, slot=slot))


def _poisoned(case: Case, *, luck: random.Random, data: Path) -> Case:
    """With the share of the poison that lets its first sample come in the window."""
    name = _POISONS[case.fault.kind]
    while True:
        case = replace(case, shares={name: luck.uniform(6e-4, 1.5e-3)})
        config = case.config(data, Path())
        first = first_sample_of(config, name, until=_WINDOW[1] * config.train.global_batch_size)
        batch = config.train.global_batch_size
        if first is not None and (step := first // batch + 1) >= _WINDOW[0]:
            return replace(case, fault=replace(case.fault, step=step), ranks=_ranks_of(config, slot=first % batch))


def _ranks_of(config: RunConfig, *, slot: int) -> tuple[int, ...]:
    return place_of_slot(slot, micro_batch_size=config.train.micro_batch_size, parallel=config.parallel).ranks
