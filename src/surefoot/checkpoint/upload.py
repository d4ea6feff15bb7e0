"""From slots to a published checkpoint: written outside of the loop, committed by one rename, read back. No torch.

checkpoints/.<id>.g<generation>.writing/   being written; never read, swept by a later generation
    __<rank>_0.distcp                      the image of a rank, durable
    __<rank>_0.part.json                   written after it: who wrote what, with checksum and digests; gone before the commit
checkpoints/<id>/                          published: whole, durable, never written to again

Whoever holds the slots runs an `Uploader`: a process of the agent, or a thread of each rank. The one with rank 0's slot leads: it makes the
folder, waits for all parts, and publishes. Uploaders of different hosts know of each other by the folder alone.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from surefoot.checkpoint.manifest import (
    DIGESTED_PREFIXES,
    EXTRAS_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    METADATA_NAME,
    checksum_bytes,
    manifest_bytes,
    manifest_from_json,
    parse_id,
    read_manifest,
    sealed,
)
from surefoot.checkpoint.readback import verify_files
from surefoot.checkpoint.slot import PAGE_BYTES, Slot, SlotHeader, SlotState
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete, SurefootError
from surefoot.core.records import Manifest, ManifestFile, ManifestTensor, Problem
from surefoot.core.strict_json import canonical, loads
from surefoot.core.units import show_bytes
from surefoot.tensors.digest_sum import as_hex, combine, state_digest

logger = logging.getLogger(__name__)
T = TypeVar("T")

WRITE_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that is published. `wall_s` from the first look at it to the rename; `reason` is why it was saved."""

    manifest: Manifest
    reason: str
    host: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What storage gave back of a published checkpoint: all is well when there are no problems."""

    manifest: Manifest
    problems: tuple[Problem, ...]
    host: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """A save that ended without a commit, as its leader knows it."""

    header: SlotHeader
    error: SurefootError


class _Job:
    """One image on its way. `serial` is that of the claim: the slot stays this job's until it is committed or failed."""

    def __init__(self, slot: Slot, header: SlotHeader, *, root: Path, began_s: float, was_uploading: bool) -> None:
        self.slot = slot
        self.header = header
        self.began_s = began_s
        self.was_uploading = was_uploading
        self.scratch = scratch_folder(root, header.id, generation=header.generation)
        self.is_begun = False
        self.file: ManifestFile | None = None

    @property
    def leads(self) -> bool:
        return self.header.rank == 0

    @property
    def order(self) -> tuple[int, int, int, str, int]:
        header = self.header
        return header.generation, header.attempt, header.step, header.id, header.rank


