"""Staging: one save of one rank, from live tensors into a slot, while the loop already computes the next gradients.

What the forward may change (buffers), what is small, and what is no tensor is copied at once. Parameters and moments follow in a thread,
and until it ends nothing may update them. Nobody can be forced to keep to that, so the copy proves it: before the first byte is copied each
part is hashed, afterwards what lies in the slot must have the same hash. A few bytes of each part, taken at once, and all small
parts of the optimizer's state close the gap before the first hash. `tensor._version` would be cheaper, but fused optimizers and
`fully_shard` do not move it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.image import Placed
from surefoot.checkpoint.save_plan import PlannedSave
from surefoot.checkpoint.slot import Slot, SlotHeader
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import CheckpointError, SurefootError, Torn
from surefoot.tensors.digest import BoxDigest, as_hex, box_digest

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 18
"""Copied, digested and hashed at once, so that it is read from memory only once."""
SMALL_BYTES = 1 << 16
"""Parts up to this size are copied at once: a thread would gain nothing."""
_WITNESS_BYTES = 64
_INDEX_BYTES_PER_PART = 400

Bytes = npt.NDArray[np.uint8]


class DeviceCopies(Protocol):
    """How bytes get off a device: copies in their own order, behind what the loop had enqueued when the save began."""

    def pin(self, owner: str, memory: Bytes) -> None:
        """Make `memory`, the image in the slot `owner`, fit to be copied to beside the loop; once as long as it is the same."""

    def follow(self) -> None:
        """On the loop's thread: later copies see everything that was enqueued so far."""

    def using(self) -> Any:
        """A context: what is enqueued inside of it goes to the copies' own queue."""

    def finish(self) -> None:
        """Block until all that was enqueued there is done."""

    def close(self) -> None:
        """Give up what was pinned."""


