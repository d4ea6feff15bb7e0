"""Stored parts of tensors, read without torch.load: straight into live memory where that is possible, else through one reused buffer.

torch.load would allocate every part anew, and first touches of fresh memory cost more than everything else of a load together.
"""

from __future__ import annotations

import io
import math
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from surefoot.checkpoint.pickle_scan import refuse_greedy, told
from surefoot.checkpoint.sources import FileSource
from surefoot.checkpoint.state import dtype_name
from surefoot.checkpoint.zip_slice import ZipSlice
from surefoot.core.errors import Corrupt, Incompatible, Incomplete
from surefoot.core.records import ManifestFile

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_PAYLOAD = "data/0"
_LOOKED_BYTES = 1 << 18
"""Copied and looked at at once: what was just copied is still in the cache of the core."""
Look = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Layout:
    """What `data.pkl` says about the one tensor beside it; `start` and `strides` count elements of the payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    num_elements: int

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        """Whether elements follow each other as in a contiguous tensor; the stride of a dim of one element means nothing."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Part:
    """A stored part: how it lies, and where its payload starts in its file."""

    file: ManifestFile
    layout: Layout
    offset: int


class PartReader:
    """Reads stored parts from the source of each file. For several threads at once; each has a buffer that it uses again."""

    def __init__(self, files: Mapping[str, ManifestFile], sources: Mapping[str, FileSource]) -> None:
        self._files = files
        self._sources = sources
        self._own = threading.local()

    def part(self, info: _StorageInfo) -> Part:
        """Where the part lies. Raises Corrupt or OSError, and Incompatible for what torch's transforms changed."""
        if info.relative_path not in self._files:
            raise Incomplete("its file is missing")
        if getattr(info, "transform_descriptors", None):
            raise Incompatible(f"stored through {info.transform_descriptors}, which only its writer can undo")
        found = ZipSlice(self._reader(info), length=info.length)
        layout = read_layout(found.content("data.pkl"))
        payload = found.record(_PAYLOAD) if layout.num_elements or _PAYLOAD in found.records else None
        if "byteorder" in found.records and found.content("byteorder") != b"little":
            raise Incompatible("stored on a machine of the other byte order")
        if payload is not None and payload.num_bytes != layout.num_bytes:
            raise Corrupt(f"{payload.num_bytes} bytes are stored, {layout.num_bytes} belong to {dtype_name(layout.dtype)} {layout.shape}")
        return Part(self._files[info.relative_path], layout, info.offset + (found.offset(payload) if payload is not None else 0))

    def read_box(self, part: Part, target: torch.Tensor, *, offsets: Sequence[int], look: Look | None = None) -> bool:
        """Fill `target`, on any device and of any strides, with the box of its shape that starts at `offsets` in the part.

        `look` is shown what `target` holds then, piece by piece while it is in the cache: true. False where the box is not one run of bytes
        in both places, and nothing was shown.
        """
        layout = part.layout
        first, last = _span(layout, offsets, target.shape)
        if first > last:
            return False
        if layout.dtype == target.dtype and self._is_run(layout, target, num_elements=last - first + 1):
            memory = memory_of(target)
            piece_bytes = len(memory) if look is None else _LOOKED_BYTES
            for done in range(0, len(memory), piece_bytes):
                piece = memory[done : done + piece_bytes]
                self._fill(part, piece, at=first * layout.dtype.itemsize + done)
                if look is not None:
                    look(piece)
            return look is not None
        elements = self._buffer((last - first + 1) * layout.dtype.itemsize)
        self._fill(part, memory_of(elements), at=first * layout.dtype.itemsize)
        target.copy_(elements.view(layout.dtype).as_strided(target.shape, layout.strides))
        return False

    def read_whole(self, part: Part) -> torch.Tensor:
        """The whole part in this thread's buffer: good until the next read."""
        layout = part.layout
        elements = self._buffer(layout.num_bytes)
        self._fill(part, memory_of(elements), at=0)
        return elements.view(layout.dtype).as_strided(layout.shape, layout.strides, layout.start)

    def _is_run(self, layout: Layout, target: torch.Tensor, *, num_elements: int) -> bool:
        """Whether the box is one run of bytes in both places."""
        is_memory = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
        return is_memory and layout.is_row_major and num_elements == target.numel()

    def _fill(self, part: Part, memory: memoryview, *, at: int) -> None:
        self._sources[part.file.name].read_into(part.file, offset=part.offset + at, buffer=memory)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        have: torch.Tensor | None = getattr(self._own, "buffer", None)
        if have is None or have.numel() < num_bytes:
            self._own.buffer = have = torch.empty(num_bytes, dtype=torch.uint8)
        return have[:num_bytes]

    def _reader(self, info: _StorageInfo) -> Callable[[int, int], bytes]:
        file, source = self._files[info.relative_path], self._sources[info.relative_path]
        if info.offset < 0 or info.length <= 0 or info.offset + info.length > file.num_bytes:
            raise Incomplete("its bytes lie outside of the file")

        def read(offset: int, length: int) -> bytes:
            raw = bytearray(length)
            source.read_into(file, offset=info.offset + offset, buffer=memoryview(raw))
            return bytes(raw)

        return read


