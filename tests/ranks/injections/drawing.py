"""Which fault, when and where: drawn from a seed that is printed, so that any of them can be had again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, get_args

from surefoot.core.sections import RunConfig
from surefoot.data.slots import place_of_slot
from tests.ranks.injections.corpus import first_samples_of, row_of
from tests.ranks.injections.faults import Fault, Kind
from tests.ranks.injections.runs import NUM_RANKS, NUM_SHORT_STEPS, NUM_STEPS, SAVE_STEPS, config_of

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Cause = Literal["data", "state", "hardware", "schedule", "config"]
Window = tuple[int, int]
"""The first and the last step that a fault may begin in."""

SETTLED: Final[Window] = (165, 200)
"""The loss has been even for long enough, and what follows still shows in the rest of the run."""
EARLY: Final[Window] = (45, 58)
"""For faults that no statistic is needed for: two checkpoints are there."""
POISONS: Final[Mapping[Kind, str]] = {"repeated-bytes": "repeated", "shuffled-tokens": "shuffled"}
_SHORT: Final = frozenset({"rate-as-told", "biased-contribution", "lost-moments", "other-seed"})
_MOST_DRAWS: Final = 1000


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
    def sharded(self) -> bool:
        return self.fault.kind == "biased-contribution"

    def config(self, data: Path, run_dir: Path) -> RunConfig:
        steps = NUM_SHORT_STEPS if self.fault.kind in _SHORT else NUM_STEPS
        return config_of(data, run_dir, sharded=self.sharded, num_steps=steps, shares=self.shares)


def draw(kind: Kind, *, seed: int, data: Path, window: Window | None = None, shares: Mapping[str, float] | None = None) -> Case:
    """The same case for the same arguments. `shares` are of the poisons that it has for company."""
    window = window or (EARLY if kind in _SHORT else SETTLED)
    if kind in POISONS:
        return draw_poisons({kind: window}, seed=seed, data=data)[0]
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
        case _:
            return _of_a_sample(Case(seed, everywhere, "data", shares=shares or {}), slot=place, data=data)


def draw_poisons(windows: Mapping[Kind, Window], *, seed: int, data: Path) -> list[Case]:
    """A case for each kind, in one mixture: with such shares of the poisons that the first sample of each comes in its window."""
    luck = random.Random(f"{sorted(windows)} {seed}")
    shares: dict[str, float] = {}
    for kind in windows:
        so_far = {known: window for known, window in windows.items() if POISONS[known] in (*shares, POISONS[kind])}
        shares = _with_share(kind, so_far, shares, luck, data)
    config = config_of(data, Path(), shares=shares)
    firsts, batch = _firsts(config, windows), config.train.global_batch_size
    return [
        Case(seed, Fault(kind, firsts[kind] // batch + 1), "data", _ranks_of(config, slot=firsts[kind] % batch), shares=shares)
        for kind in windows
    ]


def _with_share(
    kind: Kind, windows: Mapping[Kind, Window], shares: Mapping[str, float], luck: random.Random, data: Path
) -> dict[str, float]:
    """`shares` and one for `kind`, so that all of `windows` are kept."""
    for _ in range(_MOST_DRAWS):
        tried = {**shares, POISONS[kind]: luck.uniform(5e-4, 1.5e-3)}
        config = config_of(data, Path(), shares=tried)
        firsts, batch = _firsts(config, windows), config.train.global_batch_size
        if all(first <= firsts.get(known, -1) // batch + 1 <= last for known, (first, last) in windows.items()):
            return tried
    raise AssertionError(f"no share lets {kind} come in {windows[kind]}")


def _firsts(config: RunConfig, windows: Mapping[Kind, Window]) -> dict[Kind, int]:
    """The first sample of each kind, where it comes before the last step of its window is over."""
    until = config.train.global_batch_size * max(last for _, last in windows.values())
    by_source = first_samples_of(config, [POISONS[kind] for kind in windows], until=until)
    return {kind: by_source[POISONS[kind]] for kind in windows if POISONS[kind] in by_source}


def _of_a_sample(case: Case, *, slot: int, data: Path) -> Case:
    config = case.config(data, Path())
    slot %= config.train.global_batch_size
    row = row_of(config, step=case.fault.step, slot=slot)
    return replace(case, fault=replace(case.fault, row=row), ranks=_ranks_of(config, slot=slot))


def _ranks_of(config: RunConfig, *, slot: int) -> tuple[int, ...]:
    return place_of_slot(slot, micro_batch_size=config.train.micro_batch_size, parallel=config.parallel).ranks
