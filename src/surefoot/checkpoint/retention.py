"""Which checkpoints may go: a pure decision with a reason each, and the deleting itself.

Whoever holds the run's lock calls in this order: ledger `checkpoint.committed`; read the new one back and ledger `checkpoint.verified` (or
`checkpoint.damaged`); fold the lineage; `retire` its refs that are not retired yet; ledger `checkpoint.retired` for each; `remove` it. A
process that dies anywhere in between leaves nothing wrong: what is ledgered as retired and still there is removed at the next start.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from surefoot.checkpoint.held import is_held
from surefoot.core.durable import fsync_dir
from surefoot.core.records import CheckpointRef, Rung
from surefoot.core.sections import RunConfig

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.s\d+-a\d+(?:-r\d+)?\.g(\d+)\.(?:writing|retired)")


@dataclass(frozen=True, slots=True)
class Retirement:
    id: str
    reason: str


def retire(
    refs: Sequence[CheckpointRef], *, keep_last: int, milestone_steps: int, boundaries: Collection[int] = (), cover_steps: int = 0
) -> list[Retirement]:
    """Which of `refs` (published ones, in the order of their commits, the newest last) are no longer needed.

    Only a *good* one counts: read back, and neither damaged, suspect nor abandoned. Kept are the newest of all, the newest `keep_last` good
    ones, the newest good proven one, and of the older good ones: multiples of `milestone_steps` (0: none), the last one at or before each
    step of `boundaries`, and so many that up to `cover_steps` before the newest there is always one at most twice as far back as asked.
    All others go, with the reason, once `keep_last` good ones were committed after them. So nothing goes before a newer one is known to be
    readable, one good one always stays, and a proven one once there is one.
    """
    good = [index for index, ref in enumerate(refs) if is_good(ref)]
    if not good:
        return []
    newest_step = refs[good[-1]].step
    num_kept = max(keep_last, 1)
    kept = {len(refs) - 1, *good[-num_kept:]}
    kept.update([index for index in good if refs[index].rung is Rung.PROVEN][-1:])
    kept.update(index for index in good if milestone_steps > 0 and refs[index].step > 0 and refs[index].step % milestone_steps == 0)
    for boundary in boundaries:
        if boundary <= newest_step:
            kept.update([index for index in good if refs[index].step <= boundary][-1:])
    kept |= _covering(refs, good, kept=kept, cover_steps=cover_steps)
    retired = []
    for index, ref in enumerate(refs):
        num_newer = sum(1 for other in good if other > index)
        if index not in kept and num_newer >= num_kept:
            retired.append(Retirement(ref.id, _reason(ref, num_newer=num_newer, keep_last=keep_last)))
    return retired


def is_good(ref: CheckpointRef) -> bool:
    """Whether it counts as one that could be gone back to."""
    return ref.read_back and not (ref.damaged or ref.suspect or ref.abandoned)


def boundaries(config: RunConfig) -> frozenset[int]:
    """Steps after which the run is another one: the warm-up ends, the decay begins, the batch grows, a branch may. Not 0, nor the end."""
    num_steps = config.train.num_steps
    steps = {config.schedule.warmup_steps, *_ramp_steps(config.train.batch_ramp), *config.checkpoint.keep_steps}
    if config.schedule.kind == "wsd":
        length = config.schedule.decay_steps if config.schedule.decay_steps >= 0 else max(1, num_steps // 5)
        steps.add(num_steps - length)
    return frozenset(step for step in steps if 0 < step < num_steps)


def remove(root: Path, checkpoint: str, *, generation: int) -> str | None:
    """Un-publish, then delete. None when it is gone, else the reason why not; what is left is swept by a later generation.

    The rename is made durable before the first file goes: no crash leaves a published folder with a part of its files. Never raises for
    what a disk does, so the next one is removed all the same.
    """
    retired = root / f".{checkpoint}.g{generation}.retired"
    try:
        if retired.exists():
            shutil.rmtree(retired)  # an earlier removal was cut off, and the checkpoint came back under its name
        os.rename(root / checkpoint, retired)
        fsync_dir(root)
        shutil.rmtree(retired)
    except OSError as error:
        logger.warning("checkpoint %s could not be removed: %s", checkpoint, error)
        return str(error)
    return None


def sweep(root: Path, *, generation: int) -> list[str]:
    """Delete what dead processes of generations before `generation` left half written or half deleted; the names that are gone.

    Only folders with a name that surefoot gives: whatever else lies there, however old, is somebody's. So is one that a process holds, as a
    fetch does whose folder belongs to no generation.
    """
    swept = []
    for folder in sorted(root.glob(".*")) if root.is_dir() else ():
        match = _LEFTOVER.fullmatch(folder.name)
        if match is None or int(match[1]) >= generation or folder.is_symlink() or not folder.is_dir() or is_held(folder):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            logger.warning("leftover %s could not be removed", folder)
        else:
            swept.append(folder.name)
    return swept


def _covering(refs: Sequence[CheckpointRef], good: Sequence[int], *, kept: Collection[int], cover_steps: int) -> set[int]:
    """Of the good ones, those without which a way back of up to `cover_steps` would be more than twice as long as it has to be.

    From new to old: one may go when the next older is at most twice as far back as the next newer that stays, or when that newer one is
    already beyond the cover. Distances grow together, so what may go now stays unneeded, and the same steps are kept whenever it is asked.
    """
    if cover_steps <= 0:
        return set()
    newest_step = refs[good[-1]].step
    distances = [max(0, newest_step - refs[index].step) for index in good]
    needed: set[int] = set()
    newer = 0
    for position in range(len(good) - 1, -1, -1):
        index = good[position]
        is_needed = newer < cover_steps and (position == 0 or distances[position - 1] > 2 * newer)
        if is_needed:
            needed.add(index)
        if is_needed or index in kept:
            newer = distances[position]
    return needed


def _reason(ref: CheckpointRef, *, num_newer: int, keep_last: int) -> str:
    states = {"suspect": ref.suspect, "damaged": ref.damaged, "abandoned": ref.abandoned, "never read back": not ref.read_back}
    found = "".join(f"{state}, " for state, holds in states.items() if holds)
    return f"{found}{num_newer} newer good ones, keep_last {keep_last}"


def _ramp_steps(ramp: Sequence[tuple[int, int]]) -> list[int]:
    """Steps finished before each change of the batch. An entry holds from the first step that begins at or after its sample."""
    steps = []
    step, sample = 0, 0
    for (_, batch), (next_first, _) in pairwise(ramp):
        num_steps = max(0, -(-(next_first - sample) // batch))
        step, sample = step + num_steps, sample + num_steps * batch
        steps.append(step)
    return steps
