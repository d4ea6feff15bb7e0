"""The detectors bound to the loop: from the gathered signals to findings, with windows that are saved and restored with the weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from surefoot.core.ports import CanaryPort, EvalPort
from surefoot.core.records import Asks, Finding, Signals
from surefoot.core.sections import RunConfig
from surefoot.core.stages import stage_index, stages_of
from surefoot.guard.rechecking import named_ranks
from surefoot.guard.state import TrainState
from surefoot.monitor import detectors

_TELL_EVERY_STEPS = 100
"""A rule that speaks at every step is told once in so many: the ledger is for people."""


class Monitoring:
    """One per guard, on every rank. All that outlives a step is in `TrainState.monitor`; what is looked at is the same on all ranks."""

    def __init__(self, state: TrainState, *, config: RunConfig, evaluation: EvalPort | None) -> None:
        self._state = state
        self._config = config
        self._evaluation = evaluation if isinstance(evaluation, CanaryPort) else None
        self._rules = detectors.bindings(config.monitor, config.heal)
        self._thresholds = detectors.thresholds_of(config.monitor)
        self._seen: detectors.DetectorState | None = None
        self._told: dict[str, int] = {}
        self._stages = stages_of(config)
        self._first_sample = 0
        self._findings: tuple[Finding, ...] = ()

    def begin(self) -> None:
        """Local. Before the batch of a step is fetched: where it begins."""
        self._first_sample = self._state.data.next_sample

    def look(self, signals: Signals) -> tuple[Finding, ...]:
        """Local. What the detectors say of this step, and what was found since the last. Nothing is remembered before `commit`."""
        observation = detectors.observation_of(signals, step=signals.step + 1, rebased=self._begins_anew())
        self._seen, findings = detectors.observe(
            self._state.monitor.detectors, observation, self._rules, frozen=False, thresholds=self._thresholds
        )
        self._findings = (*self._state.monitor.pending, *findings)
        return self._findings

    def ill_ranks(self) -> tuple[int, ...]:
        """Local. Those that the newest findings name."""
        return named_ranks(self._findings)

    def ask_canary(self) -> bool | None:
        """Collective over the world. Whether the frozen set does worse than it did before; None where there is none to ask."""
        return None

    def commit(self, signals: Signals) -> None:
        """Local. The computation that was looked at last is the one that counts."""
        if self._seen is not None:
            self._state.monitor.detectors = self._seen
        self._state.monitor.pending = ()
        self._seen = None

    def hear(self, findings: Sequence[Finding]) -> None:
        """Local. What was found between two steps, the same on all ranks: judged with the next step."""
        self._state.monitor.pending = (*self._state.monitor.pending, *findings)

    def worth_telling(self, findings: Sequence[Finding], *, step: int) -> list[Finding]:
        """Local. Without what the same rule said a moment ago; what asks for action is always told."""
        told = []
        for finding in findings:
            last = self._told.get(finding.rule)
            if finding.asks in (Asks.RECORD, Asks.ALERT) and last is not None and 0 <= step - last < _TELL_EVERY_STEPS:
                continue
            self._told[finding.rule] = step
            told.append(finding)
        return told

    def _begins_anew(self) -> bool:
        """Whether a stage or a batch size begins with this step, so that what came before is no measure for it."""
        before, after = self._first_sample, self._state.data.next_sample
        if stage_index(self._stages, max(0, after - 1)) != stage_index(self._stages, max(0, before - 1)):
            return True
        ramp = self._config.train.batch_ramp
        # The first step at or behind an edge begins within one batch of the size before it.
        return any(edge <= before < edge + batch for (_, batch), (edge, _) in pairwise(ramp))
