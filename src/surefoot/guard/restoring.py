"""A start: the newest checkpoint on the lineage that verifies, or step 0."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.restore import Loaded, load
from surefoot.checkpoint.retention import remove, sweep
from surefoot.checkpoint.state import collect
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt
from surefoot.core.events import Event
from surefoot.core.hashing import sha256_json
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.ports import NamedData
from surefoot.core.records import LedgerEntry, Manifest, Resumed
from surefoot.core.sections import RunConfig
from surefoot.guard.environment import changed_facts, describe_environment
from surefoot.guard.recording import Recorder
from surefoot.guard.saving import Saver
from surefoot.guard.state import TrainState
from surefoot.observe.halts import refuse_halted
from surefoot.observe.lineage import adoptable, candidates, fold_lineage
from surefoot.observe.saves import commit_fields
from surefoot.tensors.world import World, broadcast_json, lead

logger = logging.getLogger(__name__)


def restore_newest(state: TrainState, *, config: RunConfig, world: World, generation: int, recorder: Recorder, saver: Saver) -> Resumed:
    """Collective over the save group. Begin the next attempt, from the newest checkpoint that verifies or from the start.

    A checkpoint that does not verify is rejected by name and the one before it is tried. Raises CheckpointError when there were some and
    none loads, ConfigError when the config of the newest differs and nobody accepted that, DataError when its data is not there any more.
    """
    surveyed = lead(world, lambda: _survey(generation=generation, recorder=recorder, root=saver.root))
    survey: dict[str, Any] = broadcast_json(world, surveyed)
    state.attempt = int(survey["last_attempt"])
    loaded, rejected = _load_first(survey["candidates"], state, config=config, world=world, recorder=recorder, root=saver.root)
    if loaded is None and rejected:
        raise CheckpointError(
            f"none of the {len(rejected)} checkpoints of this run loads; the newest: {rejected[0]}",
            where=str(saver.root),
            hint="`surefoot checkpoint verify` names what is damaged in each; another [run] dir starts anew",
        )
    if loaded is not None:
        state.take_extras(dict(loaded.extras))
        state.loss = loaded.manifest.loss
        saver.stands_on(loaded.manifest)
    state.attempt += 1
    return _tell(loaded, state, config=config, world=world, generation=generation, recorder=recorder)


def _survey(*, generation: int, recorder: Recorder, root: Path) -> dict[str, Any]:
    """On rank 0. What ledger and folder say, after what a dead process left undone is done."""
    refuse_halted(recorder.entries())
    sweep(root, generation=generation)
    for manifest in adoptable(_readable_manifests(root), fold_lineage(recorder.entries())):
        reason = "published, but its writer died before it could say so"
        recorder.ledger(Event.CHECKPOINT_ADOPTED, reason=reason, fields=commit_fields(manifest))
    lineage = fold_lineage(recorder.entries())
    for checkpoint in lineage.retired.intersection(published(root)):
        remove(root, checkpoint, generation=generation)  # its process died between deciding and deleting
    found = candidates(lineage)
    return {
        "last_attempt": lineage.counters.attempt,
        "candidates": [{"id": ref.id, "state_digest": ref.state_digest} for ref in found],
    }


def _readable_manifests(root: Path) -> list[Manifest]:
    """Manifests of the published checkpoints; one that cannot be read is nobody's to adopt, and a restore will name what is wrong."""
    manifests = []
    for checkpoint in published(root):
        try:
            manifests.append(read_manifest(root / checkpoint))
        except CheckpointError as error:
            logger.warning("checkpoint %s: %s", checkpoint, error)
    return manifests