class Uploader:
    """Takes up what is staged in `slots`, and ends with each slot COMMITTED or FAILED. One thread of one process may call it.

    A loop around it: call `step()`; when it says that there was nothing to do, wait for a sign from the ranks or a few hundredths of a
    second, and call it again. `step` blocks on storage only. After the ranks of a generation are gone, `drain(..., ranks_are_gone=True)`
    finishes what they staged whole and frees the rest. A fresh Uploader on the slots of one that was killed goes on where that one was.

    `on_committed`, `on_read_back` and `on_failed` are called by the leader alone, before the rank sees the outcome in its slot. They are
    the place for the ledger and for retention; a SurefootError or OSError out of them is logged.
    """

    def __init__(
        self,
        root: Path,
        slots: Sequence[Slot],
        *,
        limit_s: float,
        on_committed: Callable[[Committed], None] | None = None,
        on_read_back: Callable[[ReadBack], None] | None = None,
        on_failed: Callable[[NotCommitted], None] | None = None,
        clock: Clock | None = None,
        host: str | None = None,
    ) -> None:
        self._root = root
        self._slots = tuple(slots)
        self._limit_s = limit_s
        self._on_committed = on_committed
        self._on_read_back = on_read_back
        self._on_failed = on_failed
        self._clock = clock or SystemClock()
        self._host = host or socket.gethostname()
        self._jobs: list[_Job] = []
        self._unread: list[tuple[Manifest, Slot, int]] = []
        self._newest: Manifest | None = None

    @property
    def busy(self) -> bool:
        """Whether an image is on its way or a commit waits to be read back."""
        return bool(self._jobs or self._unread)

    def step(self) -> bool:
        """Do what can be done now; whether anything was done."""
        self._take_up()
        done = False
        for job in list(self._jobs):
            if job in self._jobs:
                done = self._advance(job) or done
        if not done and self._unread:
            self._read_back(*self._unread.pop(0))
            return True
        return done

    def drain(self, *, limit_s: float, ranks_are_gone: bool = False) -> list[str]:
        """Work until nothing is left to do, for at most `limit_s` and the current write; what did not get committed, in words.

        With `ranks_are_gone` slots that are STAGING belong to nobody and are freed, and a save whose other parts nobody can stage any more
        is given up at once where all slots are here, else when the time is up.
        """
        deadline_s = self._clock.monotonic_s() + limit_s
        failures: list[str] = []
        self._take_up()
        ids = {job.header.id: job.header for job in self._jobs}
        if ranks_are_gone:
            for slot in self._slots:
                if slot.state() is SlotState.STAGING:
                    header = slot.header()
                    failures.append(f"{slot} was still being filled{f' for {header.id}' if header else ''}")
                    slot.reset()
        while self.busy:
            if ranks_are_gone:
                self._give_up_hopeless()
            if not self.step() and self.busy:
                if self._clock.monotonic_s() >= deadline_s:
                    for job in list(self._jobs):
                        self._fail(
                            job, CheckpointError("it was not committed before the time was up", where=job.header.id, limit_s=limit_s)
                        )
                    break
                self._clock.sleep(0.01)
        for slot in self._slots:
            header = slot.header()
            if header is not None and header.id in ids and slot.state() is SlotState.FAILED and header.error:
                failures.append(f"{header.id}, {slot}: {header.error}")
        return failures

    def skip_read_back(self) -> None:
        """Forget the commits that nobody read back yet: for a process that is in a hurry to end. Restores verify everything anyway."""
        self._unread.clear()

    # --- one image ---

    def _take_up(self) -> None:
        known = {id(job.slot) for job in self._jobs}
        for slot in self._slots:
            state = slot.state()
            if id(slot) in known or state not in (SlotState.STAGED, SlotState.UPLOADING):
                continue
            header = slot.header()
            if header is None:
                slot.failed(Corrupt("its header is not what the rank wrote", where=str(slot)))
                continue
            if state is SlotState.STAGED:
                slot.begin_upload()
            now_s = self._clock.monotonic_s()
            self._jobs.append(_Job(slot, header, root=self._root, began_s=now_s, was_uploading=state is SlotState.UPLOADING))
        self._jobs.sort(key=lambda job: job.order)

    def _advance(self, job: _Job) -> bool:
        """The next thing for this image: begin, write, publish or notice the publication. False when others have to do something first."""
        try:
            if job.slot.cancelled:
                raise CheckpointError("given up: another rank's part of this save failed", where=job.header.id)
            if not job.is_begun:
                return self._begin(job)
            if job.file is None:
                job.file = self._write(job)
                return True
            if job.leads:
                return self._publish_when_whole(job)
            return self._notice_the_end(job)
        except OSError as error:
            self._fail(job, storage_error(error, folder=self._root, needed_bytes=job.header.image_bytes))
        except SurefootError as error:
            self._fail(job, error)
        return True

    def _begin(self, job: _Job) -> bool:
        if job.was_uploading and (self._root / job.header.id / MANIFEST_NAME).is_file():
            job.is_begun, job.file = True, _file_of(read_manifest(self._root / job.header.id), job.header)
            if job.leads:
                self._committed(job, read_manifest(self._root / job.header.id))
            return True
        if job.leads:
            begin_folder(self._root, job.scratch, checkpoint=job.header.id, index=job.slot.index(), again=job.was_uploading)
        elif not job.scratch.is_dir():
            self._check_limit(job, "the folder that rank 0's side makes is not here: checkpoints need a shared file system")
            return False
        job.is_begun = True
        return True

    def _write(self, job: _Job) -> ManifestFile:
        header, index = job.header, job.slot.index()
        path = job.scratch / header.file
        if job.was_uploading:
            path.unlink(missing_ok=True)
        checksum = write_image(path, job.slot.image())
        record = {
            "id": header.id,
            "rank": header.rank,
            "world_size": header.world_size,
            "host": self._host,
            "file": header.file,
            "num_bytes": header.image_bytes,
            "xxh3_128": checksum,
            "digests": [[part["key"], part["digest"]] for part in index["parts"]],
        }
        write_atomic(job.scratch / part_name(header.rank), canonical(record), durable=False)
        return ManifestFile(header.file, header.image_bytes, checksum, header.rank, self._host)

    def _publish_when_whole(self, job: _Job) -> bool:
        missing = [rank for rank in range(job.header.world_size) if not (job.scratch / part_name(rank)).is_file()]
        if missing:
            self._check_limit(job, f"the parts of ranks {missing} are not there")
            return False
        index = job.slot.index()
        manifest = publish(self._root, job.scratch, index=index, header=job.header, newest=self._newest)
        self._committed(job, manifest, reason=str(index.get("reason", "")))
        return True

    def _committed(self, job: _Job, manifest: Manifest, *, reason: str = "published, but its writer died before it could say so") -> None:
        self._newest = manifest
        if self._on_committed is not None:
            wall_s = self._clock.monotonic_s() - job.began_s
            self._tell(self._on_committed, Committed(manifest, reason, self._host, wall_s))
        assert job.file is not None
        job.slot.committed(image_xxh3_128=job.file.xxh3_128, host=self._host)
        self._jobs.remove(job)
        if self._on_read_back is not None:
            self._unread.append((manifest, job.slot, job.header.serial))
        for other in [other for other in self._jobs if other.header.id == manifest.id and other.file is not None]:
            self._notice_the_end(other)  # of this process: they need not ask the folder a while later

    def _notice_the_end(self, job: _Job) -> bool:
        assert job.file is not None
        if (self._root / job.header.id / MANIFEST_NAME).is_file():
            job.slot.committed(image_xxh3_128=job.file.xxh3_128, host=self._host)
            self._jobs.remove(job)
            return True
        if not job.scratch.is_dir():
            if (self._root / job.header.id / MANIFEST_NAME).is_file():
                return self._notice_the_end(job)  # renamed between the two looks
            raise CheckpointError("given up by rank 0's side", where=job.header.id)
        self._check_limit(job, "rank 0's side did not commit it")
        return False

    def _check_limit(self, job: _Job, what: str) -> None:
        if self._clock.monotonic_s() - job.began_s > self._limit_s:
            raise CheckpointError(
                f"{what} after {self._limit_s:g} s", where=job.header.id, hint="raise checkpoint.upload_limit_s if storage is that slow"
            )

    def _fail(self, job: _Job, error: SurefootError) -> None:
        """This image, and what else of the save is here. Nothing of it stays where a reader could find it."""
        here = [other for other in self._jobs if other.header.id == job.header.id]
        for other in here:
            if other.leads:
                shutil.rmtree(other.scratch, ignore_errors=True)
            else:
                for name in (other.header.file, part_name(other.header.rank)):
                    _unlink(other.scratch / name)
        for other in here:
            if other.leads and self._on_failed is not None:
                self._tell(self._on_failed, NotCommitted(other.header, error))
            other.slot.failed(error if other is job else _of_another(error, job.header.rank))
            self._jobs.remove(other)

    def _give_up_hopeless(self) -> None:
        here = {slot.rank for slot in self._slots}
        for job in list(self._jobs):
            missing = sorted(
                rank
                for rank in here - {other.header.rank for other in self._jobs if other.header.id == job.header.id}
                if rank < job.header.world_size and not (job.scratch / part_name(rank)).is_file()
            )
            published = (self._root / job.header.id / MANIFEST_NAME).is_file()
            if job in self._jobs and missing and not published:
                self._fail(job, Incomplete(f"ranks {missing} died before their parts were staged", where=job.header.id))

    def _read_back(self, manifest: Manifest, slot: Slot, serial: int) -> None:
        began_s = self._clock.monotonic_s()
        try:
            problems = tuple(verify_files(self._root / manifest.id, expected_hash=manifest.hash))
        except OSError as error:
            problems = (Problem(kind="unreadable", detail=str(error)),)
        if problems:
            logger.warning("checkpoint %s is not what was written: %s %s", manifest.id, problems[0].kind, problems[0].file)
        if self._on_read_back is not None:
            found = ReadBack(manifest, problems, self._host, self._clock.monotonic_s() - began_s)
            self._tell(self._on_read_back, found)
        slot.read_back(serial=serial, well=not problems)

    def _tell(self, listener: Callable[[T], None], outcome: T) -> None:
        try:
            listener(outcome)
        except (SurefootError, OSError) as error:
            logger.warning("an outcome of a save could not be told: %s", error)


