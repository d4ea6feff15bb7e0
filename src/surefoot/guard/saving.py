"""Saves: when, under which id, again when one failed, and what may be retired afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.manifest import checkpoint_id
from surefoot.checkpoint.retention import remove, retire
from surefoot.checkpoint.state import collect
from surefoot.core.clock import Clock
from surefoot.core.errors import CheckpointError
from surefoot.core.events import Event
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.ports import NamedData
from surefoot.core.records import Manifest, Signals
from surefoot.core.sections import RunConfig
from surefoot.core.version import __version__
from surefoot.guard.environment import describe_environment
from surefoot.guard.recording import Recorder
from surefoot.guard.save_policy import reason_to_save
from surefoot.guard.state import TrainState
from surefoot.observe.lineage import fold_lineage
from surefoot.tensors.world import World

logger = logging.getLogger(__name__)


class Saver:
    """Knows the newest commit of this process; everything else about checkpoints is in the ledger and in their folders."""

    def __init__(
        self, state: TrainState, *, config: RunConfig, world: World, run_dir: Path, generation: int, recorder: Recorder, clock: Clock
    ) -> None:
        self.root = run_dir / "checkpoints"
        self.last_id: str | None = None
        self.last_digest: str | None = None
        self.last_saved_step = 0
        self.last_stall_s = 0.0
        self._state = state
        self._config = config
        self._world = world
        self._generation = generation
        self._recorder = recorder
        self._clock = clock
        self._last_began_s = clock.monotonic_s()
        self._failed_points = 0

    @property
    def since_last_s(self) -> float:
        """Seconds since the last save began, or since the start."""
        return self._clock.monotonic_s() - self._last_began_s

    def reason_to_save(self, signals: Signals) -> str | None:
        return reason_to_save(
            self._state.step,
            signals,
            self._config.checkpoint,
            num_steps=self._config.train.num_steps,
            last_saved_step=self.last_saved_step,
        )

    def stands_on(self, manifest: Manifest) -> None:
        """The state is that of `manifest` now: the parent of the next save."""
        self.last_id, self.last_digest, self.last_saved_step = manifest.id, manifest.state_digest, manifest.step

    def save(self, *, reason: str) -> str | None:
        """Collective over the save group. Commit the present state; its id, or None when this save point failed and the run may go on.

        A failed try is repeated at once under a fresh id. Raises CheckpointError when the state must not go unsaved: at the end of the
        run, or when `checkpoint.max_failed_saves` save points in a row failed.
        """
        self._last_began_s = self._clock.monotonic_s()
        last_error: CheckpointError | None = None
        for retry in range(self._config.checkpoint.max_save_tries):
            try:
                self._commit(retry=retry, reason=reason)
            except CheckpointError as error:
                last_error = error
                logger.warning("save %d of %d failed: %s", retry + 1, self._config.checkpoint.max_save_tries, error)
                self._recorder.ledger_if_possible(Event.SAVE_FAILED, reason=str(error), fields={"retry": retry, "wanted": reason})
                continue
            self._failed_points = 0
            self.last_stall_s = self._clock.monotonic_s() - self._last_began_s
            self._retire_old()
            return self.last_id
        self._failed_points += 1
        is_final = self._state.step >= self._config.train.num_steps
        if last_error is not None and (is_final or self._failed_points >= self._config.checkpoint.max_failed_saves):
            raise last_error
        return None

    def _commit(self, *, retry: int, reason: str) -> None:
        manifest = save(
            self.root,
            self._draft(retry=retry),
            state=collect(self._state.model, self._state.optimizer),
            extras=self._state.extras() if self._world.leads else {},  # rank 0 writes them; all ranks have the same
            world=self._world,
        )
        self.stands_on(manifest)
        self._recorder.ledger(Event.CHECKPOINT_COMMITTED, reason=reason, fields=commit_fields(manifest))

    def _draft(self, *, retry: int) -> Manifest:
        ledger_seq, ledger_hash = self._recorder.position
        data = self._state.data
        return Manifest(
            format_version=0,
            id=checkpoint_id(self._state.step, attempt=self._state.attempt, retry=retry),
            run=self._config.run.name,
            step=self._state.step,
            attempt=self._state.attempt,
            generation=self._generation,
            parent=self.last_id,
            time_utc=self._clock.utc(),
            loss=self._state.loss,
            tokens=self._state.tokens,
            state_digest="",
            config_hashes=section_hashes(self._config) | code_hashes(self._config),
            data_hash=data.data_hash if isinstance(data, NamedData) else "",
            code_version=__version__,
            topology={"dp_replicate": self._config.parallel.dp_replicate, "dp_shard": self._config.parallel.dp_shard},
            environment=describe_environment(self._state.model, self._state.optimizer, self._world),
            ledger_seq=ledger_seq,
            ledger_hash=ledger_hash,
            cursor={},
            files=(),
            tensors=(),
        )

    def _retire_old(self) -> None:
        """Ledgered before the files go, so that no restore ever tries one that is half gone. A failed deletion is said and left."""
        if not self._world.leads:
            return
        lineage = fold_lineage(self._recorder.entries())
        standing = [ref for ref in lineage.refs if ref.id not in lineage.retired]
        section = self._config.checkpoint
        for retired in retire(standing, keep_last=section.keep_last, milestone_steps=section.milestone_steps):
            self._recorder.ledger(Event.CHECKPOINT_RETIRED, rule="retention", reason=retired.reason, fields={"id": retired.id})
            remove(self.root, retired.id, generation=self._generation)


def commit_fields(manifest: Manifest) -> dict[str, object]:
    """What the ledger says about a commit."""
    return {
        "id": manifest.id,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "state_digest": manifest.state_digest,
        "num_bytes": sum(file.num_bytes for file in manifest.files),
    }
