"""Stages that a start changes: those to come may, and the ledger keeps what they were; those behind are what the weights were made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import read_manifest
from surefoot.cli.resume_from import named_here
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.records import LedgerEntry, Manifest
from surefoot.core.sections import StageSection
from surefoot.core.stages import first_change
from surefoot.observe.lineage import adoptable, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME
from surefoot.observe.wishes import open_wish


def refuse_past_stages(old: Sequence[StageSection], new: Sequence[StageSection], *, next_sample: int, where: str) -> None:
    """Raises ConfigError when stages differ before global sample `next_sample`, the first that has not been trained on."""
    changed = first_change(old, new)
    if changed is not None and changed < next_sample:
        raise ConfigError(
            f"the stages differ from sample {changed} on, and the run goes on at sample {next_sample}",
            where=where,
            hint=f"leave those that began before as they were; a new [[stage]] may begin at sample {next_sample} or later",
            got=changed,
            limit=next_sample,
        )


def next_sample_of(run_dir: Path, *, entries: Sequence[LedgerEntry], wanted: str | None) -> int:
    """The sample at which the next start goes on, for all that is known here: with the checkpoint that was asked for, or the newest one.

    0 where there is none, or where it cannot be read: the data cursor has the last word.
    """
    lineage = fold_lineage(entries)
    asked = named_here(wanted, lineage, run_dir) if wanted is not None else None
    if wanted is not None and asked is None:
        return 0
    wish, root = open_wish(entries), run_dir / CHECKPOINTS_NAME
    if asked is not None or wish is not None:
        manifest = _manifest(root / (asked.id if asked else wish.checkpoint if wish else ""))
    else:
        there = [found for name in published(root) if (found := _manifest(root / name)) is not None]
        newest, adopted = lineage.newest(), adoptable(there, lineage)
        manifest = adopted[-1] if adopted else _manifest(root / newest.id) if newest else None
    return sample_after(manifest) if manifest else 0


def sample_after(manifest: Manifest) -> int:
    """The first global sample that the weights of a checkpoint have not seen; 0 where its data says nothing of samples."""
    sample = manifest.cursor.get("next_sample", 0)
    return sample if isinstance(sample, int) else 0


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None
