"""A clean process that takes a stock DCP folder into a run: `python -m surefoot.cli.foreign_import JOB`.

It builds the run's own model and optimizer, loads the folder into them, and saves that as a checkpoint of ours. What a foreign folder does
not say comes from the config: the position in the data is that of the step, random streams are those of a start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint.clean import begin_clean, end_clean, leave_result
from surefoot.checkpoint.commit import save
from surefoot.checkpoint.dcp_import import import_dcp
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.transplant import free_id
from surefoot.config import load_config
from surefoot.core.clock import SystemClock
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.layouts import topology
from surefoot.core.records import Manifest
from surefoot.core.sections import ParallelSection, RunConfig
from surefoot.core.version import __version__
from surefoot.guard.environment import describe_environment
from surefoot.guard.state import TrainState
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME
from surefoot.tensors.world import single_world
from surefoot.train.build import build_parts, make_deterministic


def main() -> None:
    job = begin_clean()
    torch.set_num_threads(1)
    try:
        result: dict[str, Any] = bring(job)
    except SurefootError as error:
        result = error.as_json()
    leave_result(job, result)
    end_clean()


def bring(job: Mapping[str, Any]) -> dict[str, Any]:
    """Local. {id, notes, left_out, tied}: the checkpoint is published, and the ledger does not know it yet."""
    run_dir = Path(job["run_dir"])
    config = replace(load_config(run_dir / CONFIG_NAME).config, parallel=ParallelSection())
    make_deterministic(config.numerics)
    world = single_world()
    parts = build_parts(config, world)
    imported = import_dcp(Path(job["path"]), state=collect(parts.cut.module, parts.optimizer, for_load=True), world=world)
    step = job["step"] if job["step"] is not None else imported.step
    if step is None:
        raise ConfigError("its optimizer counts no steps", where=job["path"], hint="say which step it is: --step N")
    cursor = parts.data.cursor_after(step)
    parts.data.seek(cursor)
    tokens = int(cursor["consumed_tokens"])
    state = TrainState(parts.cut.module, parts.optimizer, parts.data, step=step, attempt=0, tokens=tokens, updates=step)
    root = run_dir / CHECKPOINTS_NAME
    name = free_id(step, taken=lambda name: name in job["taken"] or (root / name).exists())
    environment = describe_environment(parts.cut.module, parts.optimizer, world)
    draft = _draft(name, state, config, job, data_hash=parts.data.data_hash, environment=environment)
    manifest = save(root, draft, state=collect(parts.cut.module, parts.optimizer), extras=state.extras(), world=world)
    return {"id": manifest.id, "notes": imported.notes, "left_out": imported.left_out, "tied": imported.tied}


def _draft(
    name: str, state: TrainState, config: RunConfig, job: Mapping[str, Any], *, data_hash: str, environment: Mapping[str, object]
) -> Manifest:
    return Manifest(
        format_version=0,
        id=name,
        run=config.run.name,
        step=state.step,
        attempt=0,
        generation=job["generation"],
        parent=None,
        time_utc=SystemClock().utc(),
        loss=None,
        tokens=state.tokens,
        state_digest="",
        config_hashes=section_hashes(config) | code_hashes(config),
        data_hash=data_hash,
        code_version=__version__,
        topology=topology(ParallelSection()),
        environment=environment,
        ledger_seq=job["ledger_seq"],
        ledger_hash=job["ledger_hash"],
        cursor={},
        files=(),
        tensors=(),
    )


if __name__ == "__main__":
    main()
