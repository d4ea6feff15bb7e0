"""Stages that a start changes: those to come may, and the ledger keeps what they were; those behind are what the weights were made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import read_manifest
from surefoot.cli.resume_from import named_here
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.records import LedgerEntry, Manifest
from surefoot.core.sections import RunConfig
from surefoot.core.stages import first_change, stages_of
from surefoot.observe.lineage import adoptable, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME
from surefoot.observe.wishes import open_wish

Cursor = Mapping[str, object]


def refuse_stage_change(old: RunConfig, new: RunConfig, *, cursor: Cursor, where: str) -> None:
    """Raises ConfigError when stages differ before the sample at which a run with `cursor` goes on, or one does not fit into its unit."""
    changed, next_sample = first_change(old.stage, new.stage), sample_of(cursor)
    if changed is not None and changed < next_sample:
        raise ConfigError(
            f"the stages differ from sample {changed} on, and the run goes on at sample {next_sample}",
            where=where,
            hint=f"leave those that began before as they were; a new [[stage]] may begin at sample {next_sample} or later",
            got=changed,
            limit=next_sample,
        )
    unit = cursor.get("unit_tokens")
    for stage in stages_of(new):
        if isinstance(unit, int) and unit and unit % stage.seq_len:
            raise ConfigError(
                f"the stage at sample {stage.first_sample} has seq_len = {stage.seq_len}, and this run draws samples in units of {unit}",
                where=where,
                hint="use a divisor of the unit; a run that will need longer sequences says so before it begins, by data.max_seq_len",
                got=stage.seq_len,
                limit=unit,
            )


def cursor_of_next_start(run_dir: Path, *, entries: Sequence[LedgerEntry], wanted: str | None) -> Cursor:
    """That of the checkpoint from which the next start goes on: the one that was asked for, or the newest.

    Empty where there is none, or where it cannot be read here: the data has the last word in any case.
    """
    lineage, root = fold_lineage(entries), run_dir / CHECKPOINTS_NAME
    asked = named_here(wanted, lineage, run_dir) if wanted is not None else None
    wish = open_wish(entries)
    if wanted is not None or wish is not None:
        manifest = _manifest(root / asked.id) if asked else _manifest(root / wish.checkpoint) if wish and wanted is None else None
    else:
        there = [found for name in published(root) if (found := _manifest(root / name)) is not None]
        newest, adopted = lineage.newest(), adoptable(there, lineage)
        manifest = adopted[-1] if adopted else _manifest(root / newest.id) if newest else None
    return manifest.cursor if manifest else {}


def sample_of(cursor: Cursor) -> int:
    """The first global sample that has not been trained on; 0 where the data says nothing of samples."""
    sample = cursor.get("next_sample", 0)
    return sample if isinstance(sample, int) else 0


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None
