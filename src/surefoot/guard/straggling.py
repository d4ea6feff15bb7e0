"""The seat of the stragglers in the loop: what a step's vector says of every rank's time, looked at by rank 0 and told by it."""

from __future__ import annotations

from dataclasses import asdict

from surefoot.coordinate.stragglers import RankTime, StragglerLimits, StragglerState, look
from surefoot.core.events import Event
from surefoot.core.records import Signals
from surefoot.core.sections import RunConfig
from surefoot.guard.recording import Recorder


class Straggling:
    """One per guard. It advises and changes nothing: which rank runs where is decided elsewhere."""

    def __init__(self, config: RunConfig, *, recorder: Recorder, leads: bool) -> None:
        section = config.monitor
        self._limits = StragglerLimits(section.straggler_steps, section.straggler_factor, section.straggler_min_s)
        self._num_stages = config.parallel.pp
        self._recorder = recorder
        self._is_on = leads and section.straggler_steps > 0
        self._state = StragglerState()

    def step(self, signals: Signals) -> None:
        """Local. After each step that counts."""
        if not self._is_on or len(signals.ranks) < 2 or len(signals.ranks) % self._num_stages:
            return
        times = [RankTime(part.forward_backward_s, part.waited_s, part.data_wait_s) for part in signals.ranks]
        seen = look(self._state, times, generation=signals.generation, num_stages=self._num_stages, limits=self._limits)
        self._state = seen.state
        for found in seen.found:
            fields = {name: value for name, value in asdict(found).items() if name != "reason"}
            self._recorder.ledger_if_possible(Event.STRAGGLER_FOUND, reason=found.reason, fields=fields)
            self._recorder.warn(found.reason)
        for gone in seen.gone:
            reason = f"rank {gone.rank} is as fast as its peers again"
            self._recorder.ledger_if_possible(Event.STRAGGLER_GONE, reason=reason, fields={"rank": gone.rank, "cause": gone.cause})
