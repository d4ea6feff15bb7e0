"""A hidden folder in which a process works is locked by it, whatever its name says; the kernel ends the lock with the process. No torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.core.errors import CheckpointError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder where it is not there, and hold it: nobody else fills or sweeps it. Raises CheckpointError when another one does.

    A file system that knows no locks is taken as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _lock(fd) or not _is_still_there(fd, folder):
            raise CheckpointError("another process works on this checkpoint", where=str(folder), hint="try again when it is done")
        yield
    finally:
        os.close(fd)


def is_held(folder: Path) -> bool:
    """Whether a living process works in it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock(fd)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_still_there(fd: int, folder: Path) -> bool:
    """False when its former holder published or removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(folder))
    except FileNotFoundError:
        return False
