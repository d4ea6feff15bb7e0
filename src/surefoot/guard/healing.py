"""What follows from what the detectors find, bound to the loop: take, skip, compute again, go back, pause.

Everything here is equal on all ranks: it hangs on the gathered signals, on saved state, and on the ledger as rank 0 tells it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surefoot.core.events import Event
from surefoot.core.records import Action, Asks, Pause, Redo, RollBack, Signals, Verdict
from surefoot.core.sections import RunConfig
from surefoot.guard.investigating import Investigation
from surefoot.guard.monitoring import Monitoring
from surefoot.guard.rechecking import Recheck, named_ranks
from surefoot.guard.recording import Recorder
from surefoot.guard.state import TrainState
from surefoot.heal.diagnosis import KNOWN_CAUSES, Diagnosis, Run, data_or_state, run_of
from surefoot.heal.policy import HealState, Situation, decide
from surefoot.monitor.verdict import verdict_of
from surefoot.tensors.world import World

_ACTING = (Asks.SKIP, Asks.ROLL_BACK, Asks.PAUSE)


class Healer:
    """One per guard, on every rank. `can_redo`: the loop takes a Redo, so a step can be computed again before its update."""

    def __init__(
        self,
        state: TrainState,
        *,
        config: RunConfig,
        world: World,
        recorder: Recorder,
        investigation: Investigation,
        monitoring: Monitoring,
        can_redo: bool,
    ) -> None:
        self._state = state
        self._section = config.heal
        self._recorder = recorder
        self._investigation = investigation
        self._monitoring = monitoring
        self._can_redo = can_redo
        self._device = world.device
        self._recheck: Recheck | None = None
        self._ranks: tuple[int, ...] = ()

    def suspect_from(self, pause: Pause) -> int | None:
        """Local. The first step that is held against the run where it pauses."""
        marks = self._state.monitor.heal.marks
        return pause.onset_step if pause.onset_step is not None else (marks[0] if marks else None)

    def released(self) -> None:
        """Collective over the save group. A person let the run go on: what was held against it is looked at no more."""
        self._state.monitor.heal = HealState()
        self._investigation.refold()

    def judge(self, signals: Signals, *, max_grad_norm: float, gradient_divisor: float) -> tuple[Action, Signals]:
        """Collective over the world where a canary is asked for, else local; the same on all ranks.

        What is done with the step, and the signals of the computation that counts. A Redo is not the last word.
        """
        recheck = self._recheck
        if recheck is not None and recheck.is_rotated:
            recheck.take_rotated(signals)
            signals = recheck.signals
        else:
            verdict = verdict_of(signals, self._monitoring.look(signals))
            if recheck is not None and (once_more := recheck.take(signals, verdict)) is not None:
                return once_more, signals
        if recheck is not None:
            verdict = recheck.conclusion(step=signals.step + 1)
        action, heal = decide(
            signals,
            verdict,
            self._state.monitor.heal,
            section=self._section,
            situation=self._situation(signals),
            max_grad_norm=max_grad_norm,
            gradient_divisor=gradient_divisor,
        )
        if isinstance(action, Redo):
            self._recheck = self._begin_recheck(signals, verdict)
            return action, signals
        action = self._investigation.follow(signals, verdict, action)
        self._state.monitor.heal = heal
        self._monitoring.commit(signals)
        self._tell(signals, verdict, action)
        self._recheck = None
        return action, signals

    def open_episode(self, action: RollBack, signals: Signals) -> Pause | None:
        """Collective over the save group. A Pause where there is nothing to go back to."""
        return self._investigation.begin(action, signals, ranks=self._ranks)

    def _begin_recheck(self, signals: Signals, verdict: Verdict) -> Recheck:
        return Recheck(
            first=verdict,
            signals=signals,
            runs=[run_of(signals, rotation=0)],
            can_rotate=self._investigation.can_rotate,
            repeats_bits=self._device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
            data_or_state=self._data_or_state,
        )

    def _situation(self, signals: Signals) -> Situation:
        return Situation(
            num_rollbacks=self._investigation.num_rollbacks(step=signals.step + 1),
            can_redo=self._section.recheck and self._can_redo and self._recheck is None,
            in_episode=self._investigation.open is not None,
            can_skip=self._investigation.can_skip,
            at_minimum_scale=signals.loss_scale_at_minimum,
        )

    def _data_or_state(self, run: Run, ill_ranks: Sequence[int]) -> Diagnosis:
        """Collective over the world."""
        return data_or_state(run, ill_ranks=ill_ranks, canary_is_high=self._monitoring.ask_canary())

    def _tell(self, signals: Signals, verdict: Verdict, action: Action) -> None:
        """On rank 0. What was found, and what a repetition said of it."""
        step, recheck = signals.step + 1, self._recheck
        findings = verdict.findings
        self._ranks = named_ranks([finding for finding in findings if finding.asks is Asks.ROLL_BACK])
        cause = ""
        if recheck is not None and recheck.diagnosis is not None:
            cause = recheck.diagnosis.cause
            first_rules = {found.rule for found in recheck.first.findings}
            findings = (*recheck.first.findings, *(found for found in findings if found.rule not in first_rules))
            self._tell_recheck(recheck, recheck.diagnosis, step=step, is_taken=action.proceeds)
        for finding in self._monitoring.worth_telling(findings, step=step):
            told = {
                "of_step": step,
                "rule": finding.rule,
                "asks": finding.asks,
                "onset_step": finding.onset_step,
                "action": type(action).__name__.lower(),
                "evidence": dict(finding.evidence),
                **({"cause": known} if (known := KNOWN_CAUSES.get(finding.rule, cause)) else {}),
                **({"dry_run": True} if self._section.dry_run else {}),
            }
            self._recorder.ledger(Event.ANOMALY_FOUND, rule=finding.rule, reason=finding.reason, fields=told)
            if self._section.dry_run and action.proceeds and finding.asks in _ACTING:
                self._recorder.warn(f"dry run, step {step}: {finding.rule} asks to {finding.asks}, which is not done: {finding.reason}")

    def _tell_recheck(self, recheck: Recheck, diagnosis: Diagnosis, *, step: int, is_taken: bool) -> None:
        fields = {
            "of_step": step,
            "rule": recheck.first.rule,
            "cause": diagnosis.cause,
            "ranks": list(diagnosis.ranks),
            "transient": diagnosis.is_transient,
            "num_runs": len(recheck.runs),
            "taken": is_taken,
        }
        self._recorder.ledger(Event.STEP_RECHECKED, rule=recheck.first.rule, reason=diagnosis.reason, fields=fields)
        self._recorder.warn(f"step {step} was computed again ({recheck.first.rule}): {diagnosis.cause}: {diagnosis.reason}")
