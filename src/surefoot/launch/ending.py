"""Whether a generation of ranks is over, why, and who is to blame. Pure: what was seen goes in, a decision with a reason comes out."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from surefoot.coordinate.causes import DELIBERATE_CODES
from surefoot.coordinate.culprit import SAME_MOMENT_S, Culprit
from surefoot.coordinate.witness import Alarm
from surefoot.core.errors import EXIT_DONE, EXIT_RETRY
from surefoot.launch.wire import RankExit

# What a Leave can end with: agreed by the group, so every rank ends with it, and ledgered by rank 0.
_AGREED_CODES = frozenset({EXIT_DONE, EXIT_RETRY, 6, 7, 93})


@dataclass(frozen=True, slots=True)
class Limits:
    """In seconds; `launch.init_limit_s`, `launch.grace_s`, `launch.end_limit_s` and `launch.settle_s`."""

    init_s: float
    grace_s: float
    end_s: float
    settle_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """A generation at one moment, as this machine sees it: `ranks` are those that are here.

    `complained` are the ranks whose entry point left an error file; times are monotonic seconds.

    `nursery_code` tells how the nursery that is gone ended, negative for a signal; None when we ended it.
    """

    now_s: float
    ranks: tuple[int, ...]
    exits: tuple[RankExit, ...]
    complained: frozenset[int]
    started_s: float
    all_stepping: bool
    nursery_gone: bool
    nursery_silent_s: float
    leave_asked_s: float | None
    kill_asked: bool
    nursery_code: int | None = None
    alarm: Alarm | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """finished: every rank is done. left: worth a retry. failed: `what` was lost, `culprit` is the exit to blame.

    `in_good_order`: every rank ended by itself and ledgered what is to be said; else there are ranks to kill and a line to write.
    `nursery_code` is the own exit code of a nursery that was lost, negative for a signal; None when we ended it. `evidence` is the file
    that was written about this very ending, None while there is none.

    `alarm` is what was raised about ranks that did not end; `verdict` who is to blame once the evidence is gathered, `detected_mono_s` the
    moment when the ending was known.
    """

    kind: Literal["finished", "left", "failed"]
    reason: str
    what: Literal["rank", "nursery", "init-deadline", "node"] | None = None
    culprit: RankExit | None = None
    in_good_order: bool = False
    nursery_code: int | None = None
    evidence: Path | None = None
    alarm: Alarm | None = None
    verdict: Culprit | None = None
    detected_mono_s: float = 0.0


def end_of(seen: Seen, limits: Limits) -> Ending | None:
    """How the generation ended, or None while it goes on."""
    if seen.kill_asked:
        return Ending("left", "interrupted twice: killed at once")
    bad = [ended for ended in seen.exits if not _is_orderly(ended, seen.complained)]
    over = len(seen.exits) == len(seen.ranks)
    if over and not bad:
        return _agreed(seen.exits)
    if bad and (over or _by_signal(bad) or seen.now_s >= bad[0].mono_s + limits.settle_s):
        return _failed_rank(culprit(bad), seen)
    if seen.nursery_gone or seen.nursery_silent_s >= limits.settle_s:
        how = how_it_ended("the nursery", seen.nursery_code) if seen.nursery_gone else "a rank is gone and the nursery does not report it"
        return _unless_leaving(Ending("failed", how, what="nursery", nursery_code=seen.nursery_code if seen.nursery_gone else None), seen)
    if seen.leave_asked_s is None and not seen.all_stepping and seen.now_s >= seen.started_s + limits.init_s:
        reason = f"not every rank reached its first step within {limits.init_s:g} s of its start"
        return Ending("failed", reason, what="init-deadline", alarm=seen.alarm)
    if seen.alarm is not None:
        return _unless_leaving(Ending("failed", seen.alarm.reason, what="rank", alarm=seen.alarm), seen)
    if seen.leave_asked_s is not None:
        if seen.now_s >= seen.leave_asked_s + limits.grace_s:
            return Ending("left", f"the ranks did not leave within {limits.grace_s:g} s of being asked and were killed")
    elif (late := _left_behind(seen, limits)) is not None:
        return late
    return None


def culprit(bad: Sequence[RankExit]) -> RankExit:
    """The exit to blame, given at least one.

    A rank that leaves with 75 says that somebody else went away, so it is blamed only when nobody else is left. Of the others the earliest
    counts, a signal before an error of the same moment.
    """
    accusers = [ended for ended in bad if ended.exit_code == EXIT_RETRY]
    others = [ended for ended in bad if ended.exit_code != EXIT_RETRY] or accusers
    first_s = min(ended.mono_s for ended in others)
    together = [ended for ended in others if ended.mono_s <= first_s + SAME_MOMENT_S]
    return min(together, key=lambda ended: (ended.signal is None, ended.exit_code not in DELIBERATE_CODES, ended.mono_s))


def exit_text(ended: RankExit) -> str:
    """'rank 1 was killed by SIGKILL', 'rank 0 left with exit code 4'."""
    return how_it_ended(f"rank {ended.rank}", ended.exit_code if ended.signal is None else -ended.signal)


def how_it_ended(who: str, code: int | None) -> str:
    """In words, from a code as `subprocess` has it: negative for a signal, None when that is not known."""
    if code is None:
        return f"{who} is gone"
    if code >= 0:
        return f"{who} left with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"  # real-time signals have no name
    return f"{who} was killed by {name}"


def _is_orderly(ended: RankExit, complained: frozenset[int]) -> bool:
    """Ended with what the group agreed on, which leaves no error file."""
    return ended.exit_code in _AGREED_CODES and ended.rank not in complained


def _agreed(exits: Sequence[RankExit]) -> Ending:
    """All ranks ended by agreement. A rank that had nothing left to do may say 0 where the others say why they stop."""
    last = max(exits, key=lambda ended: (ended.exit_code in DELIBERATE_CODES, ended.exit_code != EXIT_DONE))
    if last.exit_code == EXIT_DONE:
        return Ending("finished", "every rank is done", in_good_order=True)
    if last.exit_code == EXIT_RETRY:
        return Ending("left", "every rank left in good order", in_good_order=True)
    return Ending("failed", f"every rank left with exit code {last.exit_code}", what="rank", culprit=last, in_good_order=True)


def _left_behind(seen: Seen, limits: Limits) -> Ending | None:
    """Ranks that agree to leave do so together. Those that are merely done give the others longer: rank 0 may have work after the last
    step. But one that hangs there is lost, and nobody knows why, so no exit is blamed and a restart does the end once more."""
    orderly = [ended for ended in seen.exits if _is_orderly(ended, seen.complained)]
    left = next((ended for ended in orderly if ended.exit_code != EXIT_DONE), None)
    if left is not None and seen.now_s >= left.mono_s + limits.grace_s:
        return Ending("failed", f"{exit_text(left)}, the others did not within {limits.grace_s:g} s", what="rank", culprit=left)
    done = next((ended for ended in orderly if ended.exit_code == EXIT_DONE), None)
    if done is not None and seen.now_s >= done.mono_s + limits.end_s:
        late = ", ".join(str(rank) for rank in sorted(set(seen.ranks) - {ended.rank for ended in seen.exits}))
        return Ending("failed", f"rank {done.rank} is done, but {limits.end_s:g} s later not rank {late}", what="rank")
    return None


def _by_signal(bad: Sequence[RankExit]) -> bool:
    return any(ended.signal is not None for ended in bad)


def _failed_rank(blamed: RankExit, seen: Seen) -> Ending:
    if blamed.exit_code == EXIT_RETRY:
        return _unless_leaving(_inconclusive(blamed, seen), seen)
    ending = Ending("failed", exit_text(blamed), what="rank", culprit=blamed)
    return ending if blamed.exit_code in DELIBERATE_CODES else _unless_leaving(ending, seen)


def _inconclusive(accuser: RankExit, seen: Seen) -> Ending:
    """Whoever ended says that another one went away. Ranks that are still there answered nobody: they are named, and nobody is blamed."""
    silent = sorted(set(seen.ranks) - {ended.rank for ended in seen.exits})
    named = f"rank {', '.join(str(rank) for rank in silent)} did not answer and is still there" if silent else "nobody knows whom"
    return Ending("failed", f"rank {accuser.rank} lost a peer: {named}", what="rank")


def _unless_leaving(ending: Ending, seen: Seen) -> Ending:
    """Who was asked to leave does not restart: the next start resumes from the newest checkpoint."""
    if seen.leave_asked_s is None:
        return ending
    return replace(ending, kind="left", reason=f"{ending.reason} while the ranks were asked to leave")
