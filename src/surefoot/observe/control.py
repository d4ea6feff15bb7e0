"""Orders of people to a live run, in its control file: one JSON line each, appended by whoever may write there, from any node.

An order is answered in the ledger, by its id, and thus taken once whatever is killed. Here are the form of a line, how one is added, and
what was added since the last look. Nothing in the file can stop a run: what is no order is refused by name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import fsync_dir
from surefoot.core.errors import ConfigError, SurefootError

CONTROL_NAME: Final = "control"
CONTROL_FORMAT: Final = 1
MAX_PAUSE_S: Final = 30 * 86400.0
"""A month: longer is a slip of the hand, and a clock that counts it is worth nothing."""
MAX_LINE_BYTES: Final = 4096
"""POSIX systems write so much in one piece, and no order needs more."""
ORDER_VERBS: Final = ("stop", "save", "pause", "resume", "rollback", "drain")

_LOOK_BYTES = 1 << 20  # of a file that somebody else filled: the rest is read at the next look
_LOCK_LIMIT_S = 10.0  # a write takes milliseconds; a lock that is held for longer is a stopped process, and O_APPEND needs none on a disk
_LOCK_STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class Order:
    """What a person asks of the run that `job` trains (the id in its lock; a later job refuses it). `by` is user@host, as they say it."""

    verb: str
    by: str
    job: str
    time_utc: str
    reason: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class NoOrder:
    """A line that cannot be one, and why. `id` is what it says it is, else made of its bytes: the same line has the same."""

    id: str
    what: str


def append_order(run_dir: Path, order: Order, *, clock: Clock) -> None:
    """Add a line to the control file of a run, durably.

    Raises ConfigError when it may not be written, or is longer than a line may be; SurefootError when it did not arrive whole.
    """
    path = run_dir / CONTROL_NAME
    line = strict_json.canonical({"version": CONTROL_FORMAT, **asdict(order)}) + b"\n"
    if len(line) > MAX_LINE_BYTES:
        what = f"the order takes {len(line)} bytes, a line of the control file at most {MAX_LINE_BYTES}"
        raise ConfigError(what, where=str(path), hint="a shorter reason, or fewer documents at once", got=len(line), limit=MAX_LINE_BYTES)
    try:
        _append(path, line, clock=clock)
    except OSError as error:
        hint = "ask whoever owns the run folder for the right to write there; it must be the folder in which the run trains"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space and ask again"
        raise ConfigError(f"the order cannot be written: {error.strerror}", where=str(path), hint=hint) from error


def _append(path: Path, line: bytes, *, clock: Clock) -> None:
    is_new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError("it is no file", where=str(path), hint="move it away: the control file is made by the first order")
        if is_new:
            _share_as_folder(fd, path.parent)
        _lock_if_possible(fd, clock=clock)
        before = os.fstat(fd).st_size
        is_torn = before > 0 and os.pread(fd, 1, before - 1) != b"\n"
        os.write(fd, b"\n" * is_torn + line)
        os.fsync(fd)
        # Where the file system keeps no locks and has no append, as between clients of NFS, two writes may meet.
        if line not in os.pread(fd, os.fstat(fd).st_size - before, before):
            raise SurefootError("the order did not arrive whole: the disk is full, or another was written at once", where=str(path))
    finally:
        os.close(fd)
    if is_new:
        fsync_dir(path.parent)


def _share_as_folder(fd: int, folder: Path) -> None:
    """Whoever may write into the folder may give orders: the first one who does must not shut the others out by a umask."""
    made = folder.stat()
    with suppress(PermissionError):
        os.fchown(fd, -1, made.st_gid)
    with suppress(PermissionError):
        os.fchmod(fd, 0o644 | (made.st_mode & 0o022))


def _lock_if_possible(fd: int, *, clock: Clock) -> None:
    give_up_s = clock.monotonic_s() + _LOCK_LIMIT_S
    while clock.monotonic_s() < give_up_s:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            clock.sleep(_LOCK_STEP_S)
        except OSError:
            return  # a file system without locks


def parse_order(line: bytes) -> Order | NoOrder:
    """What a line says. Whether the run can follow it is for the run to say."""
    raw: Any = None
    what = f"it is longer than {MAX_LINE_BYTES} bytes"
    if len(line) <= MAX_LINE_BYTES:
        try:
            raw = strict_json.loads(line)
            what = _what_is_wrong(raw)
        except ValueError:
            what = "it is not JSON: a write was cut off, or somebody else wrote it"
    if what:
        claimed = raw.get("id") if isinstance(raw, dict) else None
        return NoOrder(str(claimed) if _is_id(claimed) else f"line-{hashlib.sha256(line).hexdigest()[:16]}", what)
    return Order(**{name: raw[name] for name in Order.__dataclass_fields__})


def _what_is_wrong(raw: object) -> str:
    if not isinstance(raw, dict):
        return "it is not a JSON object"
    if type(raw.get("version")) is not int or raw["version"] > CONTROL_FORMAT:
        return f"its version is {raw.get('version')!r}, this release reads up to {CONTROL_FORMAT}"
    if raw.get("verb") not in ORDER_VERBS:
        return f"there is no order {raw.get('verb')!r}, there are {', '.join(ORDER_VERBS)}"
    words = [name for name in ("by", "job", "time_utc", "reason") if not isinstance(raw.get(name), str)]
    if words or not _is_id(raw.get("id")) or not isinstance(raw.get("fields"), dict):
        return f"{', '.join(words) or 'its id or its fields'} cannot be read"
    return ""


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable()


class ControlTail:
    """What was added to the control file of a run, each line once, in their order; the first look reads it from its start.

    `news` asks the file for its size at most every `look_every_s`. A line without its end is left for later; one that is too long is told
    of once and passed over, without reading it into memory. A file that was replaced is read anew: answers are known by id.
    """

    def __init__(self, run_dir: Path, *, clock: Clock, look_every_s: float) -> None:
        self._path = run_dir / CONTROL_NAME
        self._clock = clock
        self._look_every_s = look_every_s
        self._looked_s = float("-inf")
        self._inode = 0
        self._offset = 0
        self._is_passing = False

    def news(self, *, now: bool = False) -> list[Order | NoOrder]:
        """Raises OSError when the file is there and cannot be read; the next call begins where this one did."""
        now_s = self._clock.monotonic_s()
        if not now and now_s - self._looked_s < self._look_every_s:
            return []
        self._looked_s = now_s
        try:
            told = self._path.stat()
        except FileNotFoundError:
            return []
        if not stat.S_ISREG(told.st_mode):
            return []
        if told.st_ino != self._inode or told.st_size < self._offset:
            self._inode, self._offset, self._is_passing = told.st_ino, 0, False
        if told.st_size <= self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            return self._take(file.read(_LOOK_BYTES))

    def _take(self, added: bytes) -> list[Order | NoOrder]:
        if self._is_passing:
            begin = added.find(b"\n") + 1
            self._offset += begin or len(added)
            self._is_passing = begin == 0
            return self._take(added[begin:]) if begin else []
        whole = added[: added.rfind(b"\n") + 1]
        found = [parse_order(line) for line in whole.split(b"\n")[:-1] if line.strip()]
        rest = added[len(whole) :]
        self._offset += len(whole)
        if len(rest) > MAX_LINE_BYTES:
            self._offset += len(rest)
            self._is_passing = True
            found.append(parse_order(rest[: MAX_LINE_BYTES + 1]))
        return found
