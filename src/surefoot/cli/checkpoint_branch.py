"""`surefoot checkpoint branch`: a run that begins at a checkpoint of another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from surefoot.checkpoint.manifest import parse_id, read_manifest
from surefoot.cli.checkpoint_find import SCHEMA_VERSION, Found, find, lineage_of, manifest_or_none
from surefoot.cli.checkpoint_import import Origin, take_in
from surefoot.cli.ledgering import tell
from surefoot.cli.new_folder import new_folder, refuse_taken
from surefoot.cli.stage_changes import refuse_stage_change
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.identity import FIXED
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.records import CheckpointRef, Manifest
from surefoot.core.sections import ModelSection, RunConfig
from surefoot.observe.run_dir import CHECKPOINTS_NAME, CONFIG_NAME, require_run


def branch_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The run to branch from.")],
    new_dir: Annotated[Path, typer.Option("--dir", metavar="NEW", help="The folder of the new run.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="for example train.num_steps=6000")] = None,
    from_: Annotated[str, typer.Option("--from", metavar="STEP|ID", help="Which checkpoint; its newest when not given.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Begin a new run at a checkpoint of another one: a cooldown, another batch, another rate. `surefoot train NEW` goes on.

    Example: surefoot checkpoint branch runs/quickstart --from 500 --dir runs/cooldown train.num_steps=600 schedule.decay_steps=100
    """
    require_run(run_dir)
    if not (run_dir / CONFIG_NAME).is_file():
        raise ConfigError(f"the run has no {CONFIG_NAME} to begin from", where=str(run_dir), hint="`checkpoint import` needs none")
    refuse_taken(new_dir, option="--dir")
    found = _chosen(run_dir, from_)
    new = _new_run(found, run_dir, new_dir, tuple(overrides or ()))
    if json_output:
        answer = {"schema_version": SCHEMA_VERSION, "run": str(new_dir), "id": new.id, "step": new.step, "state_digest": new.state_digest}
        typer.echo(strict_json.dumps(answer | {"from": found.id}))
        return
    typer.echo(f"{new_dir} begins at step {new.step}, from {found.id} of {run_dir}\ngo on with it: surefoot train {new_dir}")


def _chosen(run_dir: Path, wanted: str) -> Found:
    """By step: the newest one there on the present line that is not suspect. By id: whichever is there."""
    if not wanted:
        return find(run_dir)
    lineage, root = lineage_of(run_dir), run_dir / CHECKPOINTS_NAME
    there = [ref for ref in lineage.refs if manifest_or_none(root / ref.id) is not None]
    if wanted.isdecimal():
        fitting = [ref for ref in there if ref.step == int(wanted) and not ref.abandoned and not ref.suspect]
    else:
        fitting = [ref for ref in there if ref.id == wanted]
    if not fitting:
        what = f"no checkpoint of step {wanted} on the present line" if wanted.isdecimal() else f"no checkpoint {wanted!r}"
        raise ConfigError(
            what,
            where=str(run_dir),
            hint=f"there are {_listed(there) or 'none'}"
            if parse_id(wanted) or wanted.isdecimal()
            else "--from takes a step such as 500, or an id such as s500-a1",
        )
    return find(root / fitting[-1].id)


def _listed(refs: Sequence[CheckpointRef]) -> str:
    shown = [ref.id for ref in refs[-8:]]
    return ", ".join(["...", *shown] if len(refs) > len(shown) else shown)


