"""Prepared files in an object store: range requests, several at once, neighbours in one. Through obstore, the extra `s3`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeVar

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.stores import Patience, patiently, problem_of, s3_settings
from surefoot.core.tiers import BadTier, parse_store_url
from surefoot.data.storage import ByteRange

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

Answer = TypeVar("Answer")

_NUM_REQUESTS_AT_ONCE: Final = 32  # at 20 ms a request 1,600 reads a second, where a rank of a large job needs about ten
_GAP_BYTES: Final = 64 * 1024  # at 10 MB/s a request costs as much time as 200 KB: what lies between two ranges is cheaper read
_MAX_REQUEST_BYTES: Final = 4 << 20
_MAX_BYTES_AHEAD: Final = 32 << 20  # of one call: what its threads may have fetched before it is looked at
_BEYOND: Final = "damaged"


class ObjectStorage:
    """The objects under one URL. A request is retried with waits, and what is still wrong then is a DataError that says what."""

    def __init__(self, url: str, *, patience: Patience, clock: Clock) -> None:
        self._url = url
        self._patience = patience
        self._clock = clock
        self._pool = ThreadPoolExecutor(_NUM_REQUESTS_AT_ONCE, thread_name_prefix="data-requests")  # starts its threads when asked

    @classmethod
    def open(cls, url: str, *, patience: Patience | None = None, clock: Clock | None = None) -> ObjectStorage:
        """Raises ConfigError for a URL that is none, or when obstore is not installed. Looks at nothing yet."""
        if url.startswith("s3://"):
            try:
                parse_store_url(url)
            except BadTier as error:
                raise ConfigError(error.what, where="[data] path", hint=error.hint) from None
        if find_spec("obstore") is None:
            raise ConfigError("the package obstore is not installed", where=url, hint='pip install "surefoot[s3]"')
        return cls(url, patience=patience or Patience(), clock=clock or SystemClock())

    @property
    def place(self) -> str:
        return self._url

    def read(self, name: str) -> bytes:
        import obstore

        return self._patiently(lambda: bytes(obstore.get(self._backend, name).bytes()), doing=f"reading {name}", file=name)

    def num_bytes(self, names: Sequence[str]) -> list[int]:
        import obstore

        def size(name: str) -> int:
            return self._patiently(lambda: obstore.head(self._backend, name)["size"], doing=f"looking at {name}", file=name)

        return list(self._pool.map(size, names))

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        waiting: deque[tuple[Future[memoryview], ByteRange, list[ByteRange]]] = deque()
        groups = iter(coalesced(wanted))
        while True:
            while sum(whole.num_bytes for _, whole, _ in waiting) < _MAX_BYTES_AHEAD and (group := next(groups, None)) is not None:
                whole = _hull(group)
                waiting.append((self._pool.submit(self._get, whole), whole, group))
            if not waiting:
                return
            answer, whole, group = waiting.popleft()
            data = answer.result()
            for one in group:
                begin = one.offset - whole.offset
                yield data[begin : begin + one.num_bytes]

    def joined(self, wanted: Sequence[ByteRange]) -> bytes:
        return b"".join(self.ranges(wanted))

    def again(self, wanted: ByteRange) -> bytes:
        return bytes(self._get(wanted))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get(self, wanted: ByteRange) -> memoryview:
        import obstore

        def attempt() -> memoryview:
            end = wanted.offset + wanted.num_bytes
            return memoryview(obstore.get_range(self._backend, wanted.name, start=wanted.offset, end=end))

        try:
            return self._patiently(attempt, doing=f"reading {wanted.name} at {wanted.offset}", file=wanted.name)
        except DataError as error:
            if error.values["kind"] == _BEYOND:  # it ends before the range begins
                return memoryview(b"")
            raise

    @cached_property
    def _backend(self) -> Backend:
        # Made at first use: it starts threads, which a process that forks later must not have.
        from obstore.store import HTTPStore, S3Store

        settings = s3_settings(patience=self._patience)
        try:
            if self._url.startswith("s3://"):
                url = parse_store_url(self._url)
                return S3Store(url.bucket, prefix=url.prefix or None, **settings)
            settings["client_options"]["allow_http"] = self._url.startswith("http://")
            return HTTPStore.from_url(self._url, **settings)
        except _store_errors() as error:
            raise self._named(error, doing="opening it") from error

    def _patiently(self, attempt: Callable[[], Answer], *, doing: str, file: str) -> Answer:
        def named(error: Exception) -> DataError:
            return self._named(error, doing=doing, file=file)

        return patiently(attempt, patience=self._patience, clock=self._clock, foreign=(_store_errors(), OSError), named=named)

    def _named(self, error: Exception, *, doing: str, file: str | None = None) -> DataError:
        look = "is this the prefix under which the prepared folder was copied?"
        problem = problem_of(error, url=self._url, doing=doing, rights="read", setting="[data] path", look=look)
        return DataError(problem.what, where=self._url, hint=problem.hint, kind=problem.kind, detail=problem.detail, file=file)


def coalesced(wanted: Sequence[ByteRange], *, gap_bytes: int = _GAP_BYTES, max_bytes: int = _MAX_REQUEST_BYTES) -> list[list[ByteRange]]:
    """`wanted` in groups that one request each answers: ranges of one file that follow each other with at most `gap_bytes` in between.

    Order is kept; a group spans at most `max_bytes`, unless it is one range.
    """
    groups: list[list[ByteRange]] = []
    for one in wanted:
        if groups and _fits(groups[-1], one, gap_bytes=gap_bytes, max_bytes=max_bytes):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _fits(group: list[ByteRange], one: ByteRange, *, gap_bytes: int, max_bytes: int) -> bool:
    first, last = group[0], group[-1]
    end = one.offset + one.num_bytes
    return (
        one.name == last.name and last.offset <= one.offset <= last.offset + last.num_bytes + gap_bytes and end - first.offset <= max_bytes
    )


def _hull(group: list[ByteRange]) -> ByteRange:
    end = max(one.offset + one.num_bytes for one in group)
    return ByteRange(group[0].name, group[0].offset, end - group[0].offset)


def _store_errors() -> type[Exception]:
    from obstore.exceptions import BaseError

    return BaseError