# --- storage ---


def scratch_folder(root: Path, checkpoint: str, *, generation: int) -> Path:
    return root / f".{checkpoint}.g{generation}.writing"


def part_name(rank: int) -> str:
    return f"__{rank}_0.part.json"


def begin_folder(root: Path, scratch: Path, *, checkpoint: str, index: Mapping[str, Any], again: bool = False) -> None:
    """Refuse before a byte is written: a malformed or existing id, too little room."""
    if parse_id(checkpoint) is None:
        raise CheckpointError("a checkpoint id is s<step>-a<attempt>[-r<retry>]", where=checkpoint)
    if (root / checkpoint).exists():
        raise CheckpointError(
            "this checkpoint exists already", where=str(root / checkpoint), hint="published checkpoints are never rewritten"
        )
    needed = int(index["job_bytes"])
    free = free_bytes(root)
    if free < needed:
        raise CheckpointError(
            f"too little room for a checkpoint: it needs {show_bytes(needed)}, {show_bytes(free)} are free",
            where=str(root),
            hint="free disk space or lower checkpoint.keep_last; older checkpoints are untouched",
            needed_bytes=needed,
            free_bytes=free,
        )
    root.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(exist_ok=again)


def write_image(path: Path, image: memoryview, *, direct: bool = True) -> str:
    """Write and make durable; the checksum of what was written. Past the page cache where the file system takes that."""
    fd, direct = _create(path, direct=direct)
    try:
        digest = xxhash.xxh3_128()
        for start in range(0, len(image), WRITE_BYTES):
            piece = image[start : start + WRITE_BYTES]
            digest.update(piece)
            done = 0
            while done < len(piece):
                try:
                    done += os.pwrite(fd, piece[done:], start + done)
                except OSError as error:
                    if not direct or error.errno != errno.EINVAL:
                        raise
                    refused = True
                else:
                    refused = direct and done % PAGE_BYTES != 0
                if refused:  # the file system takes the flag but not this write, or ended a write within a page
                    os.close(fd)
                    fd, direct = os.open(path, os.O_WRONLY), False
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)
    return str(digest.hexdigest())