def _new_run(found: Found, run_dir: Path, new_dir: Path, overrides: tuple[str, ...]) -> Manifest:
    """Built beside its place and put there by one rename: a branch is whole or absent."""
    from surefoot.config import load_config, resolved_toml
    from surefoot.core.identity import code_hashes, diff_sections, section_hashes

    parent = load_config(run_dir / CONFIG_NAME)
    own = (f"run.dir={new_dir.absolute()}", f"run.name={new_dir.name}")
    loaded = load_config(run_dir / CONFIG_NAME, (*own, *overrides))
    if Path(loaded.config.run.dir) != new_dir.absolute():
        raise ConfigError("the folder of the branch is given by --dir", where="run.dir", hint="leave run.dir out of the overrides")
    source = read_manifest(found.folder)
    changes = diff_sections(parent.config, loaded.config)
    _refuse_what_does_not_fit(changes, step=source.step, num_steps=loaded.config.train.num_steps)
    refuse_stage_change(parent.config, loaded.config, cursor=source.cursor, where="overrides")
    _refuse_other_shape(changes, parent.config, loaded.config)
    _refuse_other_parametrization(parent.config.model, loaded.config.model)
    hashes = section_hashes(loaded.config) | code_hashes(loaded.config)
    with new_folder(new_dir, option="--dir") as building:
        write_atomic(building / CONFIG_NAME, resolved_toml(loaded, new_dir.absolute()))

        def note(origin: Origin) -> None:
            tell(building, Event.RUN_CREATED, fields={"config_hashes": hashes})
            fields: dict[str, object] = {"from_run": origin.run, "checkpoint": origin.checkpoint, "state_digest": source.state_digest}
            fields |= {
                "step": source.step,
                "manifest": origin.manifest_hash,
                "ledger_seq": source.ledger_seq,
                "ledger_hash": source.ledger_hash,
            }
            tell(building, Event.RUN_BRANCHED, rule="checkpoint branch", reason=" ".join(overrides), fields=fields)
            for section in (name for name in hashes if source.config_hashes.get(name) != hashes[name]):
                words = ", ".join(f"[{where}] {key} was {old!r}, is {now!r}" for where, key, old, now in changes if where == section)
                fields = {"section": section, "hash": hashes[section]}
                tell(building, Event.CONFIG_ACCEPTED, rule="checkpoint branch", reason=words, fields=fields)

        new = take_in(found, building, run=loaded.config.run.name, note=note)
    return new


def _refuse_other_shape(changes: Sequence[tuple[str, str, object, object]], old: RunConfig, new: RunConfig) -> None:
    """The vocabulary is the checkpoint's: what it is decides nothing here, so any size does for the comparison."""
    shaped = [f"[{section}] {key} was {before!r}, is {now!r}" for section, key, before, now in changes if section == "model"]
    if not shaped or old.model.factory or new.model.factory:
        return
    vocab_size = old.model.vocab_size or 1 << 10
    if resolve_sizes(old.model, vocab_size) != resolve_sizes(new.model, vocab_size):
        what = f"the model would have another shape, which the checkpoint does not fit: {', '.join(shaped)}"
        raise ConfigError(what, where="overrides", hint="leave it as it was, or start a run from step 0")


def _refuse_other_parametrization(old: ModelSection, new: ModelSection) -> None:
    """Weights of one and the same shape are another function where the forward scales them otherwise, and so are Adam's rates."""
    from surefoot.model.mup import attention_scale, width_factor

    if old.factory or new.factory:
        return
    factors = width_factor(old), width_factor(new)
    scales = tuple(attention_scale(section, head_dim=section.d_model // section.num_heads) for section in (old, new))
    if factors[0] != factors[1]:
        what = f"what the head sees would be divided by {factors[1]:g}, the checkpoint was trained with {factors[0]:g}"
    elif scales[0] != scales[1]:
        was, now = ("1 / sqrt(head_dim)" if scale is None else f"{scale:g}" for scale in scales)
        what = f"attention logits would be scaled by {now}, the checkpoint was trained with {was}"
    else:
        return
    hint = "leave model.parametrization, mup_base_width and mup_base_head_dim as they were, or start a run from step 0"
    raise ConfigError(f"another parametrization: {what}", where="[model] parametrization", hint=hint)


def _refuse_what_does_not_fit(changes: Sequence[tuple[str, str, object, object]], *, step: int, num_steps: int) -> None:
    fixed = [f"[{section}] {key}" for section, key, _, _ in changes if (section, key) in FIXED]
    if fixed:
        what = f"{', '.join(fixed)} decides the order of samples: no checkpoint of another value fits"
        raise ConfigError(what, where="overrides", hint="leave it as it was, or start a run from step 0")
    if num_steps <= step:
        what = f"train.num_steps = {num_steps}, and the checkpoint is at step {step}: nothing would be trained"
        raise ConfigError(what, where="overrides", hint=f"give train.num_steps={step + max(1, step // 5)} or more")
