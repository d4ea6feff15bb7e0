"""A clean process that builds the model of a run and restores a checkpoint into it: `python -m surefoot.cli.model_proof JOB`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint.clean import begin_clean, end_clean, leave_result
from surefoot.checkpoint.restore import Loaded, load
from surefoot.checkpoint.state import collect
from surefoot.config import load_config
from surefoot.core.errors import CheckpointError, ConfigError, DataError
from surefoot.core.records import Problem
from surefoot.core.sections import ParallelSection, RunConfig
from surefoot.guard.state import TrainState
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.tensors.world import single_world
from surefoot.train.build import build_parts, make_deterministic
from surefoot.train.step import Parts


def main() -> None:
    job = begin_clean()
    torch.set_num_threads(1)
    leave_result(job, prove_model(Path(job["run_dir"]), Path(job["path"])))
    end_clean()


def prove_model(run_dir: Path, path: Path) -> dict[str, Any]:
    """Local. {skipped, canary, problems}: one rank holds the whole model; data that is not here is no fault of the checkpoint."""
    config = load_config(run_dir / CONFIG_NAME).config
    config = replace(config, parallel=ParallelSection())
    make_deterministic(config.numerics)
    world = single_world()
    try:
        parts = build_parts(config, world)
    except (ConfigError, DataError) as error:
        return _answer(skipped=str(error))
    try:
        loaded = load(path, state=collect(parts.cut.module, parts.optimizer, for_load=True), world=world)
        TrainState(parts.cut.module, parts.optimizer, parts.data).take_extras(dict(loaded.extras))
    except CheckpointError as error:
        file, tensor, kind = (str(error.values.get(name, "")) for name in ("file", "tensor", "kind"))
        return _answer(problem=Problem(kind=kind or "unreadable", file=file, tensor=tensor or error.where, detail=error.what))
    except DataError as error:
        return _answer(skipped=str(error))
    return _sing(parts, loaded, config=config)


def _sing(parts: Parts, loaded: Loaded, *, config: RunConfig) -> dict[str, Any]:
    """The held-out loss that was saved with it, against that of the model that was restored here."""
    saved = loaded.extras.get("canary")
    held_out = parts.evaluation.held_out() if isinstance(saved, float) else None
    if not isinstance(saved, float) or held_out is None:
        return _answer()
    relative = abs(held_out.loss - saved) / max(abs(saved), 1e-12)
    canary = {"saved": saved, "found": held_out.loss, "relative": relative}
    if relative <= config.checkpoint.replay_tolerance:
        return _answer(canary=canary)
    limit = config.checkpoint.replay_tolerance
    detail = f"held-out loss {held_out.loss!r}, {saved!r} was saved: relative difference {relative:.2g}, limit {limit:g}"
    return _answer(canary=canary, problem=Problem(kind="wrong-loss", detail=detail))


def _answer(*, skipped: str = "", canary: Mapping[str, float] | None = None, problem: Problem | None = None) -> dict[str, Any]:
    return {"skipped": skipped, "canary": canary, "problems": [asdict(problem)] if problem else []}


if __name__ == "__main__":
    main()
