"""A folder that appears whole or not at all: built under a hidden name beside its place, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.core.durable import fsync_dir
from surefoot.core.errors import DataError
from surefoot.core.units import show_bytes
from surefoot.data.journal import holds_work

logger = logging.getLogger(__name__)

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR})
_DEVICE_FAILED = frozenset({errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT})


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
def folder_in_making(out: Path, *, goes_on: bool = True) -> Iterator[Path]:
    """A hidden folder beside `out`, for this process alone; what it holds is what an interrupted call left in it.

    Success removes it, and so does a failure before anything was noted. Work that was noted stays whatever happens, so that the next call
    can go on; not with `goes_on` false, for work that begins anew each time. Raises DataError when another live process is at it, when the
    place cannot be written or the device fails, and, naming the bytes that are free, when the disk is full.
    """
    folder = out.with_name(f".{out.name}.preparing")
    try:
        new_parents = [parent for parent in out.parents if not parent.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _take_folder(folder, out=out)
    except OSError as error:
        raise _as_data_error(error, out=out, stays="nothing was written") from error
    is_kept = False
    try:
        with writing():
            _mend_replacement(out)
        yield folder
    except BaseException as failure:
        is_kept = goes_on and holds_work(folder)
        stays = f"the same command goes on from what is finished; to give that up, delete {folder}"
        if isinstance(failure, Unwritable):
            raise _as_data_error(failure.error, out=out, stays=stays if is_kept else "what was written is removed") from failure.error
        if is_kept:
            logger.warning("%s", stays)
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # parents made here go again, unless something was published in them
            for parent in new_parents:
                parent.rmdir()


def publish(folder: Path, *, out: Path) -> None:
    """Rename `folder` to `out`, in place of what is there. A kill between the two renames is mended by the next call, a failure here."""
    with writing():
        fsync_dir(folder)
        replaced = _replaced_name(out)
        if out.exists():
            os.rename(out, replaced)
        try:
            os.rename(folder, out)
        except OSError:
            _mend_replacement(out)
            raise
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
            hint="make room or choose another folder; no token was written",
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


def _as_data_error(error: OSError, *, out: Path, stays: str) -> DataError:
    """What failed, and what to do about it. `stays` says what becomes of the work so far."""
    file, why = error.filename or "the shards", error.strerror or str(error)
    if error.errno in _NO_SPACE:
        what, cure = f"no space left while writing {file}", f"make room{_free(out)}"
    elif error.errno in _NOT_ALLOWED:
        what, cure = f"cannot write {file}: {why}", "choose a folder that you may write"
    elif error.errno in _DEVICE_FAILED:
        what, cure = f"the device failed at {file}: {why}", "look into the system's log, and mend the disk or what leads to it"
    else:
        what, cure = f"cannot write {file}: {why}", "mend what the system names"
    return DataError(what, where=str(out), hint=f"{cure}; {stays}", errno=error.errno)


def _free(out: Path) -> str:
    try:
        return f", free are {show_bytes(shutil.disk_usage(out.parent).free)}"
    except OSError:
        return ""
