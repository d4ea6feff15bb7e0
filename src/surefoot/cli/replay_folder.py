"""The folder that a replay computes in: config, decisions and one checkpoint of another run, and nothing that reaches back into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from surefoot.config import LoadedConfig, load_config, resolved_toml
from surefoot.core import strict_json
from surefoot.core.blocking import next_head
from surefoot.core.clock import SystemClock
from surefoot.core.durable import write_atomic
from surefoot.core.errors import CheckpointError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.layouts import topology
from surefoot.core.records import CheckpointRef, LedgerEntry
from surefoot.guard.script import ReplayTask
from surefoot.observe.blocks import fold_blocks, taken_fields
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME

TASK_NAME: Final = "replay.json"

_NEVER: Final = 10**15
_OFF: Final = (
    f"checkpoint.interval_steps={_NEVER}",
    "checkpoint.interval_s=0",
    "checkpoint.keep_steps=[]",
    'checkpoint.tiers=["disk"]',
    "checkpoint.prove=false",
    "monitor.probe_interval_steps=0",
    "monitor.audit_interval_steps=0",
    "canary.interval_steps=0",
    "launch.max_restarts=0",
)
"""What a run does beside its steps. None of it is hashed, and none of it changes a bit of them."""


def config_for_replay(run_dir: Path, folder: Path, *, facts: Mapping[str, Any]) -> LoadedConfig:
    """The run's config, in the layout that `facts` (of the attempt that is repeated) speak of, with all that is not a step switched off."""
    was: Mapping[str, int] = facts.get("topology") or {}
    now = topology(load_config(run_dir / CONFIG_NAME).config.parallel)
    layout = [f"parallel.{axis}={size}" for axis, size in was.items() if axis in now and now[axis] != size]
    return load_config(run_dir / CONFIG_NAME, (f"run.dir={folder.absolute()}", *_OFF, *layout))


def lay_out(
    folder: Path,
    loaded: LoadedConfig,
    task: ReplayTask,
    *,
    run_dir: Path,
    start: CheckpointRef | None,
    entries: Sequence[LedgerEntry],
    without: Collection[int],
) -> Ledger:
    """Fill the new `folder`: `start` as the only checkpoint (None: from step 0), the log of what is left out but for the entries `without`.

    Raises CheckpointError when the checkpoint is gone.
    """
    if start is not None:
        _bring(run_dir / CHECKPOINTS_NAME / start.id, folder / CHECKPOINTS_NAME / start.id)
    write_atomic(folder / CONFIG_NAME, resolved_toml(loaded, folder.absolute()))
    write_atomic(folder / TASK_NAME, strict_json.dumps(task.to_json()))
    ledger = Ledger(folder / LEDGER_NAME, clock=SystemClock(), by="replay")
    hashes = section_hashes(loaded.config) | code_hashes(loaded.config)
    _tell(ledger, Event.RUN_CREATED, {"config_hashes": hashes})
    for entry in entries:
        if entry.event == Event.CONFIG_ACCEPTED:
            _tell(ledger, Event.CONFIG_ACCEPTED, entry.fields, reason=entry.reason)
    for fields in _blocks(entries, without=without):
        _tell(ledger, Event.BLOCK_TAKEN, fields)
    if start is not None:
        _tell(ledger, Event.CHECKPOINT_IMPORTED, asdict(start) | {"parent": None}, step=start.step, attempt=start.attempt)
    return ledger


def seen_path(folder: Path, *, rank: int) -> Path:
    """Where a rank says what it saw."""
    return folder / f"seen-{rank}.json"


def _tell(ledger: Ledger, event: Event, fields: Mapping[str, object], *, reason: str = "", step: int = 0, attempt: int = 0) -> None:
    ledger.append(event, generation=0, attempt=attempt, step=step, rule="replay", reason=reason, fields=fields)


def _blocks(entries: Sequence[LedgerEntry], *, without: Collection[int]) -> Iterator[dict[str, object]]:
    """The log chained anew. Each entry holds from the sample it held from, whatever is missing before it."""
    head, kept = ZERO_HASH, [taken for taken in fold_blocks(entries).taken if taken.seq not in without]
    for count, taken in enumerate(kept, start=1):
        head = next_head(head, taken.block)
        yield taken_fields(taken.block, asked=None, count=count, head=head)


def _bring(source: Path, target: Path) -> None:
    """Its files linked, so that a live run may retire it meanwhile; on another disk a link to the folder, which is only read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.mkdir()
        for file in source.iterdir():
            os.link(file.resolve(), target / file.name)
    except FileNotFoundError as error:
        raise CheckpointError("the checkpoint is gone", where=str(source), hint="it was retired or deleted") from error
    except OSError:
        shutil.rmtree(target)
        target.symlink_to(source.absolute(), target_is_directory=True)
