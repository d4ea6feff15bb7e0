"""Where the next start goes on, and stages that it changes: those to come may change, those behind are what the weights were made of."""

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
    """Raises ConfigError when stages differ before the sample at which a run with `cursor` goes on."""
    changed, next_sample = first_change(old.stage, new.stage), sample_of(cursor)
    if changed is not None and changed < next_sample:
        raise ConfigError(
            f"the stages differ from sample {changed} on, and the run goes on at sample {next_sample}",
            where=where,
            hint=f"leave those that began before as they were; a new [[stage]] may begin at sample {next_sample} or later",
            got=changed,
            limit=next_sample,
        )


def refuse_other_unit(new: RunConfig, *, cursor: Cursor, where: str) -> None:
    """Raises ConfigError when a sequence does not fit into the unit that a run with `cursor` draws its samples in."""
    unit = cursor.get("unit_tokens", cursor.get("seq_len"))
    if not isinstance(unit, int) or not unit:
        return
    for stage in stages_of(new):
        if unit % stage.seq_len:
            raise ConfigError(
                f"the stage at sample {stage.first_sample} has seq_len = {stage.seq_len}, and this run draws samples in units of {unit}",
                where=where,
                hint="use a divisor of the unit; a run that will need longer sequences says so before it begins, by data.max_seq_len",
                got=stage.seq_len,
                limit=unit,
            )
    if new.data.max_seq_len > unit:
        raise ConfigError(
            f"data.max_seq_len = {new.data.max_seq_len}, and this run draws samples in units of {unit}",
            where=where,
            hint=f"a run keeps the unit that it began with: set data.max_seq_len = {unit}, or 0",
            got=new.data.max_seq_len,
            limit=unit,
        )


def base_of_next_start(run_dir: Path, *, entries: Sequence[LedgerEntry], wanted: str | None) -> Manifest | None:
    """The checkpoint from which the next start goes on: the one that was asked for, or the newest.

    None where there is none, or where it cannot be read here: the ranks have the last word in any case.
    """
    lineage, root = fold_lineage(entries), run_dir / CHECKPOINTS_NAME
    wish = open_wish(entries)
    if wanted is not None:
        asked = named_here(wanted, lineage, run_dir)
        return _manifest(root / asked.id if asked else Path(wanted))
    if wish is not None:
        return _manifest(root / wish.checkpoint)
    there = [found for name in published(root) if (found := _manifest(root / name)) is not None]
    newest, adopted = lineage.newest(), adoptable(there, lineage)
    return adopted[-1] if adopted else _manifest(root / newest.id) if newest else None


def sample_of(cursor: Cursor) -> int:
    """The first global sample that has not been trained on; 0 where the data says nothing of samples."""
    sample = cursor.get("next_sample", 0)
    return sample if isinstance(sample, int) else 0


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None
