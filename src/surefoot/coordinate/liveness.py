"""Whether the ranks of this machine live and move. A pure function of their beats, of what the kernel says, and of the last look.

Alive is the kernel's word and moving is the loop's; neither stands in for the other. An alarm names whom it was raised about, victims
among them: who is to blame is judged from evidence, afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.coordinate.beats import Beat
from surefoot.coordinate.phase_limits import PAUSE_S, STOPPED_S, PhaseLimits
from surefoot.coordinate.witness import Alarm

STOPPED, TRACED, UNINTERRUPTIBLE = "T", "t", "D"


@dataclass(frozen=True, slots=True)
class Watched:
    """What one look leaves to the next: of each rank its last beat, for how long it has been watched not to move, and stand stopped.

    `ages_s` are watched times, not differences of clocks: whatever whoever looks has slept through is in none of them.
    """

    looked_s: float | None = None
    num_beats: Mapping[int, int] = field(default_factory=dict)
    ages_s: Mapping[int, float] = field(default_factory=dict)
    stopped_s: Mapping[int, float] = field(default_factory=dict)


def look(
    watched: Watched, beats: Sequence[Beat], process_states: Mapping[int, str], limits: PhaseLimits, *, now_s: float
) -> tuple[Alarm | None, Watched]:
    """The alarm, if there is one, and what to pass at the next look. `process_states` by rank, of those that are there."""
    after = _aged(watched, beats, process_states, now_s=now_s)
    alive = [beat for beat in beats if process_states.get(beat.rank)]
    return _stopped(after, alive, now_s=now_s) or _silent(after, alive, process_states, limits, now_s=now_s), after


def _aged(watched: Watched, beats: Sequence[Beat], states: Mapping[int, str], *, now_s: float) -> Watched:
    passed_s = 0.0 if watched.looked_s is None else min(PAUSE_S, max(0.0, now_s - watched.looked_s))
    is_debugged = TRACED in states.values()  # the others may wait for the one that somebody looks into
    ages_s, stopped_s = {}, {}
    for beat in beats:
        if watched.num_beats.get(beat.rank) != beat.num_beats:
            said_s = now_s - beat.mono_s if beat.num_beats else 0.0
            ages_s[beat.rank] = min(passed_s, max(0.0, said_s))
        else:
            ages_s[beat.rank] = watched.ages_s[beat.rank] + (0.0 if is_debugged else passed_s)
        if states.get(beat.rank) == STOPPED:
            stopped_s[beat.rank] = watched.stopped_s[beat.rank] + passed_s if beat.rank in watched.stopped_s else 0.0
    return Watched(now_s, {beat.rank: beat.num_beats for beat in beats}, ages_s, stopped_s)


def _stopped(watched: Watched, alive: Sequence[Beat], *, now_s: float) -> Alarm | None:
    """The first look that finds a rank stopped starts its time, so that two agree at least."""
    stopped = [beat for beat in alive if watched.stopped_s.get(beat.rank, 0.0) >= STOPPED_S]
    if not stopped:
        return None
    first = stopped[0]
    reason = f"{_names(stopped)} is stopped (state T) in phase {first.phase.label} after step {first.step}"
    return Alarm(
        "stopped",
        tuple(beat.rank for beat in stopped),
        reason,
        now_s,
        phase=first.phase.label,
        age_s=watched.stopped_s[first.rank],
        limit_s=STOPPED_S,
    )


def _silent(watched: Watched, alive: Sequence[Beat], states: Mapping[int, str], limits: PhaseLimits, *, now_s: float) -> Alarm | None:
    allowed_s = {beat.rank: limits.of(beat.phase, warm=beat.warm) for beat in alive}
    over = [beat for beat in alive if watched.ages_s[beat.rank] > allowed_s[beat.rank]]
    # Who works in a phase that may take long keeps the others waiting with right; who waits in an exchange keeps nobody.
    working_s = [allowed_s[beat.rank] for beat in alive if beat not in over and not beat.group]
    late = [beat for beat in over if allowed_s[beat.rank] >= max(working_s, default=0.0)]
    if not late:
        return None
    oldest = max(late, key=lambda beat: watched.ages_s[beat.rank])
    age_s, limit_s = watched.ages_s[oldest.rank], allowed_s[oldest.rank]
    where = f", inside an exchange of the {oldest.group} group" if oldest.group else ""
    in_kernel = [beat for beat in late if states[beat.rank] == UNINTERRUPTIBLE]
    told = f"; {_names(in_kernel)} waits in the kernel (state D), for a disk or a device" if in_kernel else ""
    reason = (
        f"{_names(late)} did not move for {age_s:.1f} s in phase {oldest.phase.label} after step {oldest.step}{where}; "
        f"the limit is {limit_s:g} s{told}"
    )
    ranks = tuple(beat.rank for beat in late)
    return Alarm("silent", ranks, reason, now_s, phase=oldest.phase.label, age_s=age_s, limit_s=limit_s)


def _names(beats: Sequence[Beat]) -> str:
    return "rank " + ", ".join(str(beat.rank) for beat in beats)