class CudaCopies:
    """A side stream, an event that it waits for, and slots whose pages the driver has locked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # unannotated in torch
        self._pinned: dict[str, Bytes] = {}
        self._may_pin = True

    def pin(self, owner: str, memory: Bytes) -> None:
        known = self._pinned.get(owner)
        if known is not None and (known.ctypes.data, known.nbytes) == (memory.ctypes.data, memory.nbytes):
            return
        if known is not None:
            self._unpin(owner)
        if not self._may_pin:
            return
        if (code := int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))) != 0:  # type: ignore[no-untyped-call]
            self._may_pin = False
            logger.warning("%s cannot be page-locked (CUDA error %d): copies from the device go through the driver's buffer", owner, code)
            return
        self._pinned[owner] = memory  # keeps the mapping as long as the driver knows it

    def close(self) -> None:
        for owner in list(self._pinned):
            self._unpin(owner)

    def _unpin(self, owner: str) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._pinned.pop(owner).ctypes.data)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())

    @contextmanager
    def using(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def finish(self) -> None:
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class Work:
    """What one save of this rank is made of. `rest` is what the index holds beside the parts.

    `at_once` are the keys that the forward may change. `updates` counts the optimizer's updates.
    """

    header: SlotHeader
    planned: PlannedSave
    tensors: Mapping[str, torch.Tensor]
    at_once: frozenset[str]
    rest: Mapping[str, Any]
    updates: Callable[[], int]


@dataclass(slots=True)
class _Moving:
    """A part that is copied later, and what was seen of it when the save began."""

    placed: Placed
    live: torch.Tensor
    source: Bytes | None
    witness: bytes = b""
    before: str = ""


@dataclass(slots=True)
class _Still:
    """A part that lies in the slot already. `live` is kept where it must not change until the end."""

    placed: Placed
    live: torch.Tensor | None = None


@dataclass(slots=True)
class _Stages:
    moving: list[_Moving] = field(default_factory=list)
    still: list[_Still] = field(default_factory=list)


class Snapshot:
    """One save being staged. `begin` on the loop's thread, then `run` in a thread of its own (`start`) or right here.

    Ends with the slot STAGED, or FAILED and `error` set.
    """

    def __init__(self, slot: Slot, work: Work, *, copies: DeviceCopies | None = None, on_end: Callable[[], None] = lambda: None) -> None:
        self.slot = slot
        self.id = work.header.id
        self.error: SurefootError | None = None
        self._work = work
        self._copies = copies
        self._on_end = on_end
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._read = threading.Event()
        self._stages = _Stages()
        self._updates = work.updates()
        texts = sum(len(value) for value in work.rest.values() if isinstance(value, str))
        room = _INDEX_BYTES_PER_PART * len(work.planned.image.placed) + texts
        self._image: Bytes = np.frombuffer(slot.claim(work.header, extra_bytes=room), dtype=np.uint8)

    @property
    def reads_live(self) -> bool:
        """Whether live tensors are still being read, so that no update may be made."""
        return not self._read.is_set()

    def begin(self) -> None:
        """Local, on the loop's thread. Copy what must not wait, and look at the rest."""
        try:
            self._begin()
        except BaseException as error:
            self._end(error)
            raise

    def start(self) -> None:
        """Go on in a thread."""
        self._thread = threading.Thread(target=self.run, name=f"surefoot-staging-{self.id}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Copy the rest, prove that nothing moved, and hand the slot to the uploader."""
        try:
            self.slot.staged({**self._work.rest, "parts": self._copy()})
        except Exception as error:  # the boundary of the thread: whatever it was is told at the next step
            self._end(error)
        finally:
            self._let_go()
            self._on_end()

    def wait(self, *, limit_s: float) -> None:
        """Until no live tensor is read any more, well or not. After `limit_s` staging is told to stop, and is then a failed one.

        Raises SurefootError when it does not even stop: to go on would change what it reads.
        """
        if self._thread is None or self._read.wait(limit_s):
            return
        self._stop.set()
        if not self._read.wait(max(1.0, limit_s / 10)):
            raise SurefootError(f"the staging of {self.id} hangs", where=str(self.slot), hint="a copy from the device does not return")

    def join(self, *, limit_s: float) -> None:
        """Until staging has ended altogether; bounded as `wait`."""
        self.wait(limit_s=limit_s)
        if self._thread is not None:
            self._thread.join(limit_s)

    def _begin(self) -> None:
        if self._copies is not None:
            self._copies.pin(str(self.slot), self._image)
            self._copies.follow()
        for offset, piece in self._work.planned.image.frame:
            self._image[offset : offset + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        for placed in self._work.planned.image.placed:
            live = local_tensor(self._work.tensors[placed.part.key])
            source = bytes_of(live)
            if self._waits(placed, live, source):
                self._stages.moving.append(_Moving(placed, live, source, witness=b"" if source is None else _witness(source)))
                continue
            self._tensor_in_slot(placed).copy_(live) if source is None else _copy_all(source, self._values(placed))
            is_counter = placed.part.key.startswith("optim.") and placed.part.key not in self._work.at_once
            self._stages.still.append(_Still(placed, live if is_counter else None))
        if not self._stages.moving:
            self._let_go()

    def _waits(self, placed: Placed, live: torch.Tensor, source: Bytes | None) -> bool:
        if placed.part.key in self._work.at_once or placed.part.num_bytes <= SMALL_BYTES:
            return False
        return source is not None or (self._copies is not None and live.is_contiguous())

    def _copy(self) -> list[dict[str, Any]]:
        """The parts as the index tells of them, in the order of the file."""
        for moving in self._stages.moving:
            if moving.source is not None:
                self._check_stop()
                moving.before = xxhash.xxh3_128_hexdigest(moving.source.data)
        told = [self._copy_moving(moving) for moving in self._stages.moving]
        if self._stages.moving:
            self._refuse_torn()
        self._let_go()
        told += [self._hash_still(still) for still in self._stages.still]
        return sorted(told, key=lambda part: int(part["offset"]))

    def _copy_moving(self, moving: _Moving) -> dict[str, Any]:
        placed, target = moving.placed, self._values(moving.placed)
        if moving.source is None:
            return self._copy_from_device(moving)
        digest, checksum = self._digest(placed), xxhash.xxh3_128()
        for start in range(0, len(target), PIECE_BYTES):
            self._check_stop()
            piece = target[start : start + PIECE_BYTES]
            piece[:] = moving.source[start : start + PIECE_BYTES]
            digest.update(piece)
            checksum.update(piece.data)
        found = checksum.hexdigest()
        if found != moving.before or _witness(target) != moving.witness:
            raise self._torn(placed.part.key)
        return _told(placed, digest=as_hex(digest.value), checksum=found)

    def _copy_from_device(self, moving: _Moving) -> dict[str, Any]:
        """The digest is taken where the tensor is, before and after: a copy that went wrong on the way is found by whoever loads it."""
        assert self._copies is not None
        self._check_stop()
        placed = moving.placed
        with self._copies.using():
            digest = box_digest(moving.live, global_shape=placed.part.global_shape, offsets=placed.part.offsets)
            self._tensor_in_slot(placed).copy_(moving.live, non_blocking=True)
            after = box_digest(moving.live, global_shape=placed.part.global_shape, offsets=placed.part.offsets)
        self._copies.finish()
        if after != digest:
            raise self._torn(placed.part.key)
        return _told(placed, digest=as_hex(digest), checksum=xxhash.xxh3_128_hexdigest(self._values(placed).data))

    def _hash_still(self, still: _Still) -> dict[str, Any]:
        self._check_stop()
        values = self._values(still.placed)
        digest = self._digest(still.placed)
        digest.update(values)
        return _told(still.placed, digest=as_hex(digest.value), checksum=xxhash.xxh3_128_hexdigest(values.data))

    def _refuse_torn(self) -> None:
        if self._work.updates() != self._updates:
            raise self._torn("the count of updates")
        for still in self._stages.still:
            if still.live is not None and not np.array_equal(self._bytes_now(still.live), self._values(still.placed)):
                raise self._torn(still.placed.part.key)

    def _bytes_now(self, live: torch.Tensor) -> Bytes:
        if (found := bytes_of(live)) is not None:
            return found
        host = torch.empty(live.shape, dtype=live.dtype)
        with self._copies.using() if self._copies is not None else nullcontext():
            host.copy_(live)
        return host.view(-1).view(torch.uint8).numpy()

    def _torn(self, what: str) -> Torn:
        return Torn(
            f"{what} changed while it was copied: the snapshot is torn",
            where=self.id,
            hint="the optimizer stepped between finish and judge; without overlap (checkpoint.overlap) that cannot happen",
            tensor=what,
        )

    def _let_go(self) -> None:
        """From here on live tensors may change: nothing here refers to them any more."""
        self._work = replace(self._work, tensors={})
        self._stages.moving.clear()
        for still in self._stages.still:
            still.live = None
        self._read.set()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise CheckpointError("staging took longer than it may", where=self.id)

    def _end(self, error: BaseException) -> None:
        self.error = error if isinstance(error, SurefootError) else CheckpointError(f"{type(error).__name__}: {error}", where=self.id)
        self.slot.abandon(self.error)

    def _values(self, placed: Placed) -> Bytes:
        return self._image[placed.values_offset : placed.values_offset + placed.part.num_bytes]

    def _tensor_in_slot(self, placed: Placed) -> torch.Tensor:
        return torch.from_numpy(self._values(placed)).view(placed.part.dtype).view(placed.part.sizes)

    def _digest(self, placed: Placed) -> BoxDigest:
        part = placed.part
        return BoxDigest(part.sizes, dtype=part.dtype, global_shape=part.global_shape, offsets=part.offsets)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Local. What this rank holds of `tensor`, without a gradient; the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def bytes_of(tensor: torch.Tensor) -> Bytes | None:
    """Local. The memory of a CPU tensor in row-major order; None when it has to be copied to get there."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.view(-1).view(torch.uint8).numpy()


def _copy_all(source: Bytes, target: Bytes) -> None:
    target[:] = source


def _witness(values: Bytes) -> bytes:
    """A few bytes from the beginning, the middle and the end."""
    middle = len(values) // 2
    return b"".join(values[start : start + _WITNESS_BYTES].tobytes() for start in (0, middle, max(0, len(values) - _WITNESS_BYTES)))


def _told(placed: Placed, *, digest: str, checksum: str) -> dict[str, Any]:
    part = placed.part
    return {
        "key": part.key,
        "dtype": dtype_name(part.dtype),
        "shape": part.global_shape,
        "offsets": part.offsets,
        "sizes": part.sizes,
        "offset": placed.values_offset,
        "bytes": part.num_bytes,
        "digest": digest,
        "xxh3": checksum,
    }
