"""What an unfinished preparation keeps on disk, so that the same command goes on after a kill: files that grow, and notes on them."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import xxhash

from surefoot.core.durable import write_atomic
from surefoot.core.hashing import sha256_json
from surefoot.core.strict_json import canonical, loads

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 20


class Damaged(Exception):
    """What is there is not what was noted. The way out is to begin anew."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The first `bytes` of a file, and their xxh3."""

    bytes: int
    xxh3: str


class Spool:
    """A file that only grows. What lies behind `mark` was written and never noted: it is cut off. Raises Damaged when the rest differs.

    The first `header_bytes` belong to whoever writes them, and are not looked at.
    """

    def __init__(self, path: Path, *, mark: Mark | None = None, header_bytes: int = 0) -> None:
        self.path = path
        self._header_bytes = header_bytes
        self._hash = xxhash.xxh3_64()
        self.num_bytes = mark.bytes if mark else 0
        try:
            self.file: BinaryIO = path.open("r+b" if mark else "w+b")
        except FileNotFoundError as error:
            raise Damaged(f"{path.name} is gone") from error
        try:
            if mark:
                self._check(mark)
            self.file.truncate(header_bytes + self.num_bytes)
            self.file.seek(header_bytes + self.num_bytes)
        except BaseException:
            self.file.close()
            raise

    def append(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    def sync(self) -> Mark:
        """Everything on disk, and how far that is."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return Mark(self.num_bytes, self._hash.hexdigest())

    def blocks(self) -> Iterator[bytes]:
        """All of it, without the header, in pieces. Nothing may be appended meanwhile."""
        self.file.flush()
        with self.path.open("rb") as file:
            file.seek(self._header_bytes)
            left = self.num_bytes
            while left and (block := file.read(min(left, _READ_BYTES))):
                yield block
                left -= len(block)

    def rows(self, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """All of it as rows of `dtype`, mapped from the disk: of a shard of short documents they take more bytes than the shard."""
        self.file.flush()
        count = self.num_bytes // dtype.itemsize
        if count == 0:
            return np.zeros(0, dtype=dtype)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=self._header_bytes, shape=(count,))

    def close(self) -> None:
        self.file.close()

    def _check(self, mark: Mark) -> None:
        num_bytes = 0
        for block in self.blocks():
            self._hash.update(block)
            num_bytes += len(block)
        if num_bytes < mark.bytes or self._hash.hexdigest() != mark.xxh3:
            raise Damaged(f"{self.path.name} is not what was written")


class Journal:
    """The two folders of a preparation: `data` will be published, `work` is for this alone. Notes are small, whole, and carry their hash.

    `key` names the input and the settings: what another key left there is worthless, and removed.
    """

    def __init__(self, folder: Path, *, key: str) -> None:
        self.data, self.work = folder / "data", folder / "work"
        self._key = key
        try:
            known = self.read("journal")
        except Damaged:
            known = {}
        if known != {"key": key} or not (self.data.is_dir() or self._is_noted("published")):
            if any(folder.iterdir()):
                logger.warning("what an interrupted preparation left is of other input or settings, or damaged: it begins anew")
            self.clear()

    def clear(self) -> None:
        """Begin with nothing."""
        for folder in (self.work, self.data):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.data, self.work):
            folder.mkdir()
        self.note("journal", {"key": self._key})

    def note(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace the note `name`, for good."""
        path = self.work / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, canonical({"value": value, "sha256": sha256_json({"key": self._key, "value": value})}))

    def read(self, name: str) -> dict[str, Any] | None:
        """The note `name`, or None. Raises Damaged."""
        try:
            noted = loads((self.work / f"{name}.json").read_bytes())
            value: dict[str, Any] = noted["value"]
            if noted["sha256"] == sha256_json({"key": self._key, "value": value}):
                return value
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"the note {name} cannot be read") from error
        raise Damaged(f"the note {name} differs from its own hash")

    def _is_noted(self, name: str) -> bool:
        return (self.work / f"{name}.json").exists()


def holds_work(folder: Path) -> bool:
    """Whether a journal in `folder` has a note of what is finished."""
    work = folder / "work"
    return any(path != work / "journal.json" for path in work.rglob("*.json"))


def mark_json(mark: Mark | None) -> dict[str, Any] | None:
    return asdict(mark) if mark else None


def mark_from_json(value: Mapping[str, Any] | None) -> Mark | None:
    return Mark(**value) if value else None
