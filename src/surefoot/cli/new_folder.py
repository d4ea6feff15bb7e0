"""A folder that a verb makes is whole or absent: built beside its place, and put there by one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.core.durable import fsync_dir
from surefoot.core.errors import ConfigError


def refuse_taken(place: Path, *, option: str) -> None:
    """Raises ConfigError when something is at `place`; an empty folder is nothing. `option` is what a person named it by."""
    try:
        is_taken = place.exists() and (not place.is_dir() or any(place.iterdir()))
    except OSError as error:
        raise _unusable(place, error, option=option) from error
    if is_taken:
        raise ConfigError("there is something already", where=str(place), hint=f"give a new folder with {option}")


@contextmanager
def new_folder(place: Path, *, option: str) -> Iterator[Path]:
    """Where to build it, on the same disk as `place`. Raises ConfigError when no folder can be made there."""
    building = place.absolute().with_name(f".{place.absolute().name}.building")
    shutil.rmtree(building, ignore_errors=True)
    try:
        try:
            building.mkdir(parents=True)
        except OSError as error:
            raise _unusable(place, error, option=option) from error
        yield building
        if place.is_dir():
            place.rmdir()  # it is empty
        os.rename(building, place)
        fsync_dir(place.absolute().parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _unusable(place: Path, error: OSError, *, option: str) -> ConfigError:
    what = f"no folder can be made there: {error.strerror}"
    return ConfigError(what, where=str(place), hint=f"give a place that can be written to with {option}")
