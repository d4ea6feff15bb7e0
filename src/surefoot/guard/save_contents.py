"""What a save is made of, as this rank holds it: tensors, extras, and the draft of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.checkpoint.state import LiveState, collect
from surefoot.core.clock import Clock
from surefoot.core.errors import SurefootError
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.ports import NamedData
from surefoot.core.records import Manifest
from surefoot.core.sections import RunConfig
from surefoot.core.version import __version__
from surefoot.guard.environment import describe_environment
from surefoot.guard.recording import Recorder
from surefoot.guard.state import TrainState
from surefoot.tensors.world import World


@dataclass(frozen=True, slots=True)
class Contents:
    """`error` is why this rank cannot take part in the save."""

    draft: Manifest
    state: LiveState
    extras: Mapping[str, object]
    error: SurefootError | None


class SaveContents:
    """Looks at the live state whenever a save begins."""

    def __init__(self, state: TrainState, *, config: RunConfig, world: World, generation: int, recorder: Recorder, clock: Clock) -> None:
        self._state = state
        self._config = config
        self._world = world
        self._generation = generation
        self._recorder = recorder
        self._clock = clock

    def now(self, checkpoint: str, *, parent: str | None) -> Contents:
        """Local. Everything that a save of the present state consists of."""
        extras, error = self._extras()
        draft = self._draft(checkpoint, parent=parent)
        return Contents(draft, collect(self._state.model, self._state.optimizer), extras, error)

    def _extras(self) -> tuple[dict[str, object], SurefootError | None]:
        """Rank 0 writes them; all ranks have the same. What has no JSON form is told to all."""
        if not self._world.leads:
            return {}, None
        try:
            return self._state.extras(), None
        except SurefootError as error:
            return {}, error

    def _draft(self, checkpoint: str, *, parent: str | None) -> Manifest:
        ledger_seq, ledger_hash = self._recorder.position
        data = self._state.data
        return Manifest(
            format_version=0,
            id=checkpoint,
            run=self._config.run.name,
            step=self._state.step,
            attempt=self._state.attempt,
            generation=self._generation,
            parent=parent,
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


def overlap_refused_by(state: TrainState) -> str:
    """Local. Why parameters may change during a backward; empty when they do not."""
    for group in state.optimizer.param_groups:
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in group["params"]):
            return "a parameter has a hook that runs when its gradient is ready, as an optimizer step in the backward has"
    return ""
