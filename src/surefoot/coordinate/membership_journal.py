"""What happened to a job, one line for each batch, on disk before anything of it is acted on. To read it again is to have the state again.

`<run>/coordinator/journal.jsonl`: {at_s, time_utc, happenings, decisions}. `at_s` is the job's own clock: it stands still while there is no
coordinator, and no host's clock is in it. `decisions` are for people; a replay makes them anew. A torn last line never took effect, and is
cut. One process writes; it looks whether another one did before each line.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.coordinate.members import (
    BecameReady,
    CameBack,
    Decision,
    DrainAsked,
    EndedHere,
    Faulted,
    Happening,
    JobOpened,
    Joined,
    Judge,
    Lapsed,
    LimitsChanged,
    Membership,
    ReadmitAsked,
    ReleaseAsked,
    WantsToLeave,
    WentSilent,
)
from surefoot.coordinate.membership import advance
from surefoot.core import strict_json
from surefoot.core.durable import fsync_dir
from surefoot.core.errors import Corrupt, PeerLost
from surefoot.core.typed_json import record_from_json

_KINDS: Mapping[str, type[Any]] = {
    "joined": Joined, "ready": BecameReady, "silent": WentSilent, "back": CameBack, "lapsed": Lapsed, "fault": Faulted, "ended": EndedHere,
    "leave": WantsToLeave, "drain": DrainAsked, "readmit": ReadmitAsked, "release": ReleaseAsked, "limits": LimitsChanged, "job": JobOpened,
}  # fmt: skip
_NAMES: Mapping[type[Any], str] = {kind: name for name, kind in _KINDS.items()}

Batch = tuple[float, tuple[Happening, ...]]


class MembershipJournal:
    """Open for appending, positioned behind the last whole line. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.num_torn_bytes, self._end = self._cut_torn_tail()
        fsync_dir(path.parent)

    def append(self, happenings: Sequence[Happening], decisions: Sequence[Decision], *, at_s: float, time_utc: str) -> None:
        """On disk when this returns. Raises PeerLost when another has written to the journal: this process is not the one any more."""
        line = strict_json.dumps(
            {
                "at_s": at_s,
                "time_utc": time_utc,
                "happenings": [{"kind": _NAMES[type(item)], **asdict(item)} for item in happenings],
                "decisions": [{"kind": type(item).__name__, **asdict(item)} for item in decisions],
            }
        )
        if (size := os.fstat(self._fd).st_size) != self._end:
            raise PeerLost(
                "another coordinator writes to this journal", where=str(self.path), hint="it is the one now", got=size, wanted=self._end
            )
        data = line.encode() + b"\n"
        written = os.pwrite(self._fd, data, self._end)
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._end + written)
        os.fsync(self._fd)
        self._end += len(data)

    def close(self) -> None:
        os.close(self._fd)

    def _cut_torn_tail(self) -> tuple[int, int]:
        size = os.fstat(self._fd).st_size
        end = size
        while end:
            start = max(0, end - 65536)
            found = os.pread(self._fd, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)
        return size - end, end


def read_journal(path: Path) -> Iterator[Batch]:
    """The batches, oldest first; a torn last line is left out. Raises Corrupt at a line that is none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                content = strict_json.loads(line)
                happenings = tuple(record_from_json(_KINDS[str(item.get("kind"))], item) for item in content["happenings"])
                yield float(content["at_s"]), happenings
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                hint = "move it aside: nodes that run are then told to stop, and the run goes on from its last checkpoint"
                raise Corrupt(f"line {number} of the journal cannot be read: {error}", where=str(path), hint=hint) from error


def replay(state: Membership, batches: Iterator[Batch], *, judge: Judge) -> Membership:
    """The state that these batches lead to."""
    for at_s, happenings in batches:
        state, _ = advance(state, happenings, at_s=at_s, judge=judge)
    return state
