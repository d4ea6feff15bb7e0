"""What a save is made of, as this rank holds it: tensors, extras, and the draft of the manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from surefoot.checkpoint.state import LiveState, collect
from surefoot.core.clock import Clock
from surefoot.core.errors import CheckpointError, SurefootError
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.layouts import topology
from surefoot.core.ports import NamedData
from surefoot.core.records import Manifest
from surefoot.core.sections import RunConfig
from surefoot.core.strict_json import canonical
from surefoot.core.version import __version__
from surefoot.guard.environment import describe_environment
from surefoot.guard.recording import Recorder
from surefoot.guard.state import TrainState
from surefoot.tensors.world import World, is_peer_failure

logger = logging.getLogger(__name__)


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

    def now(self, checkpoint: str, *, parent: str | None, for_plan_only: bool = False) -> Contents:
        """Local. Everything that a save of the present state consists of; `for_plan_only` leaves the extras out. Raises nothing of its own.

        Much of this is the caller's code: hooks of a state_dict, a cursor, extra parts. The other ranks wait in the plan by now, so
        whatever this rank meets is told to them there.
        """
        draft, live = self._draft(checkpoint, parent=parent), LiveState()
        extras: dict[str, Any] = {}
        error: SurefootError | None = None
        try:
            draft = self._placed(draft)
            live = collect(self._state.model, self._state.optimizer)
            if self._world.leads and not for_plan_only:  # all ranks have the same
                extras = self._state.extras()
                canonical(extras)
        except SurefootError as found:
            error = found
        except Exception as found:  # the boundary to foreign code
            if is_peer_failure(found):
                raise
            logger.exception("rank %d cannot take part in the save %s", self._world.rank, checkpoint)
            hint = "a state_dict, a hook of one or the data's cursor raised it; its traceback is in this rank's log"
            error = CheckpointError(f"{type(found).__name__}: {found}", where="the state to save", hint=hint)
            error.__cause__ = found
        return Contents(draft, live, extras, error)

    def _placed(self, draft: Manifest) -> Manifest:
        """With the data that it belongs to, and its place in the ledger."""
        ledger_seq, ledger_hash = self._recorder.position
        data = self._state.data
        return replace(
            draft, data_hash=data.data_hash if isinstance(data, NamedData) else "", ledger_seq=ledger_seq, ledger_hash=ledger_hash
        )

    def _draft(self, checkpoint: str, *, parent: str | None) -> Manifest:
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
            data_hash="",
            code_version=__version__,
            topology=topology(self._config.parallel),
            environment=describe_environment(
                self._state.model, self._state.optimizer, self._world, exact_sums=self._state.numerics is not None
            ),
            ledger_seq=0,
            ledger_hash="",
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
