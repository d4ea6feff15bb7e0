"""Beats: what each rank is doing, in memory shared with the agent. Ranks write without a system call, the agent reads without asking.

One header and one 64-byte slot per rank in a memfd that the agent makes and its descendants inherit. It outlives a killed or stopped
rank, so its last words are always there to be read. Whether a process is *alive* is the kernel's word; a beat says only whether it *moves*.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from enum import IntEnum

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import SurefootError
from surefoot.core.records import Phase

BEATS_FORMAT = 3
_MAGIC = b"sfbeats\0"
_HEADER = struct.Struct("<8sIIqiiI28x")  # magic, version, num_ranks, generation, leave, first rank, number of the call for testimony
_LEAVE = struct.Struct("<i")
_LEAVE_OFFSET = 24
_CALL = struct.Struct("<I")
_CALL_OFFSET = 32
# count before, phase, pid, restored, warm, generation, step, collective_seq, monotonic ns, micro_step, group, count after
_SLOT = struct.Struct("<IiiHHqqqQi8sI")
_READ_TRIES = 100


class LeaveReason(IntEnum):
    """Why the ranks are asked to leave; 0 means they are not."""

    NONE = 0
    PREEMPTED = 1
    INTERRUPTED = 2
    OPERATOR = 3


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of one rank. `pid` is 0 before the first; `mono_s` is CLOCK_MONOTONIC of this machine.

    `collective_seq` counts the exchanges that its main thread has entered; `group` is the one that it is inside, empty when in none.
    `warm`: it has finished a step in this generation, so that what is compiled and connected on first use lies behind it.
    """

    rank: int
    pid: int
    generation: int
    phase: Phase
    step: int
    micro_step: int
    collective_seq: int
    mono_s: float
    restored: bool
    num_beats: int
    group: str = ""
    warm: bool = False


class BeatBoard:
    """The shared memory of one generation. Close it in every process that has it."""

    def __init__(self, fd: int, memory: mmap.mmap, *, clock: Clock) -> None:
        self.fd = fd
        self._memory = memory
        self._clock = clock
        magic, version, num_ranks, generation, _leave, first_rank, _call = _HEADER.unpack_from(memory)
        if magic != _MAGIC or version != BEATS_FORMAT or len(memory) != _size(num_ranks):
            raise SurefootError(
                "this memory holds no beats of this release",
                where=f"fd {fd}",
                hint="agent and workers must run the same surefoot",
                got=version,
                wanted=BEATS_FORMAT,
            )
        self.ranks = range(first_rank, first_rank + num_ranks)
        self.generation: int = generation

    @classmethod
    def create(cls, num_ranks: int, *, generation: int, first_rank: int = 0, clock: Clock | None = None) -> BeatBoard:
        """A new board, for the ranks of this machine. Its fd is closed on exec: pass it on by name (`pass_fds`)."""
        fd = _anonymous_file()
        os.ftruncate(fd, _size(num_ranks))
        memory = mmap.mmap(fd, _size(num_ranks))
        _HEADER.pack_into(memory, 0, _MAGIC, BEATS_FORMAT, num_ranks, generation, LeaveReason.NONE, first_rank, 0)
        return cls(fd, memory, clock=clock or SystemClock())

    @classmethod
    def attach(cls, fd: int, *, clock: Clock | None = None) -> BeatBoard:
        """The board behind an inherited fd. Raises SurefootError when there is none."""
        try:
            num_bytes = os.fstat(fd).st_size
            memory = mmap.mmap(fd, num_bytes)
        except (OSError, ValueError) as error:
            raise SurefootError(
                f"no beats behind this descriptor: {error}", where=f"fd {fd}", hint="was it passed on by the agent?"
            ) from error
        if num_bytes < _HEADER.size:
            raise SurefootError("too short to hold beats", where=f"fd {fd}", hint="was it passed on by the agent?", got=num_bytes)
        return cls(fd, memory, clock=clock or SystemClock())

    def slot(self, rank: int) -> BeatSlot:
        """The writer of one rank: for the process that is this rank, once."""
        return BeatSlot(self._memory, offset=self._offset(rank), generation=self.generation, clock=self._clock)

    def read(self, rank: int) -> Beat:
        """The last beat of `rank`, whole: a beat that is being written is read again."""
        offset = self._offset(rank)
        for _ in range(_READ_TRIES):
            values = _SLOT.unpack_from(self._memory, offset)
            if values[0] == values[-1]:
                break
        # Killed or stopped in the middle of a beat: each field by itself is still one that the rank wrote.
        before, phase, pid, restored, warm, generation, step, collective_seq, mono_ns, micro_step, group, _after = values
        return Beat(
            rank=rank,
            pid=pid,
            generation=generation,
            phase=Phase(phase),
            step=step,
            micro_step=micro_step,
            collective_seq=collective_seq,
            mono_s=mono_ns / 1e9,
            restored=bool(restored),
            num_beats=before,
            group=group.rstrip(b"\0").decode(),
            warm=bool(warm),
        )

    def read_all(self) -> list[Beat]:
        return [self.read(rank) for rank in self.ranks]

    def request_leave(self, reason: LeaveReason = LeaveReason.PREEMPTED) -> None:
        """Ask all ranks to save and leave. The first reason stays. May be called from a signal handler."""
        if not self.leave_requested:
            _LEAVE.pack_into(self._memory, _LEAVE_OFFSET, reason)

    @property
    def leave_requested(self) -> LeaveReason:
        """Truthy once a rank or the agent asked to leave."""
        return LeaveReason(_LEAVE.unpack_from(self._memory, _LEAVE_OFFSET)[0])

    def call_for_testimony(self) -> int:
        """Ask every rank to write down what it knows; the number of this call, which its answer repeats."""
        number = self.testimony_call + 1
        _CALL.pack_into(self._memory, _CALL_OFFSET, number)
        return number

    @property
    def testimony_call(self) -> int:
        """The number of the newest call; 0 before the first."""
        number: int = _CALL.unpack_from(self._memory, _CALL_OFFSET)[0]
        return number

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    def _offset(self, rank: int) -> int:
        if rank not in self.ranks:
            hint = f"the board was made for ranks {self.ranks.start} to {self.ranks.stop - 1}"
            raise SurefootError(f"rank {rank} has no slot", where=f"fd {self.fd}", hint=hint)
        return _HEADER.size + (rank - self.ranks.start) * _SLOT.size


