"""Log files that stay small: what grows beyond a bound goes to one older part beside it (`.1`), while its writers go on writing.

Ranks hold their files open, so a file is copied and cut, not renamed; they append, so they go on at its new end. What they write between
the last byte that is copied and the cut is lost: a few lines of a file that says too much.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from surefoot.launch.logs import generation_logs

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20


class LogTrimmer:
    """Trims the log files of a run from a thread of its own: a copy to a slow disk holds nobody up.

    A file may be larger than `max_bytes` by what is written to it within `interval_s`.
    """

    def __init__(self, run_dir: Path, *, max_bytes: int, interval_s: float = 2.0) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_bytes
        self._interval_s = interval_s
        self._generation = 0
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-trimmer", daemon=True)
        self._thread.start()

    def follow(self, generation: int) -> None:
        """Go on with the files of another generation; those of the last one are looked at once more."""
        self._generation = generation

    def close(self, *, limit_s: float = 2.0) -> None:
        self._closing.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            errors = [error for path in self._paths() if (error := self._failed(path)) is not None]
            if errors and not self._failing:
                logger.warning("a log file cannot be trimmed and goes on growing: %s", errors[0])
            self._failing = bool(errors)

    def _failed(self, path: Path) -> OSError | None:
        try:
            trim(path, max_bytes=self._max_bytes)
        except OSError as error:
            return error
        return None

    def _paths(self) -> Iterator[Path]:
        yield from (self._run_dir / "logs").glob("*.log")  # of the nursery and the aides
        for generation in (self._generation - 1, self._generation):
            for pattern in ("rank_*.log", "rank_*.err"):
                yield from generation_logs(self._run_dir, generation).glob(pattern)


def trim(path: Path, *, max_bytes: int) -> bool:
    """Move the newest `max_bytes` of a larger file to `<path>.1`, in place of what was there, and leave it empty; whether that was done.

    The older part goes first, so that there is room for the new one on a disk that has become full.
    """
    older, part = path.with_name(f"{path.name}.1"), path.with_name(f".{path.name}.1.tmp")
    try:
        source = path.open("r+b")
    except FileNotFoundError:
        return False
    with source:
        num_bytes = os.fstat(source.fileno()).st_size
        if num_bytes <= max_bytes:
            return False
        older.unlink(missing_ok=True)
        source.seek(num_bytes - max_bytes)
        try:
            with part.open("wb") as target:
                for _ in range(1 + 2 * max_bytes // _CHUNK_BYTES):  # up to its end, but no endless race with a fast writer
                    if not (chunk := source.read(_CHUNK_BYTES)):
                        break
                    target.write(chunk)
            part.replace(older)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        source.truncate(0)
    return True
