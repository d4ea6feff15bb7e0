"""Which checkpoints may go: a pure decision with a reason each, and the deleting itself."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.core.durable import fsync_dir
from surefoot.core.records import CheckpointRef

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.s\d+-a\d+(?:-r\d+)?\.g(\d+)\.(?:writing|retired)")


@dataclass(frozen=True, slots=True)
class Retirement:
    id: str
    reason: str


def retire(refs: Sequence[CheckpointRef], *, keep_last: int, milestone_steps: int, boundaries: Collection[int] = ()) -> list[Retirement]:
    """Which of `refs` (published ones, in the order of their commits, the newest last) are no longer needed.

    A good one is neither suspect nor abandoned. Kept: the newest `keep_last` good ones; good ones at a multiple of `milestone_steps`
    (0: none) or at a step of `boundaries`; and the newest of all. Suspect and abandoned ones never count: they are ordinary old ones, which
    go once `keep_last` good ones were committed after them. So nothing goes before there are `keep_last` good ones, and one always stays.
    """
    good = [index for index, ref in enumerate(refs) if not ref.suspect and not ref.abandoned]
    retired = []
    for index, ref in enumerate(refs[:-1]):
        num_newer = sum(1 for other in good if other > index)
        if num_newer < max(keep_last, 1):
            continue
        milestone = ref.step in boundaries or (milestone_steps > 0 and ref.step > 0 and ref.step % milestone_steps == 0)
        if index in good and milestone:
            continue
        state = "suspect, " if ref.suspect else "abandoned, " if ref.abandoned else ""
        retired.append(Retirement(ref.id, f"{state}{num_newer} newer good ones, keep_last {keep_last}"))
    return retired


def remove(root: Path, checkpoint: str, *, generation: int) -> str | None:
    """Un-publish, then delete. None when it is gone, else the reason why not; what is left is swept by a later generation."""
    retired = root / f".{checkpoint}.g{generation}.retired"
    try:
        os.rename(root / checkpoint, retired)
        fsync_dir(root)
        shutil.rmtree(retired)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", checkpoint, error)
        return str(error)
    return None


def sweep(root: Path, *, generation: int) -> list[str]:
    """Delete what dead processes of generations before `generation` left half written or half deleted; the names that are gone."""
    swept = []
    for folder in sorted(root.glob(".*")) if root.is_dir() else ():
        match = _LEFTOVER.fullmatch(folder.name)
        if match is None or int(match[1]) >= generation:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            logger.warning("leftover %s could not be removed", folder)
        else:
            swept.append(folder.name)
    return swept
