"""The lock of a run: one job at a time, on any number of hosts that share the folder.

`<run>/lock` names its owner. It is replaced only by compare-and-swap: whoever creates the claim file of the present content with O_EXCL may
rename a new content over it. So of two that race for a stale lock exactly one wins, and an owner that was thought dead and wakes up finds
that the lock is no longer its own. flock on the run folder only keeps two processes of one host from tidying up the same dead claim.

An owner on this boot is judged by its pid and start time. An owner elsewhere cannot be seen, so it is watched: it lives when the lock
changes; when it has not changed for its lease and a fence time of one more lease, its own `renew` has long failed, and it is taken over.
Only our own clock measures that time: the stamps in the lock are another host's, and clocks of hosts differ by more than a lease.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import ConfigError, PeerLost, SurefootError
from surefoot.core.holder import LOCK_NAME, Holder, LockRecord, is_alive, parse_lock, this_process

# No settings: a swap writes one small file, which takes milliseconds on any disk that can carry a run at all. Its limit only has to be
# far above that and below a lease, so nobody gains by another value.
_WATCH_STEP_S = 0.5
_RACE_STEP_S = 0.01
_SWAP_LIMIT_S = 10.0
_RENEWALS_PER_LEASE = 6
_TAKE_OVER_TRIES = 1000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Whose lock was taken over and why, for `lock.taken_over`. `record` is None when the old lock was unreadable."""

    record: LockRecord | None
    reason: str

    @property
    def former(self) -> dict[str, object]:
        """What the old lock said; empty when it was unreadable."""
        return self.record.as_json() if self.record else {}


class RunLock:
    """A lock that is held, until `release` or the end of a `with` block. Call `renew` often: it writes only a few times per lease."""

    def __init__(self, path: Path, record: LockRecord, *, clock: Clock, taken_over: TakenOver | None) -> None:
        self.path = path
        self.record = record
        self.taken_over = taken_over
        self._clock = clock
        self._renewed_s = clock.monotonic_s()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    @classmethod
    def acquire(
        cls, run_dir: Path, *, job: str, clock: Clock, lease_s: float, generation: int = 0, holder: Holder | None = None
    ) -> RunLock:
        """Take the run in the existing folder `run_dir` for `job`. `taken_over` tells from whom, for the ledger.

        Raises ConfigError naming host and pid when its owner lives. Waits up to two leases to learn that of an owner whom nobody can see
        from here, and says so.
        """
        path = run_dir / LOCK_NAME
        mine = LockRecord(job, holder or this_process(), generation, clock.utc(), lease_s)
        watch = _Watch(clock=clock, lease_s=lease_s, seen_from=mine.holder)
        while True:
            content = _read(path)
            taken_over = watch.judge(content, path=path)
            if content is None or taken_over is not None:
                mine = replace(mine, renewed_at=clock.utc())
                if _swap(path, expected=content, record=mine, clock=clock):
                    lock = cls(path, mine, clock=clock, taken_over=taken_over)
                    _remove_litter(lock)
                    return lock
                clock.sleep(_RACE_STEP_S)
            else:
                clock.sleep(_WATCH_STEP_S)

    @classmethod
    def take_over(cls, run_dir: Path, *, job: str, generation: int, reason: str, clock: Clock, lease_s: float) -> RunLock:
        """Take the lock for node 0 of `generation`, at once. Only on the word of the job's coordinator (`reason`): no rank of an older
        generation is left, so no lease has to be waited out. A former holder that wakes up finds it gone.

        Raises PeerLost when it is of another job, or of this generation or a later one: then this node is of the past.
        """
        path = run_dir / LOCK_NAME
        for _ in range(_TAKE_OVER_TRIES):
            content = _read(path)
            record = parse_lock(content) if content is not None else None
            if record is not None and (record.job != job or record.generation >= generation):
                raise PeerLost(
                    f"{_name(record)} holds the run in generation {record.generation}",
                    where=str(path),
                    hint="this node must end; the run goes on elsewhere",
                    got=record.generation,
                    wanted=generation,
                )
            mine = LockRecord(job, this_process(), generation, clock.utc(), lease_s)
            if _swap(path, expected=content, record=mine, clock=clock):
                taken_over = TakenOver(record, reason) if content is not None else None
                lock = cls(path, mine, clock=clock, taken_over=taken_over)
                _remove_litter(lock)
                return lock
            clock.sleep(_RACE_STEP_S)  # its holder renewed it meanwhile, or another one claims it
        raise PeerLost("the lock changes hands too fast to be taken", where=str(path), hint="who else renews it?")

    def renew(self, *, generation: int | None = None) -> None:
        """Extend the lease when a sixth of it is gone, or the generation is another one.

        Raises PeerLost when the lock is no longer ours: the run belongs to somebody else and this job must end. A lock that cannot be
        written (disk full) is ours until another host takes it for dead: that is warned about and tried again when the next sixth is gone.
        """
        generation = self.record.generation if generation is None else generation
        now_s = self._clock.monotonic_s()
        if generation == self.record.generation and now_s - self._renewed_s < self.record.lease_s / _RENEWALS_PER_LEASE:
            return
        renewed = replace(self.record, generation=generation, renewed_at=self._clock.utc())
        try:
            swapped = _swap(self.path, expected=_content(self.record), record=renewed, clock=self._clock)
        except SurefootError as error:
            swapped = _read(self.path) == _content(renewed)  # Its last sync may have failed after the rename.
            if not swapped:
                _log.warning("%s; other hosts take this run for dead after %g s", error, 2 * self.record.lease_s)
                self._renewed_s = now_s
                return
        if not swapped:
            owner = parse_lock(_read(self.path) or b"")
            raise PeerLost(
                "the lock of this run is no longer ours" + (f": {_name(owner)} took it over" if owner else ""),
                where=str(self.path),
                hint="this job must end; the run goes on elsewhere",
                got=owner.job if owner else None,
                wanted=self.record.job,
            )
        self.record, self._renewed_s = renewed, now_s

    def is_ours(self) -> bool:
        """Whether it still says so; it can be taken at any moment."""
        return _read(self.path) == _content(self.record)

    def release(self) -> None:
        """Give the run free. A lock that is no longer ours is left alone; one that cannot be removed is taken over once we are gone."""
        try:
            if not _swap(self.path, expected=_content(self.record), record=None, clock=self._clock):
                _log.warning("%s was not ours any more when we released it", self.path)
        except SurefootError as error:
            _log.warning("%s; the next job will take it over", error)


