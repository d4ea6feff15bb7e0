"""`surefoot plan --from RUN`: the plan of the rest of a run, from its config, its metrics and its ledger. Never writes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from surefoot.config import load_config
from surefoot.core import strict_json
from surefoot.core.errors import ConfigError, SurefootError
from surefoot.core.events import Event
from surefoot.core.model_sizes import ModelSizes, resolve_sizes
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.core.stages import refuse_other_shapes
from surefoot.observe.interruptions import fold_interruptions
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.metrics import read_steps
from surefoot.observe.run_dir import CONFIG_NAME, require_run
from surefoot.plan.hardware import accelerator as accelerator_of
from surefoot.plan.request import Cluster
from surefoot.plan.rerun.answer import answer_of, page_of
from surefoot.plan.rerun.measured_run import pace_of, restarts_of
from surefoot.plan.rerun.replan import RunFacts, replan
from surefoot.plan.sizing.laws import Law


def plan_from_run(run_dir: Path, cluster: Cluster, *, law: Law, json_output: bool) -> None:
    """Raises ConfigError for what is no run of ours or has measured nothing yet."""
    facts = facts_of(run_dir)
    made = replan(facts, cluster, law=law)
    typer.echo(strict_json.dumps(answer_of(made)) if json_output else page_of(made))


def accelerator_of_run(run_dir: Path) -> str:
    """`cpu`, or what the name of its device begins with."""
    require_run(run_dir)
    for entry in reversed(_entries(run_dir)):
        if entry.event == Event.ATTEMPT_STARTED:
            environment = entry.fields.get("environment")
            device = str(environment.get("device", "")) if isinstance(environment, dict) else ""
            return "cpu" if device == "cpu" else _named(device)
    raise ConfigError("has not trained yet", where=str(run_dir), hint="plan again when it has finished some steps")


def _named(device: str) -> str:
    """'NVIDIA H100 80GB HBM3' -> h100."""
    from surefoot.plan.hardware import ACCELERATORS

    words = device.lower().replace("-", " ").split()
    for name in sorted(ACCELERATORS, key=len, reverse=True):
        if set(name.split("-")) <= set(words):
            return name
    raise ConfigError(f"its device {device!r} is not known", where="--accelerator", hint="name one, or a TOML that describes it")


def facts_of(run_dir: Path) -> RunFacts:
    require_run(run_dir)
    config = load_config(run_dir / CONFIG_NAME).config
    refuse_other_shapes(config, where=str(run_dir))
    rows = read_steps(run_dir).to_pylist()
    pace = pace_of(rows)
    if pace is None:
        raise ConfigError("has not finished a step yet", where=str(run_dir), hint="plan again when it has finished some")
    entries = _entries(run_dir)
    seen = fold_interruptions(entries)
    return RunFacts(
        config=config,
        sizes=_sizes(config),
        pace=pace,
        restarts=restarts_of(rows),
        step=int(rows[-1]["step"]),
        num_failures=seen.num_failures,
        observed_s=seen.observed_s,
        write_s=_write_s(entries),
        loss=rows[-1]["loss"],
    )


def _entries(run_dir: Path) -> Sequence[LedgerEntry]:
    try:
        return read_ledger(run_dir / LEDGER_NAME)
    except SurefootError:
        return read_ledger(run_dir / LEDGER_NAME, up_to_damage=True)


def _write_s(entries: Sequence[LedgerEntry]) -> float | None:
    times = [entry.fields.get("upload_s") for entry in entries if entry.event == Event.CHECKPOINT_COMMITTED]
    measured = [float(seconds) for seconds in times if isinstance(seconds, int | float)]
    return statistics.median(measured) if measured else None


def _sizes(config: RunConfig) -> ModelSizes:
    if config.model.factory:
        hint = "surefoot knows what its own models cost; plan this one by hand"
        raise ConfigError("its model is made by model.factory", where="[model] factory", hint=hint)
    if config.model.vocab_size:
        return resolve_sizes(config.model, config.model.vocab_size)
    from surefoot.data.manifest import load_manifest

    return resolve_sizes(config.model, load_manifest(Path(config.data.path)).tokenizer.vocab_size)


def cluster_for(run_dir: Path, cluster: Cluster, *, is_named: bool) -> Cluster:
    """With the accelerator that the run was on, unless one was named."""
    return cluster if is_named else replace(cluster, accelerator=accelerator_of(accelerator_of_run(run_dir)))
