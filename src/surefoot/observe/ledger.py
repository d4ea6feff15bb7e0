"""The ledger: what was seen, decided and done in a run, one line each, chained by hashes and never rewritten.

Any process of node 0 appends, each through a `Ledger` of its own. What `append` has returned survives kill -9 and a power loss; what it has
not returned is there whole or not at all. Newest is whatever stands last: order in this file is the order of events.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core import strict_json
from surefoot.core.clock import Clock
from surefoot.core.durable import fsync_dir
from surefoot.core.errors import CheckpointError, Corrupt, PeerLost, SurefootError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH, sha256_json
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger_lines import (
    LEDGER_FORMAT,
    Tail,
    decode,
    encode,
    encode_entry,
    entry_of,
    read_tail,
    refuse_newer_format,
    seal,
)

LEDGER_NAME = "ledger.jsonl"
_WAIT_STEP_S = 0.002


class Ledger:
    """Appends to one ledger file on behalf of `by` ("agent", "rank0", a user's name).

    `wait_limit_s` bounds the wait for another writer: an append takes milliseconds, so half a minute means that one is stopped or its disk
    is. It is no setting, because no value between the two would change what happens. Bound to the process that made it: an inherited file
    lock excludes nobody, so a fork makes its own.
    """

    def __init__(self, path: Path, *, clock: Clock, by: str, wait_limit_s: float = 30.0) -> None:
        self.path = path
        self._clock = clock
        self._by = by
        self._wait_limit_s = wait_limit_s
        self._pid = os.getpid()
        self._held: int | None = None

    def position(self) -> tuple[int, str]:
        """(seq, hash) of the last durable entry, for the manifest of a checkpoint; (0, 64 zeros) when there is none."""
        with self._opened() as fd:
            entry = read_tail(fd, num_bytes=os.fstat(fd).st_size).entry
        return (entry.seq, entry.hash) if entry else (0, ZERO_HASH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else appends within: for who writes a line only if there is none such yet. Of one thread, and short: others wait."""
        with self._opened() as fd:
            self._held = fd
            try:
                yield
            finally:
                self._held = None

    def append(
        self,
        event: Event,
        *,
        generation: int,
        attempt: int,
        step: int,
        rule: str = "",
        reason: str = "",
        fields: Mapping[str, object] | None = None,
    ) -> LedgerEntry:
        """Write one line and make it durable; the entry as written.

        A torn tail found on the way is moved to `ledger.torn-<n>` and ledgered first. On an error the file is as it was before.
        Raises PeerLost (75) when `generation` is older than the newest in the ledger: this process belongs to the past and must end.
        Raises CheckpointError (5, as a save that cannot be made) when the line could not be written (disk full), SurefootError when another
        writer did not let go.
        """
        values = {"generation": generation, "attempt": attempt, "step": step, "event": Event(event).value, "by": self._by}
        values |= {"rule": rule, "reason": reason, "fields": strict_json.plain(fields or {})}
        with self._opened() as fd:
            num_bytes = os.fstat(fd).st_size
            tail = read_tail(fd, num_bytes=num_bytes)
            self._refuse_past(tail.entry, generation=generation)
            entries = self._moved_tail(tail, values) if tail.torn else []
            entries.append(self._next(entries[-1] if entries else tail.entry, values))
            self._write(fd, entries, tail=tail)
            if num_bytes == 0:
                fsync_dir(self.path.parent)
        return entries[-1]

    def _next(self, previous: LedgerEntry | None, values: Mapping[str, Any]) -> LedgerEntry:
        fields = values["fields"] if previous else {"ledger_format": LEDGER_FORMAT, **values["fields"]}
        seq, prev = (previous.seq + 1, previous.hash) if previous else (1, ZERO_HASH)
        return seal({"seq": seq, "time_utc": self._clock.utc(), **values, "fields": fields, "prev": prev})

    def _refuse_past(self, newest: LedgerEntry | None, *, generation: int) -> None:
        if newest is None:
            return
        if newest.seq == 1:
            refuse_newer_format(newest, where=str(self.path))
        if generation < newest.generation:
            raise PeerLost(
                f"fenced: generation {generation} writes to a ledger that is at generation {newest.generation}",
                where=str(self.path),
                hint="another process took the run over; this one must end",
                got=generation,
                limit=newest.generation,
            )

    def _moved_tail(self, tail: Tail, values: Mapping[str, Any]) -> list[LedgerEntry]:
        """Copy the torn bytes aside; the entry that says so overwrites them, so no crash can lose both the bytes and the record of them."""
        name = self._keep_aside(tail.torn)
        fields = {"file": name, "num_bytes": len(tail.torn), "offset": tail.end}
        moved = {"event": Event.LEDGER_TAIL_MOVED.value, "rule": "", "reason": "a write was cut off before it was acknowledged"}
        return [self._next(tail.entry, {**values, **moved, "fields": fields})]

    def _keep_aside(self, torn: bytes) -> str:
        number = 1
        while (aside := self.path.with_name(f"ledger.torn-{number}")).exists():
            number += 1
        try:
            with aside.open("xb") as file:
                file.write(torn)
                file.flush()
                os.fsync(file.fileno())
            fsync_dir(aside.parent)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise self._failed("could not keep the torn tail aside", error) from error
        return aside.name

    def _write(self, fd: int, entries: Sequence[LedgerEntry], *, tail: Tail) -> None:
        data = b"".join(encode_entry(entry) for entry in entries)
        try:
            _pwrite(fd, data, offset=tail.end)
            os.ftruncate(fd, tail.end + len(data))
            os.fsync(fd)
        except OSError as error:
            with suppress(OSError):  # The first error is the one to tell; a tail left torn is moved by the next append.
                os.ftruncate(fd, tail.end)
                _pwrite(fd, tail.torn, offset=tail.end)
                os.fsync(fd)
            raise self._failed("could not append", error) from error

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The ledger file, opened and locked by this process."""
        if os.getpid() != self._pid:
            raise SurefootError(
                f"this Ledger belongs to process {self._pid}, not to {os.getpid()}",
                where=str(self.path),
                hint="open a new Ledger after the fork",
            )
        if self._held is not None:
            yield self._held
            return
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failed("could not open the ledger", error) from error
        try:
            self._wait_for_lock(fd)
            yield fd
        except OSError as error:
            raise self._failed("could not read or write the ledger", error) from error
        finally:
            os.close(fd)

    def _wait_for_lock(self, fd: int) -> None:
        give_up_s = self._clock.monotonic_s() + self._wait_limit_s
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    raise self._failed("could not lock the ledger", error) from error
            if self._clock.monotonic_s() >= give_up_s:
                raise SurefootError(
                    f"another process has held the ledger for {self._wait_limit_s:g} s",
                    where=str(self.path),
                    hint=f"find it with: fuser {self.path}",
                    limit=self._wait_limit_s,
                )
            self._clock.sleep(_WAIT_STEP_S)

    def _failed(self, what: str, error: OSError) -> CheckpointError:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "check the disk and the permissions of the run folder"
        if is_full:
            hint = "nothing already written is lost; free some space, and the same command goes on"
        return CheckpointError(f"{what}: {error.strerror}", where=str(self.path), hint=hint, errno=error.errno)


def _pwrite(fd: int, data: bytes, *, offset: int) -> None:
    view = memoryview(data)
    while view:
        num_written = os.pwrite(fd, view, offset)
        view, offset = view[num_written:], offset + num_written


def read_ledger(path: Path, *, up_to_damage: bool = False) -> list[LedgerEntry]:
    """All entries, oldest first; a torn last line is left out, a missing file is an empty ledger. Any number may read while others append.

    A damaged line before the last one raises Corrupt; with `up_to_damage` the entries before it are returned instead.
    """
    entries: list[LedgerEntry] = []
    lines = _whole_lines(path)
    for number, line in enumerate(lines, start=1):
        raw = decode(line)
        if raw is None and (number == len(lines) or up_to_damage):
            break
        if raw is None:
            raise Corrupt(
                "not a ledger entry", where=f"{path} line {number}", hint="find what was changed with: surefoot ledger RUN --verify"
            )
        entries.append(entry_of(raw))
    if entries:
        refuse_newer_format(entries[0], where=str(path))
    return entries


def _whole_lines(path: Path) -> list[bytes]:
    """The lines that end in a newline; an unfinished rest is not one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """`first_bad` is the seq that was due where the ledger stops being what was written; after a cut tail, the first one missing."""

    ok: bool
    entries: int
    first_bad: int | None
    detail: str


def verify_ledger(path: Path, *, manifests: Sequence[tuple[int, str, str]] = ()) -> LedgerCheck:
    """Whether every line is the one that was written, none is missing, and none of `manifests` (ledger_seq, ledger_hash, id) knows better.

    An unfinished last line is no fault: nobody was told that it was written. Read the manifests first: a live run adds to both.
    """
    hashes: list[str] = [ZERO_HASH]
    problem: tuple[int, str] | None = None
    lines = _whole_lines(path)
    for line in lines:
        problem = _fault_of(line, hashes=hashes)
        if problem is not None:
            break
    known = _known_better(hashes, manifests)
    if known is not None and (problem is None or known[0] < problem[0]):
        problem = known
    if problem is None:
        return LedgerCheck(ok=True, entries=len(lines), first_bad=None, detail="")
    return LedgerCheck(ok=False, entries=len(lines), first_bad=problem[0], detail=problem[1])


def what_is_missing(entries: Sequence[LedgerEntry], manifests: Sequence[tuple[int, str, str]]) -> str:
    """What `manifests` know of the ledger that its `entries`, as they were read, do not hold; empty when they agree."""
    known = _known_better([ZERO_HASH, *(entry.hash for entry in entries)], manifests)
    return known[1] if known is not None else ""


def _known_better(hashes: Sequence[str], manifests: Sequence[tuple[int, str, str]]) -> tuple[int, str] | None:
    """The first seq at which the ledger is not what a checkpoint was written after, and how. `hashes` by seq."""
    for seq, expected, checkpoint in sorted(manifests):
        if seq >= len(hashes):
            end = len(hashes) - 1
            return end + 1, f"the tail is cut: checkpoint {checkpoint} was written at seq {seq}, the ledger ends at {end}"
        if hashes[seq] != expected:
            return seq, f"entry {seq} is not the one that checkpoint {checkpoint} was written after"
    return None


def _fault_of(line: bytes, *, hashes: list[str]) -> tuple[int, str] | None:
    """What is wrong with the line after those of `hashes`; its hash is added when nothing is."""
    due = len(hashes)
    raw = decode(line)
    if raw is None:
        return due, f"line {due} is not a ledger entry"
    if not _is_as_written(raw, line):
        return due, f"line {due} was edited: its hash does not fit its content"
    if raw["seq"] != due:
        return due, f"line {due} holds seq {raw['seq']}: lines were removed, added or moved"
    if raw["prev"] != hashes[-1]:
        # This line is whole, so it is the one before it that is not what this one was chained to.
        return max(1, due - 1), f"line {max(1, due - 1)} was replaced: entry {due} was written after another one"
    hashes.append(raw["hash"])
    return None


def _is_as_written(raw: dict[str, Any], line: bytes) -> bool:
    try:
        return encode(raw) == line and raw["hash"] == sha256_json({key: value for key, value in raw.items() if key != "hash"})
    except ValueError:
        return False


def manifest_positions(run_dir: Path) -> list[tuple[int, str, str]]:
    """(ledger_seq, ledger_hash, id) of every readable manifest of the run; what ails the others is for `checkpoint verify` to say."""
    positions = []
    for path in sorted(run_dir.glob("checkpoints/*/manifest.json")):
        if not path.is_file():
            continue  # a pipe would keep its reader waiting
        with suppress(OSError, ValueError, KeyError, TypeError):
            raw = strict_json.loads(path.read_bytes())
            positions.append((int(raw["ledger_seq"]), str(raw["ledger_hash"]), str(raw["id"])))
    return positions
