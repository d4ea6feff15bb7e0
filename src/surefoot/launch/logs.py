"""Log files of ranks: where they are, how many generations are kept, and how rank 0 and the agent itself reach the console.

A rank writes to plain files, `logs/g<generation>/rank_<r>.log` for stdout (its console lines) and `.err` for stderr (warnings of libraries,
tracebacks). No pipe leads to the agent, so a stuck terminal or a closed one never stops a step. Nor does it stop the agent: what goes to
the console is written by threads that nobody waits for.
"""

from __future__ import annotations

import io
import logging
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

_ECHO_INTERVAL_S = 0.2
_MAX_TAIL_BYTES = 16_384
_MAX_LINE_BYTES = 65_536  # a progress bar that never ends its line must not be kept in memory for ever


def generation_logs(run_dir: Path, generation: int) -> Path:
    return run_dir / "logs" / f"g{generation}"


def rank_paths(run_dir: Path, generation: int, rank: int) -> tuple[Path, Path, Path]:
    """A rank's stdout file, stderr file, and the file in which its entry point says why it failed."""
    folder = generation_logs(run_dir, generation)
    return folder / f"rank_{rank}.log", folder / f"rank_{rank}.err", folder / f"rank_{rank}.error.json"


def stacks_path(run_dir: Path, generation: int, rank: int) -> Path:
    """Where a rank that is asked by signal appends the stacks of its threads."""
    return generation_logs(run_dir, generation) / f"rank_{rank}.stacks"


def testimony_path(run_dir: Path, generation: int, rank: int) -> Path:
    """What a rank that is asked through the beats board says about its collectives."""
    return generation_logs(run_dir, generation) / f"rank_{rank}.testimony.json"


def nursery_log(run_dir: Path) -> Path:
    """What the nurseries of this run wrote: warnings of imports, a traceback when one could not start."""
    return run_dir / "logs" / "nursery.log"


def aide_log(run_dir: Path, name: str) -> Path:
    """What an aide of the agent wrote, over all its starts."""
    return run_dir / "logs" / f"{name}.log"


def open_generation(run_dir: Path, generation: int, *, keep: int) -> None:
    """Make the folder of a generation, and drop the oldest ones so that `keep` remain, this one included."""
    generation_logs(run_dir, generation).mkdir(parents=True, exist_ok=True)
    numbers = sorted(int(folder.name[1:]) for folder in (run_dir / "logs").iterdir() if re.fullmatch(r"g\d+", folder.name))
    for number in numbers[:-keep]:
        shutil.rmtree(generation_logs(run_dir, number), ignore_errors=True)


def last_lines(path: Path, *, num_lines: int = 30) -> list[str]:
    """The end of a text file, at most 16 KiB of it; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-num_lines:]


class Echo:
    """Follows one file after another and hands each whole line to `write`, in a thread of its own. A file may be cut short (`trim`).

    A `write` that blocks delays the echo and nothing else; one that raises OSError (the terminal is gone) ends the echo.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._requests: queue.SimpleQueue[Path | str | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
        self._thread.start()

    def follow(self, path: Path) -> None:
        """Go on with another file from its start, once the current one is echoed to its end."""
        path.touch()
        self._requests.put(path)

    def say(self, line: str) -> None:
        """A line of the agent's own, after what is echoed so far; never waits for the console."""
        self._requests.put(line)

    def catch_up(self, *, limit_s: float = 1.0) -> None:
        """Wait until everything written so far is echoed; gives up after `limit_s` when the console does not take it."""
        done = threading.Event()
        self._requests.put(done)
        if self._thread.is_alive():
            done.wait(limit_s)

    def close(self, *, limit_s: float = 2.0) -> None:
        """Echo what is left and stop, within `limit_s`."""
        self._requests.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        file: BinaryIO = io.BytesIO()
        rest = b""
        try:
            while True:
                try:
                    request = self._requests.get(timeout=_ECHO_INTERVAL_S)
                except queue.Empty:
                    request = threading.Event()
                rest = self._echo_lines(rest + _read_on(file))
                if isinstance(request, str):
                    self._write(request)
                    continue
                if isinstance(request, threading.Event):
                    request.set()
                    continue
                self._echo_lines(rest + b"\n" if rest else b"")
                file.close()
                if request is None:
                    return
                file, rest = request.open("rb"), b""
        except (OSError, ValueError) as error:  # ValueError: the console was closed by this process
            logger.warning("the console is gone (%s): lines of rank 0 are only in its log file", error)
        finally:
            file.close()

    def _echo_lines(self, data: bytes) -> bytes:
        """Write the whole lines of `data`; returns the part that has no end yet."""
        *lines, rest = data.split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            self._write(line.decode(errors="replace"))
        return rest


def _read_on(file: BinaryIO) -> bytes:
    """What was written since the last call. A file that is shorter than that was cut, and goes on from its start."""
    position = file.tell()
    file.seek(position if position <= file.seek(0, io.SEEK_END) else 0)
    return file.read()


@contextmanager
def logging_aside(*, limit_s: float = 2.0) -> Iterator[None]:
    """While entered, what this process logs is written by a thread of its own: a stuck terminal does not stop whoever logs.

    It stands in front of the root logger's handlers, so install those before. Leaving waits at most `limit_s` for what is not written yet.
    """
    root = logging.getLogger()
    handlers = list(root.handlers)
    records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
    listener = QueueListener(records, *(handlers or filter(None, [logging.lastResort])), respect_handler_level=True)
    listener.start()
    root.handlers[:] = [QueueHandler(records)]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        stopping = threading.Thread(target=listener.stop, name="logging-stop", daemon=True)  # it waits for the last record, however long
        stopping.start()
        stopping.join(limit_s)
