"""Which coordinator of a run is the one: the newest.

Each takes the next epoch, whose file can be made only once; an older one that sees a newer epoch ends itself. Then it says where it is
heard: `<run>/coordinator.json`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path

from surefoot.core import strict_json
from surefoot.core.durable import fsync_dir
from surefoot.launch.coordinator_wire import ADDRESS_NAME, Contact

FOLDER = "coordinator"
JOURNAL_NAME = "journal.jsonl"
_PREFIX = "epoch-"
_NUM_TRIES = 100


def journal_path(run_dir: Path) -> Path:
    return run_dir / FOLDER / JOURNAL_NAME


def newest_epoch(run_dir: Path) -> int:
    """0 where there has been none."""
    numbers = [path.name.removeprefix(_PREFIX) for path in (run_dir / FOLDER).glob(f"{_PREFIX}*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def claim_epoch(run_dir: Path) -> int:
    """Take the next epoch. From now on every older coordinator refuses to write."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(_NUM_TRIES):
        epoch = newest_epoch(run_dir) + 1
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / f"{_PREFIX}{epoch}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
            fsync_dir(folder)
            for old in folder.glob(f"{_PREFIX}*"):
                if old.name.removeprefix(_PREFIX).isdigit() and int(old.name.removeprefix(_PREFIX)) < epoch - 1:
                    old.unlink(missing_ok=True)
            return epoch
    raise OSError(f"{folder}: no epoch could be taken in {_NUM_TRIES} tries")


def is_newest(run_dir: Path, epoch: int) -> bool:
    """One look at one name: cheap enough before every write."""
    return not (run_dir / FOLDER / f"{_PREFIX}{epoch + 1}").exists() and newest_epoch(run_dir) <= epoch


def write_contact(run_dir: Path, contact: Contact) -> None:
    """Whole or not at all, and for its owner's eyes alone from its first byte: the token is in it."""
    path = run_dir / ADDRESS_NAME
    temporary = path.with_name(f".{path.name}.{contact.epoch}.tmp")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(strict_json.dumps({"format_version": 1, **asdict(contact)}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(run_dir)
