"""How long a rank may go without a beat in each phase, and what is learned about it from a run that goes well. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from surefoot.coordinate.beats import Beat
from surefoot.core.records import Phase
from surefoot.core.sections import LaunchSection

STOPPED_S = 1.0
"""A process in state T this long, and at two looks at least, is stopped: nobody stops and continues a rank in less."""

PAUSE_S = 1.0
"""More than this between two looks is a pause of whoever looks (it was stopped, or the machine slept): the rest of it counts for nobody."""

_MIN_GAPS = 20
_MAX_GAPS = 256
_QUANTILE = 0.99
_FACTOR = 8.0
_LEARNED = frozenset({Phase.STEP, Phase.DATA})  # the others are declared long by what they do, and rare: nothing is learned from a few


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """In seconds, each finite; `first_step_s` instead of `step_s` until a rank has finished one, for it compiles and connects lazily."""

    start_s: float
    restore_s: float
    data_s: float
    first_step_s: float
    step_s: float
    evaluate_s: float
    save_s: float
    end_s: float

    def of(self, phase: Phase, *, warm: bool) -> float:
        if phase is Phase.STEP:
            return self.step_s if warm else max(self.first_step_s, self.step_s)
        by_phase = {
            Phase.START: self.start_s,
            Phase.RESTORE: self.restore_s,
            Phase.DATA: self.data_s,
            Phase.EVALUATE: self.evaluate_s,
            Phase.SAVE: self.save_s,
            Phase.STOPPED: self.end_s,
        }
        return by_phase[phase]


@dataclass(frozen=True, slots=True)
class Learned:
    """The newest gaps between beats that ended by themselves, by phase, in one `topology`. A gap that ended in an alarm is none of them."""

    topology: str = ""
    gaps_s: Mapping[Phase, tuple[float, ...]] = field(default_factory=dict)

    def note(self, phase: Phase, gap_s: float) -> Learned:
        if phase not in _LEARNED:
            return self
        return replace(self, gaps_s={**self.gaps_s, phase: (*self.gaps_s.get(phase, ()), gap_s)[-_MAX_GAPS:]})

    def for_topology(self, topology: str) -> Learned:
        """Itself, or nothing: what other ranks or shapes took says little about these."""
        return self if self.topology == topology else Learned(topology)

    def as_json(self) -> dict[str, object]:
        return {
            "schema_version": 1,
            "topology": self.topology,
            "gaps_s": {phase.label: [round(gap_s, 3) for gap_s in gaps] for phase, gaps in self.gaps_s.items()},
        }

    @classmethod
    def from_json(cls, record: object) -> Learned:
        """Nothing where the record is not one of these: then it is learned anew."""
        try:
            assert isinstance(record, dict)
            named = {phase.label: phase for phase in _LEARNED}
            gaps_s = {named[label]: tuple(float(gap_s) for gap_s in gaps) for label, gaps in record["gaps_s"].items()}
            if any(not math.isfinite(gap_s) or gap_s < 0.0 for gaps in gaps_s.values() for gap_s in gaps):
                return cls()
            return cls(str(record["topology"]), gaps_s)
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
            return cls()


def configured_limits(launch: LaunchSection) -> PhaseLimits:
    """Before anything is learned."""
    return PhaseLimits(
        start_s=launch.init_limit_s,
        restore_s=launch.init_limit_s,
        data_s=launch.data_limit_s,
        first_step_s=launch.first_step_limit_s,
        step_s=launch.step_limit_s,
        evaluate_s=launch.evaluate_limit_s,
        save_s=launch.save_limit_s,
        end_s=2 * launch.end_limit_s,  # from the first rank that is done the others have that time once; this is for when none is
    )


def limits_now(launch: LaunchSection, learned: Learned) -> PhaseLimits:
    """Step and data by what was seen, once that is enough: eight times what one gap in a hundred exceeds,
    `launch.floor_limit_s` at least.

    More than was configured, too, where gaps are that long and no alarm ended them.
    """
    limits = configured_limits(launch)
    if launch.limits == "fixed":
        return limits
    return replace(
        limits,
        step_s=_learned_s(learned.gaps_s.get(Phase.STEP, ()), launch.step_limit_s, floor_s=launch.floor_limit_s),
        data_s=_learned_s(learned.gaps_s.get(Phase.DATA, ()), launch.data_limit_s, floor_s=launch.floor_limit_s),
    )


def worst_case_line(limits: PhaseLimits, *, look_s: float) -> str:
    """The whole budget in one line, for the start of a run."""
    margin_s = 2 * look_s
    hung = [
        ("step", limits.step_s),
        ("first step", max(limits.first_step_s, limits.step_s)),
        ("data", limits.data_s),
        ("evaluation", limits.evaluate_s),
        ("save", limits.save_s),
        ("start or restore", max(limits.start_s, limits.restore_s)),
        ("end", limits.end_s),
    ]
    words = ", ".join(f"hung {name} {limit_s + margin_s:.3g} s" for name, limit_s in hung)
    return f"worst-case detection: dead rank {look_s:.1g} s, stopped rank {STOPPED_S + margin_s:.2g} s, {words}"


def gaps_that_ended(before: Iterable[tuple[Beat, float]], after: Mapping[int, Beat]) -> list[tuple[Phase, float]]:
    """Of beats with their ages at the last look: those that another has followed since. A gap is up to one look longer than that."""
    return [
        (beat.phase, age_s)
        for beat, age_s in before
        if beat.num_beats and beat.warm and (now := after[beat.rank]).num_beats != beat.num_beats and now.pid == beat.pid
    ]


def _learned_s(gaps_s: tuple[float, ...], configured_s: float, *, floor_s: float) -> float:
    if len(gaps_s) < _MIN_GAPS:
        return configured_s
    ordered = sorted(gaps_s)
    return max(floor_s, _FACTOR * ordered[math.ceil(_QUANTILE * len(ordered)) - 1])
