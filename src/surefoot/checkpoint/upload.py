"""From slots to a published checkpoint: written outside of the loop, committed by one rename, read back. No torch.

Whoever holds the slots runs an `Uploader`: a process of the agent, or a thread of each rank. The one with rank 0's slot leads: it makes the
folder, waits for all parts, and publishes. Uploaders of different hosts know of each other by the folder alone.
"""

from __future__ import annotations

import logging
import math
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from surefoot.checkpoint.manifest import MANIFEST_NAME, read_manifest
from surefoot.checkpoint.readback import verify_files
from surefoot.checkpoint.scratch import begin_folder, part_name, publish, scratch_folder, storage_error, withdraw, write_image, write_record
from surefoot.checkpoint.slot import Slot, SlotHeader, SlotState
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete, SurefootError
from surefoot.core.records import Manifest, ManifestFile, Problem

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
    """One image on its way: the slot is this job's until it is committed or failed. `was_uploading`: another uploader had begun it."""

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
    """Takes up what is staged in `slots`, and ends with each slot COMMITTED or FAILED. One process may call it, from one thread at a time.

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
        return self._work(until_s=math.inf) or self._read_back_next()

    def drain(self, *, limit_s: float, ranks_are_gone: bool = False, read_back: bool = True) -> list[str]:
        """Work until nothing is left to do, for at most `limit_s` and the current write; what did not get committed, in words.

        With `ranks_are_gone` slots that are STAGING belong to nobody and are freed, and a save whose other parts nobody can stage any more
        is given up at once where all slots are here, else when the time is up. Without `read_back` that is left to later steps.
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
        while self._jobs or (read_back and self._unread):
            if ranks_are_gone:
                self._give_up_hopeless()
            worked = self._work(until_s=deadline_s) or (read_back and self._read_back_next())
            if self._clock.monotonic_s() >= deadline_s:
                break
            if not worked:
                self._clock.sleep(0.01)
        for job in list(self._jobs):
            if job in self._jobs:
                self._fail(job, CheckpointError("it was not committed before the time was up", where=job.header.id, limit_s=limit_s))
        for slot in self._slots:
            header = slot.header()
            if header is not None and header.id in ids and slot.state() is SlotState.FAILED and header.error:
                failures.append(f"{header.id}, {slot}: {header.error}")
        return failures

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

    def _work(self, *, until_s: float) -> bool:
        done = False
        for job in list(self._jobs):
            if job in self._jobs and self._clock.monotonic_s() < until_s:
                done = self._advance(job) or done
        return done

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
        if job.was_uploading and self._is_published(job):
            manifest = read_manifest(self._root / job.header.id)
            job.is_begun, job.file = True, _file_of(manifest, job.header)
            if job.leads:
                self._committed(job, manifest)
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
        checksum = write_image(job.scratch / header.file, job.slot.image(), again=job.was_uploading)
        file = ManifestFile(header.file, header.image_bytes, checksum, header.rank, self._host)
        write_record(job.scratch, file, header=header, parts=index["parts"])
        return file

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
        is_there = job.scratch.is_dir()  # first: it may be renamed between the two looks
        if self._is_published(job):
            job.slot.committed(image_xxh3_128=job.file.xxh3_128, host=self._host)
            self._jobs.remove(job)
            return True
        if not is_there:
            raise CheckpointError("given up by rank 0's side", where=job.header.id)
        self._check_limit(job, "rank 0's side did not commit it")
        return False

    def _is_published(self, job: _Job) -> bool:
        return (self._root / job.header.id / MANIFEST_NAME).is_file()

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
                withdraw(other.scratch, other.header, may_be_taken=other.was_uploading or other.file is not None)
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
            if job in self._jobs and missing and not self._is_published(job):
                self._fail(job, Incomplete(f"ranks {missing} died before their parts were staged", where=job.header.id))

    def _read_back_next(self) -> bool:
        if not self._unread:
            return False
        manifest, slot, serial = self._unread.pop(0)
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
        return True

    def _tell(self, listener: Callable[[T], None], outcome: T) -> None:
        try:
            listener(outcome)
        except (SurefootError, OSError) as error:
            logger.warning("an outcome of a save could not be told: %s", error)


def _file_of(manifest: Manifest, header: SlotHeader) -> ManifestFile:
    for file in manifest.files:
        if file.name == header.file:
            return file
    raise Corrupt(f"the published manifest has no {header.file}", where=header.id)


def _of_another(error: SurefootError, rank: int) -> SurefootError:
    return type(error)(f"{error.what} (rank {rank})", where=error.where, hint=error.hint, **error.values)