def _checked_cursor(path: Path, config: RunConfig, entries: Sequence[LedgerEntry]) -> Mapping[str, Any] | None:
    """The data cursor of a checkpoint; None when its manifest is damaged.

    Settings that decide the trajectory may differ from the checkpoint's only when the ledger says that a person accepted it."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None  # loading it will say what is wrong, and fall back
    accepted = {(entry.fields.get("section"), entry.fields.get("hash")) for entry in entries if entry.event == Event.CONFIG_ACCEPTED}
    now = section_hashes(config) | code_hashes(config)
    refused = [
        section for section in now if manifest.config_hashes.get(section) != now[section] and (section, now[section]) not in accepted
    ]
    if refused:
        raise ConfigError(
            f"checkpoint {manifest.id} was made with another {', '.join(f'[{section}]' for section in refused)}",
            where=str(path),
            hint=f"put them back, or `surefoot train ... {' '.join(f'--accept-changes {section}' for section in refused)}`",
            sections=tuple(refused),
        )
    return manifest.cursor


def _refuse_mixed(loaded: Loaded, checkpoint: str) -> None:
    """Raises Corrupt when folder, manifest and saved counters do not speak of one checkpoint. All ranks read the same files."""
    manifest, step = loaded.manifest, loaded.extras["loop"]["step"]
    if manifest.id != checkpoint or manifest.step != step:
        raise Corrupt(
            f"folder {checkpoint} holds a manifest of {manifest.id} at step {manifest.step}, and state of step {step}",
            where=checkpoint,
            hint="it was renamed or edited; the live state is garbage now and is loaded over",
        )


def _load_first(
    found: Sequence[Mapping[str, str]], state: TrainState, *, config: RunConfig, world: World, recorder: Recorder, root: Path
) -> tuple[Loaded | None, list[str]]:
    """Collective over the save group. The first that loads, and why those before it did not."""
    rejected: list[str] = []
    for candidate in found:
        path = root / candidate["id"]
        cursor = broadcast_json(world, lead(world, lambda path=path: _checked_cursor(path, config, recorder.entries())))  # type: ignore[misc]
        if cursor is not None:
            state.data.seek(cursor)  # before any tensor: data that changed is the first thing to say, not what it did to a shape
        live = collect(state.model, state.optimizer, for_load=True)
        try:
            loaded = load(path, state=live, world=world, expected_state_digest=candidate["state_digest"])
            _refuse_mixed(loaded, candidate["id"])
            return loaded, rejected
        except CheckpointError as error:
            rejected.append(f"{candidate['id']}: {error}")
            recorder.say(f"checkpoint {candidate['id']} is rejected, falling back one generation: {error}")
            recorder.ledger(Event.CHECKPOINT_REJECTED, reason=str(error), fields={"id": candidate["id"]})
    return None, rejected


def _tell(loaded: Loaded | None, state: TrainState, *, config: RunConfig, world: World, generation: int, recorder: Recorder) -> Resumed:
    environment = describe_environment(state.model, state.optimizer, world)
    manifest = loaded.manifest if loaded else None
    recorder.ledger(
        Event.ATTEMPT_STARTED,
        fields={"checkpoint": manifest.id if manifest else None, "environment": environment, "config_hashes": section_hashes(config)},
    )
    if manifest is None:
        message = f"starting at step 0, attempt {state.attempt}, seed {config.run.seed}"
        return Resumed(0, state.attempt, generation, None, None, message)
    recorder.ledger(Event.RUN_RESUMED, fields={"checkpoint": manifest.id, "state_digest": manifest.state_digest})
    _tell_differences(manifest, environment, state, recorder)
    for note in loaded.notes if loaded else ():
        recorder.say(f"note: {note}")
    message = (
        f"resumed from step {manifest.step}, checkpoint {manifest.id}, attempt {state.attempt}, "
        f"config {sha256_json(section_hashes(config))[:8]}, digest verified {manifest.state_digest[:16]}"
    )
    return Resumed(manifest.step, state.attempt, generation, manifest.id, manifest.state_digest, message)


def _tell_differences(manifest: Manifest, environment: Mapping[str, object], state: TrainState, recorder: Recorder) -> None:
    changed = changed_facts(manifest.environment, environment)
    if changed:
        recorder.ledger(Event.ENVIRONMENT_CHANGED, fields={"changed": changed})
        words = ", ".join(f"{name} was {before}, is {now}" for name, (before, now) in changed.items())
        recorder.say(f"note: the surroundings changed, so bits may differ from an undisturbed run: {words}")
    if isinstance(state.data, NamedData) and state.data.data_change:
        recorder.ledger(Event.DATA_ACCEPTED, rule="--on-data-change", reason=state.data.data_change)
