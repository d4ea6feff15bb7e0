"""The image of a rank: every byte of its `__<rank>_0.distcp` file but the values of the tensors, known before one of them is copied.

The file is what stock DCP writes: one torch.save archive per part, one after the other. Here each archive starts at a multiple of 64, so
that values are aligned in memory, and the file is padded to whole pages, so that it can be written past the page cache. Archives carry no
CRC, by torch's own option: the manifest's checksum covers the file, and a CRC costs more than all the rest of a save.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import numpy as np
import torch

from surefoot.checkpoint.slot import PAGE_BYTES
from surefoot.checkpoint.state import dtype_name

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True)
class Part:
    """One box of one tensor, as one rank stores it."""

    key: str
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def says(self) -> str:
        """What must be the same on all ranks that hold a part of this tensor."""
        return f"{dtype_name(self.dtype)} {self.global_shape}"


@dataclass(frozen=True, slots=True)
class Placed:
    """A part and where it lies: its archive in the file, and its values."""

    part: Part
    archive_offset: int
    archive_bytes: int
    values_offset: int


@dataclass(frozen=True, slots=True)
class Image:
    """The layout of one rank's file: `frame` is what surrounds the values, as (offset, bytes), padding included."""

    file: str
    placed: tuple[Placed, ...]
    frame: tuple[tuple[int, bytes], ...]
    num_bytes: int


def file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def lay_out(parts: Iterable[Part], *, rank: int) -> Image:
    """Local, pure. Where each part and everything around it lies in the file of `rank`."""
    placed: list[Placed] = []
    frame: list[tuple[int, bytes]] = []
    end = 0
    for part in parts:
        start = _up(end, ALIGN_BYTES)
        head, tail = archive_around(part.dtype, part.sizes)
        frame.append((end, bytes(start - end) + head))
        values = start + len(head)
        end = values + part.num_bytes + len(tail)
        frame.append((end - len(tail), tail))
        placed.append(Placed(part, start, end - start, values))
    total = _up(end, PAGE_BYTES)
    frame.append((end, bytes(total - end)))
    return Image(file_name(rank), tuple(placed), tuple(piece for piece in frame if piece[1]), total)


@lru_cache(maxsize=4096)
def archive_around(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Local. What torch.save puts before and after the values of a contiguous CPU tensor; nothing of its size is touched.

    All of it stands in the first half when the tensor is empty.
    """
    tensor = torch.empty(sizes, dtype=dtype)
    sink = _Sink(tensor.data_ptr() if tensor.numel() else None)
    with_crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], sink))
    finally:
        torch.serialization.set_crc32_options(with_crc)
    if tensor.numel() and not sink.seen_values:
        raise AssertionError("torch.save copied the values before it wrote them")
    return bytes(sink.head), bytes(sink.tail)


class _Sink(io.RawIOBase):
    """Keeps what is written, but for the one write that hands over the memory at `address`."""

    def __init__(self, address: int | None) -> None:
        self._address = address
        self.head, self.tail = bytearray(), bytearray()
        self.seen_values = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._address is not None and np.frombuffer(view, dtype=np.uint8).ctypes.data == self._address:
            self.seen_values = True
        else:
            (self.tail if self.seen_values else self.head).extend(view)
        return len(view)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        pass


def _up(offset: int, multiple: int) -> int:
    return -(-offset // multiple) * multiple
