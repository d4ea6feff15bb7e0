"""Work done ahead of time by a thread, for keys that are known beforehand. What was fetched never depends on when it was fetched."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Fetched = TypeVar("Fetched")

_HEAD_START_S: Final = 0.005  # a shorter step hides little: two threads that take turns took up to twice as long as one


class ReadAhead(Generic[Key, Fetched]):
    """`fetch(key)` for up to `depth` announced keys, by `num_threads` threads that sleep when there is nothing to do.

    Threads begin with the first announcement, never before: whoever makes this may still fork. They begin with a key `head_start_s` after
    it was announced: an owner who is back by then fetches it alone. One owner calls the methods. `fetch` must be a function of its key
    alone, and safe to run beside its owner. An error waits for the `take` of its key.
    """

    def __init__(self, fetch: Callable[[Key], Fetched], *, depth: int, num_threads: int = 1, head_start_s: float = _HEAD_START_S) -> None:
        self._fetch = fetch
        self._depth = depth
        self._num_threads = num_threads
        self._head_start_s = head_start_s
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: OrderedDict[Key, Future[Fetched]] = OrderedDict()
        self._closed = threading.Event()

    def announce(self, keys: Iterable[Key]) -> None:
        """These keys will be taken soon, in this order. Known ones stay; what does not fit into `depth` is left for later."""
        if self._closed.is_set():
            raise ValueError("read-ahead was closed")
        for key in keys:
            if len(self._ahead) >= self._depth:
                return
            if key not in self._ahead:
                self._ahead[key] = Future()
                self._threads().submit(self._work, key, self._ahead[key], time.monotonic() + self._head_start_s)

    def take(self, key: Key) -> Fetched:
        """What `fetch(key)` gave, waiting for it; fetched here and now when it was not announced. Raises what `fetch` raised."""
        future = self._ahead.pop(key, None)
        if future is None or future.cancel():  # not begun: doing it here is never slower than waiting for its turn
            return self._fetch(key)
        return future.result()

    def drop(self) -> None:
        """Forget what was announced: the order changed. What a thread is at ends by itself, and nobody sees it."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Drop everything and end the threads; waits for the fetch that is under way, which may use what the owner closes next."""
        self.drop()
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _work(self, key: Key, future: Future[Fetched], due_s: float) -> None:
        wait_s = due_s - time.monotonic()
        if wait_s > 0 and not future.cancelled():
            self._closed.wait(wait_s)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._fetch(key))
            except BaseException as error:  # of whoever takes the key
                future.set_exception(error)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="read-ahead")
        return self._pool
