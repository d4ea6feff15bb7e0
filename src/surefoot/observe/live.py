"""What a run is doing at this moment: `live.json`, renewed by whoever supervises it, and whether its lock is held by a live process.

`live.json` describes a live process and means nothing without one, so it is atomic but not fsynced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import write_atomic
from surefoot.core.holder import LOCK_NAME, LockRecord, is_alive, parse_lock, this_process

LIVE_FORMAT = 1
LIVE_NAME = "live.json"


@dataclass(frozen=True, slots=True)
class RankLive:
    """One rank as its beats show it; `age_s` is the time since its last beat when the record was written."""

    rank: int
    pid: int
    phase: str
    step: int
    age_s: float


@dataclass(frozen=True, slots=True)
class LiveRecord:
    pid: int
    host: str
    generation: int
    attempt: int
    phase: str
    step: int
    ranks: tuple[RankLive, ...]
    updated_utc: str
    num_restarts: int


def write_live(run_dir: Path, record: LiveRecord) -> None:
    write_atomic(run_dir / LIVE_NAME, strict_json.dumps({"format_version": LIVE_FORMAT, **strict_json.plain(record)}), durable=False)


def read_live(run_dir: Path) -> LiveRecord | None:
    """None when there is none, or it is damaged or of a later format."""
    try:
        raw = strict_json.loads((run_dir / LIVE_NAME).read_bytes())
        if not isinstance(raw, Mapping) or raw["format_version"] > LIVE_FORMAT:
            return None
        return LiveRecord(
            pid=int(raw["pid"]),
            host=str(raw["host"]),
            generation=int(raw["generation"]),
            attempt=int(raw["attempt"]),
            phase=str(raw["phase"]),
            step=int(raw["step"]),
            ranks=tuple(_rank(rank) for rank in raw["ranks"]),
            updated_utc=str(raw["updated_utc"]),
            num_restarts=int(raw["num_restarts"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _rank(raw: Mapping[str, object]) -> RankLive:
    return RankLive(
        rank=int(str(raw["rank"])),
        pid=int(str(raw["pid"])),
        phase=str(raw["phase"]),
        step=int(str(raw["step"])),
        age_s=float(str(raw["age_s"])),
    )


def read_lock(run_dir: Path) -> LockRecord | None:
    """The lock as it stands, live or not; None when nobody holds the run."""
    try:
        return parse_lock((run_dir / LOCK_NAME).read_bytes())
    except OSError:
        return None


def is_held(lock: LockRecord | None, *, clock: Clock) -> bool:
    """Whether the lock's owner lives: by its pid where that can be seen from here, else by its lease."""
    if lock is None:
        return False
    alive = is_alive(lock.holder, seen_from=this_process())
    return lock.age_s(clock.utc()) <= lock.lease_s if alive is None else alive
