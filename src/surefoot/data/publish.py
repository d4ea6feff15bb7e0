"""A folder that appears whole or not at all: built under a hidden name beside its place, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.core.durable import fsync_dir
from surefoot.core.errors import DataError
from surefoot.core.units import show_bytes
from surefoot.data.crew import WorkerLost

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


class Unwritable(Exception):
    """Writing below a folder in making failed, for the reason `error`. `folder_in_making` makes it a DataError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def writing() -> Iterator[None]:
    """Around work on the files that are prepared and on nothing else: its OSError comes out as Unwritable, anybody else's as it is."""
    try:
        yield
    except OSError as error:
        raise Unwritable(error) from error


@contextmanager
def folder_in_making(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out`, for this process alone; what it holds is what an interrupted call left in it.

    A failure removes it. A kill, Ctrl-C, a signal that ends the process and a lost worker leave it, so that the next call can go on.
    Raises DataError when another live process is at it, when the place cannot be written, and, naming the bytes that are free, when the
    disk is full.
    """
    folder = out.with_name(f".{out.name}.preparing")
    try:
        new_parents = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _take_folder(folder, out=out)
    except OSError as error:
        raise _as_data_error(error, out=out) from error
    is_kept = False
    try:
        with writing():
            _mend_replacement(out)
        yield folder
    except Unwritable as failure:
        shutil.rmtree(folder, ignore_errors=True)
        raise _as_data_error(failure.error, out=out) from failure.error
    except (KeyboardInterrupt, SystemExit, WorkerLost):
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # parents made here go again, unless something was published in them
            for parent in new_parents:
                parent.rmdir()


def publish(folder: Path, *, out: Path) -> None:
    """Rename `folder` to `out`, in place of what is there. A kill between the two renames is mended by the next call."""
    with writing():
        fsync_dir(folder)
        replaced = _replaced_name(out)
        if out.exists():
            os.rename(out, replaced)
        os.rename(folder, out)
        fsync_dir(out.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def refuse_too_small(out: Path, *, needed_bytes: int) -> None:
    """Fail before the first byte when the disk cannot hold even a low estimate."""
    with writing():
        free = shutil.disk_usage(out.parent).free
    if free < needed_bytes:
        raise DataError(
            f"the data need about {show_bytes(needed_bytes)}, free are {show_bytes(free)}",
            where=str(out.parent),
            hint="make room or choose another folder; nothing was written",
            got=free,
            wanted=needed_bytes,
        )


def _take_folder(folder: Path, *, out: Path) -> int:
    """Create and lock `folder`. The lock goes with the process, so a kill frees it."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # just published or removed by its owner
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            hint = "wait for it, or choose another folder"
            raise DataError("another process is preparing this folder now", where=str(out), hint=hint) from error
        try:
            still_there = os.path.samestat(os.fstat(lock), os.stat(folder))
        except FileNotFoundError:
            still_there = False
        if still_there:
            return lock
        os.close(lock)


def _mend_replacement(out: Path) -> None:
    replaced = _replaced_name(out)
    if replaced.exists():
        if out.exists():
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, out)


def _replaced_name(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


def _as_data_error(error: OSError, *, out: Path) -> DataError:
    if error.errno in _NO_SPACE:
        try:
            free = f"; free now: {show_bytes(shutil.disk_usage(out.parent).free)}"
        except OSError:
            free = ""
        hint = f"make room or choose another folder; what was written is removed{free}"
        return DataError(f"no space left while writing {error.filename or 'the shards'}", where=str(out), hint=hint, errno=error.errno)
    return DataError(
        f"cannot write {error.filename or 'the shards'}: {error.strerror or error}",
        where=str(out),
        hint="choose a folder that you may write",
    )