@lru_cache(maxsize=4096)  # parts of one shape have one text, and most parts share their shape
def read_layout(raw: bytes) -> Layout:
    """The layout from the bytes of `data.pkl`. Only the one call that torch writes for a plain tensor is understood; else Corrupt."""
    try:
        refuse_greedy(raw)
        layout = _LayoutUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # the bytes are foreign: whatever they make the unpickler raise is the finding
        raise Corrupt(f"no plain tensor: {told(error)}") from error
    if not isinstance(layout, Layout):
        raise Corrupt(f"{type(layout).__name__}, no plain tensor")
    return layout


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to be read and written. The caller keeps the tensor alive."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.dtype.itemsize
    octets: Any = whole[start : start + tensor.numel() * tensor.dtype.itemsize].numpy()
    return memoryview(octets)


def _span(layout: Layout, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """First and last element of the payload that the box touches; last < first when it is empty. Raises Corrupt when it lies outside."""
    if len(layout.shape) != len(sizes) or any(o < 0 or o + s > g for o, s, g in zip(offsets, sizes, layout.shape, strict=True)):
        raise Corrupt(f"a part of {layout.shape} holds no box of {tuple(sizes)} at {tuple(offsets)}")
    if math.prod(sizes) == 0:
        return 0, -1
    first = layout.start + sum(offset * stride for offset, stride in zip(offsets, layout.strides, strict=True))
    return first, first + sum((size - 1) * stride for size, stride in zip(sizes, layout.strides, strict=True))


class _LayoutUnpickler(pickle.Unpickler):
    """Knows the names that torch.save writes for a plain tensor, and gives them harmless meanings."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _CALLS:
            return _CALLS[module_name, global_name]
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        if module_name == "torch" and global_name in _DTYPES:
            return _DTYPES[global_name]
        raise pickle.UnpicklingError(f"{module_name}.{global_name} has no place in a stored tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        kind, dtype, key, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or key != "0" or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("no storage of a single tensor")
        return dtype, count


def _layout_v2(
    storage: Any, start: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None, metadata: Any = None
) -> Layout:
    dtype, count = storage
    return _checked(dtype, count, start=start, shape=shape, strides=strides, rest=(hooks, metadata))


def _layout_v3(
    storage: Any, start: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Layout:
    bytes_dtype, num_bytes = storage
    if bytes_dtype != torch.uint8 or num_bytes % dtype.itemsize:
        raise pickle.UnpicklingError(f"{num_bytes} bytes are no storage of {dtype}")
    return _checked(dtype, num_bytes // dtype.itemsize, start=start, shape=shape, strides=strides, rest=(hooks, metadata))


def _checked(dtype: torch.dtype, count: int, *, start: Any, shape: Any, strides: Any, rest: tuple[Any, ...]) -> Layout:
    """A Layout that cannot reach outside of its payload."""
    numbers = [start, *shape, *strides]
    if any(rest) or len(shape) != len(strides) or any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError("neither hooks nor views are stored by a checkpoint")
    layout = Layout(dtype, tuple(shape), tuple(strides), start=start, num_elements=count)
    if _span(layout, (0,) * len(layout.shape), layout.shape)[1] >= count:
        raise pickle.UnpicklingError(f"{layout.shape} with strides {layout.strides} reaches outside of {count} elements")
    return layout


_CALLS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _layout_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _layout_v3,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    ("collections", "OrderedDict"): OrderedDict,
}
