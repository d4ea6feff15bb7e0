"""Where prepared files lie: a local folder or an object store. Ranges of bytes in, bytes out; what they mean is for others to check."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from surefoot.core.errors import MISSING, UNREADABLE, DataError

_MAX_OPEN_FILES: Final = 256  # a store of 30 TB has 28,000 shards of two files each; a shell allows 1,024 open ones
_DIRECT_ALIGNMENT: Final = 4096
_URL = re.compile(r"(s3|https?|file):/+(.*)")
_RESTORE: Final = "restore it from a copy, or prepare the data again with --force"


class ByteRange(NamedTuple):
    """Bytes [offset, offset + num_bytes) of the file `name`, a path relative to the prepared folder."""

    name: str
    offset: int
    num_bytes: int


class Storage(Protocol):
    """The files of one prepared folder. Safe to use from several threads; made after the fork that it is used in."""

    @property
    def place(self) -> str:
        """The folder or URL, for messages."""
        ...

    def read(self, name: str) -> bytes:
        """A whole small file. Raises DataError, with kind "missing" when there is none."""
        ...

    def num_bytes(self, names: Sequence[str]) -> list[int]:
        """Sizes of files. Raises DataError when one is missing."""
        ...

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        """The bytes of each range in turn, valid until the next is asked for. Fastest when neighbours follow each other.

        A range comes short where the file ends or the device gives an error: `again` says which. Raises DataError when a file is missing.
        """
        ...

    def joined(self, wanted: Sequence[ByteRange]) -> bytes:
        """The bytes of many small ranges in one piece; what comes short makes the whole short."""
        ...

    def again(self, wanted: ByteRange) -> bytes:
        """The same bytes, past every cache on the way. Short where the file ends; raises DataError when the device gives an error."""
        ...

    def close(self) -> None: ...


def open_storage(path: str | Path) -> Storage:
    """The files of a prepared folder at `path`: a folder, file:///folder, s3://bucket/prefix or http(s)://host/prefix.

    Raises DataError when there is no such folder, ConfigError for a URL that is none. A store is first asked when something is read.
    """
    match = _URL.fullmatch(str(path))  # a Path keeps one slash of a URL's two
    if match is None:
        return LocalStorage(Path(path))
    if match[1] == "file":
        return LocalStorage(Path("/") / match[2])
    from surefoot.data.object_storage import ObjectStorage

    return ObjectStorage.open(f"{match[1]}://{match[2]}")


def is_remote(path: str | Path) -> bool:
    """Whether `path` is a URL that is no folder of this machine."""
    match = _URL.fullmatch(str(path))
    return match is not None and match[1] != "file"


def read_file(path: str | Path, name: str) -> bytes:
    """One small file of the prepared folder at `path`, such as its manifest. Raises DataError, with kind "missing" when there is none."""
    storage = open_storage(path)
    try:
        return storage.read(name)
    finally:
        storage.close()


class _OpenFile:
    """A descriptor that is closed when the last who uses it lets go: another thread may read from a file that is being evicted."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class LocalStorage:
    """A folder. Files are opened relative to it as it was when this was made, so one that is replaced meanwhile is never mixed in."""

    def __init__(self, folder: Path, *, max_open_files: int = _MAX_OPEN_FILES) -> None:
        self._folder = folder
        self._max_open_files = max_open_files
        self._open: dict[str, _OpenFile] = {}  # the oldest goes first: where order is random, the last used is as likely to be used again
        self._lock = threading.Lock()
        try:
            self._root: _OpenFile | None = _OpenFile(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            hint = "prepare it with `surefoot data prepare INPUT --out DIR`"
            raise DataError(f"cannot open the folder: {error.strerror}", where=str(folder), hint=hint, kind=_kind(error)) from error

    @property
    def place(self) -> str:
        return str(self._folder)

    def read(self, name: str) -> bytes:
        try:
            with open(os.open(name, os.O_RDONLY, dir_fd=self._root_fd()), "rb") as file:
                return file.read()
        except OSError as error:
            raise self._cannot("open", name, error) from error

    def num_bytes(self, names: Sequence[str]) -> list[int]:
        root = self._root_fd()
        try:
            return [os.stat(name, dir_fd=root).st_size for name in names]
        except OSError as error:
            raise self._cannot("open", str(error.filename), error) from error

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        if not wanted:
            return
        buffer = memoryview(bytearray(max(one.num_bytes for one in wanted)))
        for name, offset, num_bytes in wanted:
            file = self._open.get(name) or self._file(name)
            view = buffer[:num_bytes]
            try:
                got = os.preadv(file.fd, (view,), offset)
            except OSError:
                got = 0
            yield view if got == num_bytes else view[:got]

    def joined(self, wanted: Sequence[ByteRange]) -> bytes:
        found = []
        for name, offset, num_bytes in wanted:
            file = self._open.get(name) or self._file(name)
            try:
                found.append(os.pread(file.fd, num_bytes, offset))
            except OSError:
                found.append(b"")
        return b"".join(found)

    def again(self, wanted: ByteRange) -> bytes:
        file = self._file(wanted.name)
        with contextlib.suppress(OSError):  # a clean page is dropped, so that the next read asks the device
            os.posix_fadvise(file.fd, wanted.offset, wanted.num_bytes, os.POSIX_FADV_DONTNEED)
        try:
            direct = self._read_direct(wanted)
            return direct if direct is not None else os.pread(file.fd, wanted.num_bytes, wanted.offset)
        except OSError as error:
            hint = "check the disk; then restore the file from a copy"
            raise DataError(
                f"reading {wanted.num_bytes} bytes at {wanted.offset} failed twice: {error.strerror}",
                where=str(self._folder / wanted.name),
                hint=hint,
                kind=UNREADABLE,
                file=wanted.name,
            ) from error

    def close(self) -> None:
        with self._lock:
            self._open.clear()
            self._root = None

    def _file(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._open.get(name)
            if file is None:
                try:
                    file = _OpenFile(os.open(name, os.O_RDONLY, dir_fd=self._root_fd()))
                except OSError as error:
                    raise self._cannot("open", name, error) from error
                while len(self._open) >= self._max_open_files:
                    del self._open[next(iter(self._open))]
                self._open[name] = file
            return file

    def _read_direct(self, wanted: ByteRange) -> bytes | None:
        """Past the page cache; None where the file system cannot."""
        begin = wanted.offset // _DIRECT_ALIGNMENT * _DIRECT_ALIGNMENT
        end = -(-(wanted.offset + wanted.num_bytes) // _DIRECT_ALIGNMENT) * _DIRECT_ALIGNMENT
        try:
            file = _OpenFile(os.open(wanted.name, os.O_RDONLY | os.O_DIRECT, dir_fd=self._root_fd()))
            with mmap.mmap(-1, end - begin) as pages:  # anonymous memory is aligned as direct reads want it
                got = os.preadv(file.fd, [pages], begin)
                return pages[wanted.offset - begin : min(got, wanted.offset - begin + wanted.num_bytes)]
        except OSError as error:
            if error.errno == errno.EINVAL:
                return None
            raise

    def _root_fd(self) -> int:
        if self._root is None:
            raise ValueError(f"{self._folder} was closed")
        return self._root.fd

    def _cannot(self, what: str, name: str, error: OSError) -> DataError:
        where = str(self._folder / name)
        return DataError(f"cannot {what} {Path(name).name}: {error.strerror}", where=where, hint=_RESTORE, kind=_kind(error), file=name)


def _kind(error: OSError) -> str:
    return MISSING if isinstance(error, FileNotFoundError | NotADirectoryError) else UNREADABLE