class _Watch:
    """Tells live owners from dead ones. Holds since when, by our own clock, the lock has not changed."""

    def __init__(self, *, clock: Clock, lease_s: float, seen_from: Holder) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._seen_from = seen_from
        self._content: bytes | None = None
        self._since_s = 0.0

    def judge(self, content: bytes | None, *, path: Path) -> TakenOver | None:
        """Why the lock may be taken over; None when it is free or must be watched longer. Raises ConfigError when its owner lives."""
        if content is None:
            return None
        record = parse_lock(content)
        if record is not None:
            alive = is_alive(record.holder, seen_from=self._seen_from)
            if alive is False:
                return TakenOver(record, f"process {record.holder.pid} is gone")
            # Whoever wrote it while we watched lives.
            if alive or (self._content is not None and content != self._content):
                raise _live_error(record, path=path)
        return self._lapsed(content, record, path=path)

    def _lapsed(self, content: bytes, record: LockRecord | None, *, path: Path) -> TakenOver | None:
        now_s = self._clock.monotonic_s()
        lease_s = record.lease_s if record else self._lease_s
        if content != self._content:
            self._content, self._since_s = content, now_s
            why = self._why_unseen(record)
            _log.warning("%s is held, and %s: waiting up to two leases, %g s, for it to be renewed", path, why, 2 * lease_s)
        unchanged_s = now_s - self._since_s
        if unchanged_s <= 2 * lease_s:
            return None
        return TakenOver(record, f"not renewed for {unchanged_s:.0f} s, its lease is {lease_s:g} s")

    def _why_unseen(self, record: LockRecord | None) -> str:
        if record is None:
            return "what it says cannot be read"
        theirs, ours = record.holder, self._seen_from
        if theirs.host != ours.host:
            return f"{_name(record)} cannot be seen from here"
        if theirs.boot_id != ours.boot_id:
            return f"{_name(record)} belongs to another boot: this host was restarted, or another one has its name"
        return f"{_name(record)} runs in another container"