class BeatSlot:
    """Writes the beats of one rank. Whatever a beat does not name stays as it was."""

    def __init__(self, memory: mmap.mmap, *, offset: int, generation: int, clock: Clock) -> None:
        self._memory = memory
        self._offset = offset
        self._generation = generation
        self._clock = clock
        self._pid = os.getpid()
        self._num_beats = 0
        self._phase, self._step, self._micro_step, self._collective_seq, self._restored = Phase.START, 0, 0, 0, False
        self._warm, self._group = False, b""

    def beat(
        self,
        *,
        phase: Phase | None = None,
        step: int | None = None,
        micro_step: int | None = None,
        collective_seq: int | None = None,
        restored: bool | None = None,
        warm: bool | None = None,
    ) -> None:
        """Local. Below a microsecond, no system call."""
        self._phase = self._phase if phase is None else phase
        self._step = self._step if step is None else step
        self._micro_step = self._micro_step if micro_step is None else micro_step
        self._collective_seq = self._collective_seq if collective_seq is None else collective_seq
        self._restored = self._restored if restored is None else restored
        self._warm = self._warm if warm is None else warm
        self._write()

    def enter(self, group: str) -> None:
        """Local. The main thread goes into an exchange of this group, named in at most 8 bytes; out of it when the name is empty."""
        self._group = group.encode()
        self._collective_seq += bool(group)
        self._write()

    @property
    def phase(self) -> Phase:
        """What it said last."""
        return self._phase

    def _write(self) -> None:
        self._num_beats = (self._num_beats + 1) & 0xFFFFFFFF
        # One copy of a finished slot: `pack_into` clears its target first, and a kill in between would leave an empty slot.
        self._memory[self._offset : self._offset + _SLOT.size] = _SLOT.pack(
            self._num_beats,
            self._phase,
            self._pid,
            self._restored,
            self._warm,
            self._generation,
            self._step,
            self._collective_seq,
            int(self._clock.monotonic_s() * 1e9),
            self._micro_step,
            self._group,
            self._num_beats,
        )


def _size(num_ranks: int) -> int:
    return _HEADER.size + num_ranks * _SLOT.size


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("surefoot-beats")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
