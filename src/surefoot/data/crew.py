"""Processes that work beside this one: an item in, a result out, in the order of the items however many there are.

They are spawned, not forked, end with the process that started them, and use one thread each. What they are sent and send back is pickled:
both ends are this program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from surefoot.core.errors import DataError, SurefootError
from surefoot.core.parent import signal_on_parents_end

Item = TypeVar("Item")
Result = TypeVar("Result")
_ONE_THREAD: Final = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_AHEAD: Final = 2  # items per worker that may be finished before their turn: bounds the memory when one of them takes long


class WorkerLost(DataError):
    """A worker ended without an answer. What is finished stays."""


class Crew:
    """`size` processes, started when there is more than one thing to do; with one, the work is done here.

    Use it in a thread that lives as long as they shall.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[_Worker] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            worker.end()

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Each item with its result, in order. Raises what `work` raised for the first item that it failed on; WorkerLost."""
        source = iter(items)
        first_ones = list(islice(source, 2))
        if self._size == 1 or len(first_ones) < 2:
            yield from ((item, work(item)) for item in chain(first_ones, source))
            return
        while len(self._workers) < self._size:
            self._workers.append(_Worker())
        for worker in self._workers:
            worker.send(work)
        yield from _Rounds(self._workers, chain(first_ones, source)).run()


class _Rounds(Generic[Item, Result]):
    """One `map`: an idle worker is given the next item, and results wait for their turn."""

    def __init__(self, workers: list[_Worker], items: Iterator[Item]) -> None:
        self._items = enumerate(items)
        self._idle = list(workers)
        self._busy: dict[Connection, tuple[_Worker, int]] = {}
        self._given: dict[int, Item] = {}
        self._done: dict[int, Result | BaseException] = {}
        self._most_ahead = _AHEAD * len(workers)
        self._turn = 0

    def run(self) -> Iterator[tuple[Item, Result]]:
        self._give()
        while self._given:
            while self._turn not in self._done:
                self._take()
                self._give()
            result, item = self._done.pop(self._turn), self._given.pop(self._turn)
            self._turn += 1
            if isinstance(result, BaseException):
                raise result
            self._give()
            yield item, result

    def _give(self) -> None:
        """Workers only wait for an item while they are idle, so that neither end blocks on a full pipe."""
        while self._idle and len(self._given) < self._most_ahead and (entry := next(self._items, None)):
            worker = self._idle.pop()
            number, self._given[entry[0]] = entry
            worker.send(entry[1])
            self._busy[worker.line] = (worker, number)

    def _take(self) -> None:
        for line in wait(list(self._busy)):
            assert isinstance(line, Connection)
            worker, number = self._busy.pop(line)
            self._done[number] = worker.receive()
            self._idle.append(worker)


class _Worker:
    def __init__(self) -> None:
        self.line, theirs = Pipe()
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-m", "surefoot.data.crew", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env={**os.environ, **_ONE_THREAD})
        theirs.close()

    def send(self, value: object) -> None:
        try:
            self.line.send(value)
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> Any:
        try:
            return self.line.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def end(self) -> None:
        self.line.close()
        self._process.kill()
        self._process.wait()

    def _lost(self) -> WorkerLost:
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = "the same command goes on from what is finished; with fewer --workers it needs less memory"
        return WorkerLost(f"a worker process ended {how}", where="data prepare", hint=hint)


def _serve(line: Connection) -> None:
    """In the worker: a callable says what to do with the items that follow."""
    work: Callable[[Any], Any] | None = None
    while True:
        value = line.recv()
        if callable(value):
            work = value
            continue
        assert work is not None
        try:
            result: object = work(value)
        except SurefootError as error:
            result = error
        except Exception as error:  # the process boundary: told to the one who asked
            result = RuntimeError(f"a worker failed: {error!r}\n{traceback.format_exc()}")
        line.send(result)


def _main() -> None:
    signal_on_parents_end(int(sys.argv[2]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; who started this decides
    try:
        _serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):
        sys.exit(0)


if __name__ == "__main__":
    from surefoot.data import crew

    crew._main()
