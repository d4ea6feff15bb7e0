"""One object store, s3:// or file:///, through obstore: few verbs, bounded retries, errors that say which of the usual things is wrong.

Where the store is and who we are comes from the environment alone (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, ...). No torch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.durable import fsync_dir, fsync_file
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt
from surefoot.core.stores import Patience as Patience
from surefoot.core.stores import patiently, problem_of, s3_settings
from surefoot.core.tiers import BadTier, StoreUrl, parse_store_url

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

Answer = TypeVar("Answer")

CHUNK_BYTES = 8 << 20
_READ_BYTES = 16 << 20
_MAX_PARTS = 9_000  # S3 takes 10,000
_NUM_PARTS_AT_ONCE = 4


class ObjectStore:
    """The objects under one StoreUrl. Keys are relative to it. Safe to use from several threads, never across a fork."""

    def __init__(self, url: StoreUrl, *, patience: Patience, clock: Clock) -> None:
        self.url = url
        self._patience = patience
        self._clock = clock

    @classmethod
    def open(cls, url: str | StoreUrl, *, patience: Patience | None = None, clock: Clock | None = None) -> ObjectStore:
        """Raises ConfigError for a URL that is none, or when obstore is not installed. Looks at nothing yet."""
        patience = patience or Patience()
        try:
            place = url if isinstance(url, StoreUrl) else parse_store_url(url)
        except BadTier as error:
            raise ConfigError(error.what, hint=error.hint) from None
        if find_spec("obstore") is None:
            raise ConfigError("the package obstore is not installed", where=str(place), hint='pip install "surefoot[s3]"')
        return cls(place, patience=patience, clock=clock or SystemClock())

    @cached_property
    def _backend(self) -> Backend:
        # Imported on first use: it starts threads, which a process that forks later must not have.
        from obstore.store import LocalStore, S3Store

        if self.url.scheme == "file":
            if not Path(self.url.prefix).is_dir():
                hint = "make it, or mount what belongs there"
                raise CheckpointError("there is no such folder", where=str(self.url), hint=hint, kind="bucket-missing")
            return LocalStore(self.url.prefix, automatic_cleanup=True)
        try:
            return S3Store(self.url.bucket, prefix=self.url.prefix or None, **s3_settings(patience=self._patience))
        except _store_errors() as error:
            raise _named(error, url=self.url, doing="opening it") from error

    def check(self) -> None:
        """That the place is there, may be written, and honours conditional writes, on which the commit marker stands.

        A folder is made when its parent is there: no more, for a disk that is not mounted must not be filled in another's place.
        """
        if self.url.scheme == "file" and Path(self.url.prefix).parent.is_dir():
            try:
                Path(self.url.prefix).mkdir(exist_ok=True)
            except OSError as error:
                raise _named(error, url=self.url, doing="making the folder") from error
        self.keys(under="")
        key = f".probe-{os.getpid()}-{random.getrandbits(64):016x}"
        try:
            self.create(key, b"first")
            if self.create(key, b"second"):
                raise CheckpointError(
                    "this store overwrites where it was told to create: two writers could publish one checkpoint",
                    where=str(self.url),
                    hint="use a store that honours If-None-Match",
                    kind="refused",
                )
        finally:
            self.delete_all([key])

    def create(self, key: str, data: bytes) -> bool:
        """Make a small object that must not exist yet; False when there is one already.

        False proves nothing about who made it: when a reply is lost, the client's own second try meets its first. Read it back.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def attempt() -> bool:
            try:
                obstore.put(self._backend, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            self._make_durable(key)
            return True

        return self._patiently(attempt, doing=f"creating {key}")

    def write(self, key: str, pieces: Callable[[], Iterator[bytes]], *, num_bytes: int) -> None:
        """Write or overwrite an object, in parts when it is large. `pieces` is called anew for each try; what it raises comes through."""
        import obstore

        chunk_bytes = max(CHUNK_BYTES, -(-num_bytes // _MAX_PARTS))

        def attempt() -> None:
            if num_bytes <= CHUNK_BYTES:
                obstore.put(self._backend, key, b"".join(pieces()), use_multipart=False)
            else:
                obstore.put(self._backend, key, pieces(), chunk_size=chunk_bytes, max_concurrency=_NUM_PARTS_AT_ONCE)
            self._make_durable(key)

        self._patiently(attempt, doing=f"writing {key}")

    def read(self, key: str) -> bytes:
        """A small object. Raises CheckpointError with kind "missing" when there is none."""
        import obstore

        return self._patiently(lambda: bytes(obstore.get(self._backend, key).bytes()), doing=f"reading {key}")

    def read_or_none(self, key: str) -> bytes | None:
        try:
            return self.read(key)
        except CheckpointError as error:
            if error.values.get("kind") == "missing":
                return None
            raise

    def pieces(self, key: str, *, num_bytes: int) -> Iterator[memoryview]:
        """The first `num_bytes` of an object in order, in pieces that are asked for, and tried again, one by one."""
        import obstore

        for start in range(0, num_bytes, _READ_BYTES):
            end = min(start + _READ_BYTES, num_bytes)

            def attempt(start: int = start, end: int = end) -> memoryview:
                piece = memoryview(obstore.get_range(self._backend, key, start=start, end=end))
                if len(piece) != end - start:
                    raise _short_object(self.url, key, f"{len(piece)} bytes instead of {end - start} at {start}")
                return piece

            yield self._patiently(attempt, doing=f"reading {key}")

    def read_into(self, key: str, *, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on."""
        import obstore

        for start in range(0, buffer.nbytes, _READ_BYTES):
            part = buffer[start : start + _READ_BYTES]

            def attempt(part: memoryview = part, start: int = offset + start) -> None:
                piece = memoryview(obstore.get_range(self._backend, key, start=start, end=start + len(part)))
                if len(piece) != len(part):
                    raise _short_object(self.url, key, f"{len(piece)} bytes instead of {len(part)} at {start}")
                part[:] = piece

            self._patiently(attempt, doing=f"reading {key}")

    def keys(self, *, under: str) -> dict[str, int]:
        """Keys and sizes of all objects below the folder `under` ("" for all)."""
        import obstore

        return self._patiently(
            lambda: {item["path"]: item["size"] for batch in obstore.list(self._backend, prefix=under or None) for item in batch},
            doing="listing",
        )

    def top(self) -> tuple[list[str], list[str]]:
        """(folders, objects) that stand directly under the URL."""
        import obstore

        found = self._patiently(lambda: obstore.list_with_delimiter(self._backend), doing="listing")
        return sorted(found["common_prefixes"]), sorted(item["path"] for item in found["objects"])

    def delete_all(self, keys: list[str]) -> dict[str, str]:
        """Delete in this order; what could not be deleted, with the reason. A failed one never stops the next; an absent one is done."""
        import obstore

        failed = {}
        for key in keys:
            try:
                self._patiently(lambda key=key: obstore.delete(self._backend, key), doing=f"deleting {key}")  # type: ignore[misc]
            except CheckpointError as error:
                if error.values.get("kind") != "missing":
                    failed[key] = error.what
        return failed

    def _make_durable(self, key: str) -> None:
        """A store answers when the object is durable. A folder's files are fsynced here: the client does not."""
        if self.url.scheme == "file":
            path = Path(self.url.prefix) / key
            fsync_file(path)
            fsync_dir(path.parent)
            fsync_dir(Path(self.url.prefix))

    def _patiently(self, attempt: Callable[[], Answer], *, doing: str) -> Answer:
        foreign = (_store_errors(), OSError, NotImplementedError)
        return patiently(
            attempt,
            patience=self._patience,
            clock=self._clock,
            foreign=foreign,
            named=lambda error: _named(error, url=self.url, doing=doing),
        )


def _store_errors() -> type[Exception]:
    from obstore.exceptions import BaseError

    return BaseError


def _named(error: Exception, *, url: StoreUrl, doing: str) -> CheckpointError:
    rights = "read, write, list and delete" if url.scheme == "s3" else "write"
    look = "see what is there with checkpoint list"
    problem = problem_of(error, url=url, doing=doing, rights=rights, setting="checkpoint.tiers", look=look)
    if problem.kind == "damaged":
        return _short_object(url, doing, problem.detail)
    return CheckpointError(problem.what, where=str(url), hint=problem.hint, kind=problem.kind, detail=problem.detail)


def _short_object(url: StoreUrl, key: str, detail: str) -> Corrupt:
    return Corrupt(f"the object is shorter than it was: {detail}", where=f"{url}: {key}", hint="take another copy", kind="damaged")


def kind_of(error: CheckpointError) -> Any:
    """Which of the usual things went wrong: bucket-missing, credentials, missing, unreachable, conflict, damaged, refused."""
    return error.values.get("kind", "")
