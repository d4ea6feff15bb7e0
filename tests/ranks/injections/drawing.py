"""Which fault, when and where: drawn from a seed that is printed, so that any of them can be had again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

from surefoot.core.sections import RunConfig
from surefoot.data.slots import place_of_slot
from tests.ranks.injections.corpus import first_sample_of, row_of
from tests.ranks.injections.faults import Fault, Kind
from tests.ranks.injections.runs import NUM_RANKS, NUM_SHORT_STEPS, NUM_STEPS, SAVE_STEPS, config_of

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Cause = Literal["data", "state", "hardware", "schedule", "config"]
Window = tuple[int, int]
"""The first and the last step that a fault may begin in."""

SETTLED: Final[Window] = (165, 188)
"""The loss has been even for long enough, and what follows still shows in the rest of the run."""
EARLY: Final[Window] = (42, 56)
"""For faults that no statistic of many steps is needed for: two checkpoints are there, and an episode ends before the run."""
AT_REST: Final[Window] = (22, 38)
"""For what an audit at step 40 finds and 20 steps of a replay clear up, within a short run."""
AFTER_CANARY: Final[Window] = (110, 160)
"""Behind the steep start, in which a step that is skipped costs more than seeds differ by."""
POISONS: Final[Mapping[Kind, str]] = {"repeated-bytes": "repeated", "shuffled-tokens": "shuffled"}
_MOST_DRAWS: Final = 1000
_PERIODS: Final = (1100, 4000)


@dataclass(frozen=True, slots=True)
class Case:
    """A fault in a run. `cause` and `ranks` are what it is to be named; `same_bits`: healed means the bits of a run without it; another
    `exit_code` than 0: it stays, and only a person can end it. `poison` is (source, of how many samples it gives one)."""

    seed: int
    fault: Fault
    cause: Cause
    ranks: tuple[int, ...] = ()
    same_bits: bool = False
    exit_code: int = 0
    poison: tuple[str, int] | None = None
    num_steps: int = NUM_STEPS

    @property
    def first_step(self) -> int:
        """From here on it can be noticed: what is lost at a resume, from the first step behind the checkpoint."""
        return self.fault.step // SAVE_STEPS * SAVE_STEPS + 1 if self.fault.kind == "lost-moments" else self.fault.step

    @property
    def sharded(self) -> bool:
        return self.fault.kind == "biased-contribution"

    def config(self, data: Path, run_dir: Path) -> RunConfig:
        return config_of(data, run_dir, sharded=self.sharded, num_steps=self.num_steps, poison=self.poison)


def draw(kind: Kind, *, seed: int, data: Path, window: Window | None = None, company: Case | None = None) -> Case:
    """The same case for the same arguments. `company` is a case that shares the run."""
    late: dict[Kind, Window] = {"nan-of-a-sample": AFTER_CANARY, **dict.fromkeys(POISONS, SETTLED)}
    num_steps = NUM_STEPS if kind in late else NUM_SHORT_STEPS
    window = window or late.get(kind, AT_REST if kind == "flipped-parameter-bit" else EARLY)
    return replace(_draw(kind, seed=seed, data=data, window=window, company=company), num_steps=num_steps)


def _draw(kind: Kind, *, seed: int, data: Path, window: Window, company: Case | None) -> Case:
    luck = random.Random(f"{kind} {seed}")
    step, rank, place = luck.randint(*window), luck.randrange(NUM_RANKS), luck.randrange(1 << 20)
    at_one_rank = Fault(kind, step, rank=rank, place=place, bit=luck.randrange(31))
    everywhere = Fault(kind, step, place=place)
    match kind:
        case "nan-in-an-atom" | "flipped-gradient-bit" | "flipped-parameter-bit":
            return Case(seed, at_one_rank, "hardware", (rank,), same_bits=True)
        case "biased-contribution":
            return Case(seed, at_one_rank, "hardware", (rank,), exit_code=6)
        case "rate-not-as-told":
            return Case(seed, everywhere, "schedule", same_bits=True)
        case "rate-as-told":
            return Case(seed, everywhere, "schedule", exit_code=6)
        case "lost-moments":
            return Case(seed, everywhere, "state", same_bits=True)
        case "other-seed":
            return Case(seed, at_one_rank, "config", (rank,), exit_code=2)
        case "nan-of-a-sample":
            return _of_a_sample(Case(seed, everywhere, "data", poison=company.poison if company else None), slot=place, data=data)
        case "repeated-bytes" | "shuffled-tokens":
            return _poisoned(Case(seed, everywhere, "data"), luck=luck, window=window, data=data)


def _poisoned(case: Case, *, luck: random.Random, window: Window, data: Path) -> Case:
    """With the period of the mixture, of which one sample is poison, that lets the first one come in the window."""
    source = POISONS[case.fault.kind]
    for _ in range(_MOST_DRAWS):
        case = replace(case, poison=(source, luck.randint(*_PERIODS)))
        config = case.config(data, Path())
        batch = config.train.global_batch_size
        first = first_sample_of(config, source, until=batch * window[1])
        if first is not None and (step := first // batch + 1) >= window[0]:
            return replace(case, fault=replace(case.fault, step=step), ranks=_ranks_of(config, slot=first % batch))
    raise AssertionError(f"no mixture lets {source} come in steps {window}")


def _of_a_sample(case: Case, *, slot: int, data: Path) -> Case:
    config = case.config(data, Path())
    slot %= config.train.global_batch_size
    row = row_of(config, step=case.fault.step, slot=slot)
    return replace(case, fault=replace(case.fault, row=row), ranks=_ranks_of(config, slot=slot))


def _ranks_of(config: RunConfig, *, slot: int) -> tuple[int, ...]:
    return place_of_slot(slot, micro_batch_size=config.train.micro_batch_size, parallel=config.parallel).ranks