def publish(root: Path, scratch: Path, *, index: Mapping[str, Any], header: SlotHeader, newest: Manifest | None = None) -> Manifest:
    """The commit: everything that is written once per job, the manifest last, one rename. The sealed manifest.

    `newest` is what this uploader committed last: the parent, when the rank could not know of it yet.
    """
    records = [_read_record(scratch, rank, header=header) for rank in range(header.world_size)]
    _check_whole(records, stored=index["stored"], where=header.id)
    metadata, extras = base64.b64decode(index["metadata"]), str(index["extras"]).encode()
    files = [ManifestFile(r["file"], r["num_bytes"], r["xxh3_128"], r["rank"], r["host"]) for r in records]
    files += [ManifestFile(name, len(raw), checksum_bytes(raw)) for name, raw in ((METADATA_NAME, metadata), (EXTRAS_NAME, extras))]
    tensors = _tensors(index["tensors"], records)
    draft = manifest_from_json(index["draft"])
    if newest is not None and (newest.run, newest.attempt) == (draft.run, draft.attempt):
        draft = replace(draft, parent=newest.id)
    manifest = sealed(
        replace(
            draft,
            format_version=FORMAT_VERSION,
            files=tuple(sorted(files, key=lambda file: file.name)),
            tensors=tensors,
            state_digest=state_digest(tensor for tensor in tensors if tensor.key.startswith(DIGESTED_PREFIXES)),
        )
    )
    for rank in range(header.world_size):
        (scratch / part_name(rank)).unlink()
    write_atomic(scratch / METADATA_NAME, metadata)
    write_atomic(scratch / EXTRAS_NAME, extras)
    write_atomic(scratch / MANIFEST_NAME, manifest_bytes(manifest))  # last: what it names is durable before the rename
    os.rename(scratch, root / header.id)
    fsync_dir(root)
    return manifest


