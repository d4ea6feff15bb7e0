"""The state that comes back: of the first of several checkpoints that proves itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.checkpoint.fetch import fetch_for_resume
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.restore import Loaded, load, was_touched
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.sources import SlotSource
from surefoot.checkpoint.state import collect
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt
from surefoot.core.events import Event
from surefoot.core.identity import code_hashes, other_sections, section_hashes
from surefoot.core.ports import EvalPort
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.guard.canary import Canary, compare_canary
from surefoot.guard.recording import Recorder
from surefoot.guard.state import TrainState
from surefoot.guard.steering import Steering
from surefoot.guard.trajectory import Facts
from surefoot.observe.lineage import fold_lineage
from surefoot.tensors.world import World, broadcast_json, lead, lead_long

_MAX_BEAT_S = 10.0  # a fetch takes minutes, and the other ranks are told that it goes on


@dataclass
class Loader:
    """Loads the first of several checkpoints that proves itself: its bytes, its digests, and the canary loss it was saved with."""

    state: TrainState
    config: RunConfig
    world: World
    recorder: Recorder
    steering: Steering
    root: Path
    evaluation: EvalPort | None
    facts: Callable[[], Facts]
    slots: Callable[[], list[Slot]]
    canary: Canary | None = field(default=None, init=False)
    has_touched: bool = field(default=False, init=False)
    """Whether the last `load_first` has written over the live state, be it with something that was rejected afterwards."""

    def load_first(self, found: Sequence[Mapping[str, str]]) -> tuple[Loaded | None, list[str]]:
        """Collective over the save group. The first of `found` that loads, and why those before it did not.

        Where canaries alone stood against some, and by less than the tolerance, and nothing else loads, the machine is what differs: then
        the best of those is taken.
        """
        self.has_touched = False
        rejected: list[str] = []
        near: list[Mapping[str, str]] = []
        for number, candidate in enumerate(found, start=1):
            try:
                loaded = self._load_or_mend(candidate)
                self.canary = self._sing(loaded)
                if self.canary is None or self.canary.agrees:
                    return loaded, rejected
                if self.canary.within:
                    near.append(candidate)
                reason = self.canary.reason
            except CheckpointError as error:
                reason = _why(error)
            rejected.append(f"{candidate['id']}: {reason}")
            if number < len(found):  # the reason of the last one is for what follows: an error says it, or the note below
                self.recorder.say(f"checkpoint {candidate['id']} is rejected, falling back to {found[number]['id']}: {reason}")
            self.recorder.ledger(Event.CHECKPOINT_REJECTED, reason=reason, fields={"id": candidate["id"]})
        if near:
            self.recorder.say(f"checkpoint {rejected[-1]}")
            self.recorder.say(
                f"note: canaries differ only within the tolerance: this machine does not repeat its own bits; {near[0]['id']} is taken"
            )
            return self._load_or_mend(near[0]), rejected
        return None, rejected

    def _load(self, candidate: Mapping[str, str]) -> Loaded:
        path = self.root / candidate["id"]
        cursor = broadcast_json(self.world, lead(self.world, lambda: self._checked_cursor(path)))
        if cursor is not None:
            self.state.data.seek(cursor)  # before any tensor: data that changed is the first thing to say, not what it did to a shape
        live = collect(self.state.model, self.state.optimizer, for_load=True)
        memory = SlotSource(self.slots(), checkpoint=candidate["id"])
        try:
            loaded = load(path, state=live, world=self.world, expected_state_digest=candidate["state_digest"], sources=[memory])
        except CheckpointError as error:
            self.has_touched |= was_touched(error)
            raise
        self.has_touched = True
        _refuse_mixed(loaded, candidate["id"])
        for problem in loaded.problems:
            self.recorder.say(f"note: {candidate['id']}: {problem.file} {problem.kind}, taken from another place: {problem.detail}")
        return loaded

    def _checked_cursor(self, path: Path) -> Mapping[str, Any] | None:
        """On rank 0. The data cursor of a checkpoint that may be gone on from; None when its manifest is damaged.

        Raises DataError when something was left out of its data that the ledger does not know.
        """
        cursor = _cursor_of(path, self.config, self.recorder.entries())
        if cursor is not None:
            self.steering.check(cursor, checkpoint=path.name)
        return cursor

    def _load_or_mend(self, candidate: Mapping[str, str]) -> Loaded:
        """Collective over the save group. From memory and disk; where that fails, after its folder was mended from a store that has it."""
        try:
            return self._load(candidate)
        except CheckpointError as error:
            reason = _why(error)
            beat_s = min(_MAX_BEAT_S, self.config.launch.collective_limit_s / 4)
            if not lead_long(self.world, lambda: self._mend(candidate, reason), beat_s=beat_s):
                raise
        return self._load(candidate)

    def _mend(self, candidate: Mapping[str, str], reason: str) -> bool:
        """On rank 0. Whether some store could give the checkpoint that the ledger means, or the damaged files of it."""
        checkpoint = candidate["id"]
        for store in fold_lineage(self.recorder.entries()).tiers.get(checkpoint, ()):
            self.recorder.say(f"checkpoint {checkpoint} is fetched from {store}: {reason}")
            try:
                fetch_for_resume(f"{store}/{checkpoint}", self.root, expected_state_digest=candidate["state_digest"])
                return True
            except (CheckpointError, ConfigError) as error:
                self.recorder.warn(f"checkpoint {checkpoint} is not taken from {store}: {error}")
        return False

    def _sing(self, loaded: Loaded) -> Canary | None:
        """Collective over the world. The held-out loss of the loaded weights beside the one that was saved with them."""
        saved = loaded.extras.get("canary")
        if not isinstance(saved, int | float) or self.evaluation is None:
            return None
        held_out = self.evaluation.held_out()
        if held_out is None:
            return None
        return compare_canary(
            float(saved), held_out.loss, made_under=loaded.manifest, now=self.facts(), tolerance=self.config.checkpoint.replay_tolerance
        )


def _why(error: CheckpointError) -> str:
    """Without its hint: what to do is for the one to say who knows whether there is another checkpoint."""
    return f"{error.where}: {error.what}" if error.where else error.what


def _cursor_of(path: Path, config: RunConfig, entries: Sequence[LedgerEntry]) -> Mapping[str, Any] | None:
    """The data cursor of a checkpoint; None when its manifest is damaged.

    Settings that decide the trajectory may differ from the checkpoint's only when the ledger says that a person accepted it."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None  # loading it will say what is wrong, and fall back
    accepted = {(entry.fields.get("section"), entry.fields.get("hash")) for entry in entries if entry.event == Event.CONFIG_ACCEPTED}
    now = section_hashes(config) | code_hashes(config)
    refused = [section for section in other_sections(manifest.config_hashes, now=now) if (section, now[section]) not in accepted]
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
