"""Files as streams of their unpacked bytes: plain, gzip and Zstandard, of several members or frames too, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from surefoot.data.corpus import CorpusFile

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES: Final = 1 << 20
_SALVAGE_BYTES: Final = (4096, 64, 1)


class BrokenStream(Exception):
    """A packed file is damaged or ends too early. Everything before was read."""


class ByteStream(Protocol):
    """`read` gives up to `count` bytes, none only at the end; `file_bytes` says how far into the file on disk that is."""

    def read(self, count: int) -> bytes: ...
    def file_bytes(self) -> int: ...


@contextmanager
def open_stream(file: CorpusFile, *, offset: int = 0) -> Iterator[ByteStream]:
    """The bytes of `file` from `offset` of its unpacked content on. `read` raises BrokenStream, and OSError when the disk fails."""
    if file.packing == "":
        with file.path.open("rb") as plain:
            plain.seek(offset)
            yield _Plain(plain)
        return
    stream = _Packed(file)
    while offset > 0 and (block := stream.read(min(offset, BLOCK_BYTES))):
        offset -= len(block)
    yield stream


@dataclass(frozen=True, slots=True)
class _Plain:
    file: BinaryIO

    def read(self, count: int) -> bytes:
        return self.file.read(count)

    def file_bytes(self) -> int:
        return self.file.tell()


class _Packed:
    """Arrow unpacks. When it fails within a read it drops what that read had already: this much is then read again in small steps."""

    def __init__(self, file: CorpusFile) -> None:
        self._file = file
        self._num_read = 0
        self._broken = ""
        self._open()

    def read(self, count: int) -> bytes:
        if self._broken:
            raise BrokenStream(self._broken)
        try:
            block: bytes = self._stream.read(count)
        except OSError as error:
            self._broken = self._describe(error)
            block = self._salvage(count)
            if not block:
                raise BrokenStream(self._broken) from None
        self._num_read += len(block)
        return block

    def file_bytes(self) -> int:
        return int(self._raw.tell())

    def _open(self) -> None:
        import pyarrow as pa

        self._raw: pa.NativeFile = pa.OSFile(str(self._file.path))
        self._stream: pa.NativeFile = pa.CompressedInputStream(self._raw, self._file.packing)

    def _salvage(self, count: int) -> bytes:
        """The good bytes, less than `count`, between what was read and the damage."""
        good = b""
        for step in _SALVAGE_BYTES:
            self._open()
            to_skip = self._num_read + len(good)
            while to_skip:
                to_skip -= len(self._stream.read(min(to_skip, BLOCK_BYTES)))
            try:
                while len(good) < count and (block := self._stream.read(step)):
                    good += block
            except OSError:
                continue
        return good

    def _describe(self, error: OSError) -> str:
        packing = self._file.packing
        if "Truncated" in str(error):
            size = self._file.path.stat().st_size
            return f"the {packing} stream is cut off: the file ends at byte {size}, in the middle of it"
        return f"the {packing} stream is damaged before byte {self._raw.tell()} of the file: {str(error).removeprefix('zlib ')}"