def storage_error(error: BaseException, *, folder: Path, needed_bytes: int) -> CheckpointError:
    """The error of a save that the system refused, with the bytes that it needs and those that are left."""
    if isinstance(error, CheckpointError):
        return error
    free = free_bytes(folder)
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in _FULL
    return CheckpointError(
        f"the save failed: {text}; it needs {show_bytes(needed_bytes)}, {show_bytes(free)} are free",
        where=str(getattr(error, "filename", None) or folder),
        hint="free disk space or raise the quota; older checkpoints are untouched" if full else "older checkpoints are untouched",
        errno=error.errno if isinstance(error, OSError) else None,
        needed_bytes=needed_bytes,
        free_bytes=free,
    )


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _create(path: Path, *, direct: bool) -> tuple[int, bool]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems make the file before they refuse the flag
    return os.open(path, flags, 0o666), False


def _read_record(scratch: Path, rank: int, *, header: SlotHeader) -> dict[str, Any]:
    path = scratch / part_name(rank)
    try:
        record: dict[str, Any] = loads(path.read_bytes())
    except ValueError as error:
        raise Corrupt(f"not valid JSON: {error}", where=str(path)) from error
    found, wanted = (record["id"], record["rank"], record["world_size"]), (header.id, rank, header.world_size)
    if found != wanted:
        raise Corrupt(f"it speaks of {found}, not of {wanted}", where=str(path))
    return record


def _check_whole(records: Sequence[Mapping[str, Any]], *, stored: Sequence[Sequence[str]], where: str) -> None:
    """Every part of the plan was written by the rank that the plan gave it to."""
    for rank, (record, keys) in enumerate(zip(records, stored, strict=True)):
        found = [key for key, _ in record["digests"]]
        if found != list(keys):
            lost = sorted(set(keys) - set(found)) or sorted(found)
            raise Incomplete(
                f"rank {rank} did not write what was planned: {len(found)} of {len(keys)} parts", where=where, tensors=lost[:5]
            )


def _tensors(tensors: Iterable[Sequence[Any]], records: Iterable[Mapping[str, Any]]) -> tuple[ManifestTensor, ...]:
    digests: dict[str, list[int]] = {}
    for record in records:
        for key, digest in record["digests"]:
            digests.setdefault(key, []).append(int(digest, 16))
    return tuple(ManifestTensor(key, dtype, tuple(shape), as_hex(combine(digests[key]))) for key, dtype, shape in tensors)


def _file_of(manifest: Manifest, header: SlotHeader) -> ManifestFile:
    for file in manifest.files:
        if file.name == header.file:
            return file
    raise Corrupt(f"the published manifest has no {header.file}", where=header.id)


def _of_another(error: SurefootError, rank: int) -> SurefootError:
    return type(error)(f"{error.what} (rank {rank})", where=error.where, hint=error.hint, **error.values)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