def _live_error(record: LockRecord, *, path: Path) -> ConfigError:
    holder = record.holder
    return ConfigError(
        f"this run is live: {_name(record)} holds it",
        where=str(path),
        hint=f"wait for it, or stop it on {holder.host} with: kill -TERM {holder.pid}",
        host=holder.host,
        pid=holder.pid,
        job=record.job,
    )


def _name(record: LockRecord) -> str:
    return f"process {record.holder.pid} on host {record.holder.host} (job {record.job})"


def _content(record: LockRecord) -> bytes:
    return strict_json.dumps(record.as_json()).encode() + b"\n"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _swap(path: Path, *, expected: bytes | None, record: LockRecord | None, clock: Clock) -> bool:
    """Replace the lock by `record` (None removes it) if it is still `expected`; False when somebody else was first."""
    try:
        with _claimed(path, expected=expected, clock=clock) as ours:
            if not ours or _read(path) != expected:
                return False
            if record is not None:
                write_atomic(path, _content(record))
            else:
                path.unlink()
                fsync_dir(path.parent)
            return True
    except OSError as error:
        raise SurefootError(
            f"could not write the lock: {error.strerror}", where=str(path), hint="check space and permissions of the run folder"
        ) from error


@contextmanager
def _claimed(path: Path, *, expected: bytes | None, clock: Clock) -> Iterator[bool]:
    """The sole right to replace content `expected`; False when another process has it or had it.

    A content never comes back once it is replaced (it names job and time), so a claim that comes too late finds another content.
    """
    claim = _claim_path(path, content=expected)
    if not _create(claim, clock=clock):
        yield False
        return
    try:
        yield True
    finally:
        claim.unlink(missing_ok=True)


def _claim_path(path: Path, *, content: bytes | None) -> Path:
    key = hashlib.sha256(content).hexdigest()[:16] if content is not None else "free"
    return path.with_name(f"{path.name}.claim-{key}")


def _create(claim: Path, *, clock: Clock) -> bool:
    with _alone_on_host(claim.parent, clock=clock):
        _remove_dead(claim, clock=clock)
        try:
            fd = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            holder = this_process()
            os.write(fd, json.dumps([holder.host, holder.boot_id, holder.pid, holder.pid_start_time, holder.pid_namespace]).encode())
        except OSError:
            claim.unlink()
            raise
        finally:
            os.close(fd)
    return True


def _remove_dead(claim: Path, *, clock: Clock) -> None:
    """Claims last for milliseconds. One whose process died goes; so does one that nobody here can judge and that is older than any swap."""
    with suppress(FileNotFoundError):
        content = claim.read_bytes()
        alive = _is_claimant_alive(content)
        give_up_s = clock.monotonic_s() + _SWAP_LIMIT_S
        while alive is None and clock.monotonic_s() < give_up_s:
            clock.sleep(_RACE_STEP_S)
            if claim.read_bytes() != content:
                return
        if not alive:
            claim.unlink()


def _is_claimant_alive(content: bytes) -> bool | None:
    try:
        return is_alive(Holder(*json.loads(content)), seen_from=this_process())
    except (ValueError, TypeError):
        return None


def _remove_litter(lock: RunLock) -> None:
    """Claims of contents that are gone: whoever left them was killed between its swap and its tidying."""
    keep = {_claim_path(lock.path, content=None), _claim_path(lock.path, content=_content(lock.record))}
    for claim in set(lock.path.parent.glob(f"{lock.path.name}.claim-*")) - keep:
        claim.unlink(missing_ok=True)


@contextmanager
def _alone_on_host(run_dir: Path, *, clock: Clock) -> Iterator[None]:
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        give_up_s = clock.monotonic_s() + 2 * _SWAP_LIMIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                # A file system without flock: the claims decide alone.
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR) or clock.monotonic_s() >= give_up_s:
                    break
            clock.sleep(_RACE_STEP_S)
        yield
    finally:
        os.close(fd)
