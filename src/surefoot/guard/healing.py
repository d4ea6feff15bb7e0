"""What follows from what the detectors find, bound to the loop: skip, compute again, go back, name the cause.

Everything here is equal on all ranks: it hangs on the gathered signals, on saved state, and on the ledger as rank 0 tells it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from surefoot.core.blocking import Block
from surefoot.core.events import Event
from surefoot.core.ports import DataPort, SteerableData
from surefoot.core.records import Action, Asks, Pause, Redo, RollBack, Signals, Verdict
from surefoot.core.sections import RunConfig
from surefoot.guard.monitoring import Monitoring
from surefoot.guard.rechecking import Recheck, named_ranks
from surefoot.guard.recording import Recorder
from surefoot.guard.recovery import Recovery, RollBackWay
from surefoot.guard.state import TrainState
from surefoot.heal.diagnosis import KNOWN_CAUSES, Diagnosis, Run, compare_rotated, data_or_state, run_of
from surefoot.heal.episodes import Again, Close, Episode, Episodes, GiveUp, Phase, fold_episodes, follow
from surefoot.heal.policy import HealState, Situation, agreed_on, decide, with_votes
from surefoot.monitor.verdict import verdict_of
from surefoot.observe.blocks import asked_fields
from surefoot.tensors.world import World, broadcast_json, lead

_MAX_REMEMBERED_STEPS = 2000
"""Steps whose samples, and figures by rank, are remembered: an onset lies no farther back."""


@runtime_checkable
class RotatingData(DataPort, Protocol):
    """A DataPort that can give every rank's atoms to the next rank."""

    rotation: int


@dataclass(frozen=True, slots=True)
class _Remembered:
    run: Run
    next_sample: int


class Healer:
    """One per guard, on every rank. `can_redo`: the loop takes a Redo, so a step can be computed again before its update."""

    def __init__(
        self,
        state: TrainState,
        *,
        config: RunConfig,
        world: World,
        recorder: Recorder,
        recovery: Recovery,
        monitoring: Monitoring,
        can_redo: bool,
    ) -> None:
        self._state = state
        self._config = config
        self._section = config.heal
        self._world = world
        self._recorder = recorder
        self._recovery = recovery
        self._monitoring = monitoring
        self._can_redo = can_redo
        axes = config.parallel
        # Figures move with their atoms where every rank is a data rank.
        self._can_rotate = axes.tp * axes.cp * axes.pp == 1 and world.size > 1 and isinstance(state.data, RotatingData)
        self._can_skip = isinstance(state.data, SteerableData)
        self._episodes = Episodes()
        self._recheck: Recheck | None = None
        self._next: Again | None = None
        self._steps: OrderedDict[int, _Remembered] = OrderedDict()
        self._before_rotation: dict[int, _Remembered] = {}
        self._ranks: tuple[int, ...] = ()

    @property
    def must_go_back(self) -> bool:
        return self._next is not None

    @property
    def episode(self) -> Episode | None:
        """The one that is open: while it is, nobody knows whether this state is well, and it is not saved."""
        return self._episodes.open

    @property
    def lr_factor(self) -> float:
        """What learning rates are multiplied by since a roll-back for a cause that had been rolled back for before."""
        return self._episodes.lr_factor

    @property
    def suspect_from_step(self) -> int | None:
        """The first step that is held against the run now."""
        marks = self._state.monitor.heal.marks
        return self.episode.onset_step if self.episode is not None else (marks[0] if marks else None)

    def take_up(self) -> None:
        """Collective over the save group. What the ledger says about episodes, after a start or a roll-back."""
        told = broadcast_json(self._world, lead(self._world, lambda: fold_episodes(self._recorder.entries()).as_json()))
        self._take_up(told)

    def _take_up(self, told: Mapping[str, Any]) -> None:
        self._episodes = Episodes.from_json(told)
        self._recheck = self._next = None
        rotation = self.episode.rotation if self.episode is not None else 0
        if self._can_rotate and isinstance(self._state.data, RotatingData) and self._state.data.rotation != rotation:
            self._state.data.rotation = rotation

    def resume(self) -> None:
        """Collective over the save group. After a start: an episode that is open, and whose way back was not begun or not finished.

        What stands on steps from its onset on is no state to go on from, whatever checkpoint is the newest.
        """
        self.take_up()
        if self.episode is not None and self._state.step >= self.episode.onset_step:
            self._next = Again(self.episode.phase, f"{self.episode.id} was open when the run ended")

    def released(self) -> None:
        """Collective over the save group. A person let the run go on: what was held against it is looked at no more."""
        self._state.monitor.heal = HealState()
        self.take_up()

    # --- in each step ---

    def judge(self, signals: Signals, *, max_grad_norm: float, gradient_divisor: float) -> Action:
        """Collective over the world where a canary is asked for, else local; the same on all ranks. A Redo is not the last word."""
        verdict = verdict_of(signals, self._monitoring.look(signals))
        if self._recheck is not None:
            if (once_more := self._recheck.take(signals, verdict)) is not None:
                return once_more
            verdict = self._recheck.conclusion(step=signals.step + 1)
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
            self._recheck = Recheck(verdict, [run_of(signals, rotation=0)], self._can_rotate, self._data_or_state)
            return action
        action = self._follow(signals, verdict, action)
        self._state.monitor.heal = heal
        self._monitoring.commit(signals)
        self._remember(signals)
        self._tell(signals, verdict, action)
        self._recheck = None
        return action

    def _situation(self, signals: Signals) -> Situation:
        return Situation(
            num_rollbacks=self._episodes.num_rollbacks(step=signals.step + 1, section=self._section),
            can_redo=self._section.recheck and self._can_redo and self._recheck is None,
            in_episode=self.episode is not None,
            can_skip=self._can_skip,
            at_minimum_scale=signals.loss_scale_at_minimum,
            next_sample=self._state.data.next_sample,
            samples_per_step=self._config.train.global_batch_size,
        )

    def _data_or_state(self, run: Run, ill_ranks: Sequence[int]) -> Diagnosis:
        """Collective over the world."""
        return data_or_state(run, ill_ranks=ill_ranks, canary_is_high=self._monitoring.ask_canary())

    def _follow(self, signals: Signals, verdict: Verdict, action: Action) -> Action:
        """What this step means for the episode that is open."""
        episode, step = self.episode, signals.step + 1
        if episode is None:
            return action
        votes = with_votes(self._state.monitor.heal, verdict.findings, step=step, section=self._section)
        recurs = isinstance(action, Pause | RollBack) or bool(agreed_on(votes, verdict.findings, self._section))
        if recurs and step < episode.onset_step:
            return Pause("episode", f"{verdict.rule or 'something'} at step {step}, in a replay and before the onset of {episode.id}")
        rotated_says = None if recurs else self._rotated_says(episode)
        says = follow(episode, step=step, recurs=recurs, can_rotate=self._can_rotate, can_skip=self._can_skip, rotated_says=rotated_says)
        if isinstance(says, Again):
            self._next = says
            return RollBack(episode.to_step, "diagnose", None, episode.rule, says.reason, episode.onset_step)
        if isinstance(says, GiveUp):
            self._tell_cause(episode, says.diagnosis)
            return Pause("episode", f"{episode.id}, {says.diagnosis.cause}: {says.diagnosis.reason}")
        if isinstance(says, Close):
            self._tell_cause(episode, says.diagnosis)
            self._recorder.ledger(Event.EPISODE_CLOSED, rule=episode.rule, reason=says.diagnosis.reason, fields={"episode": episode.id})
            self._recorder.say(f"episode {episode.id} is over: {says.diagnosis.cause}: {says.diagnosis.reason}")
            self._episodes = replace(self._episodes, open=None)
        return action

    def _rotated_says(self, episode: Episode) -> Diagnosis | None:
        """What the figures of the onset say about ranks; None where they are not both known."""
        before, now = self._before_rotation.get(episode.onset_step), self._steps.get(episode.onset_step)
        if episode.phase != "rotated" or before is None or now is None:
            return None
        return compare_rotated(before.run, now.run)

    def _remember(self, signals: Signals) -> None:
        self._steps[signals.step + 1] = _Remembered(run_of(signals, rotation=0), self._state.data.next_sample)
        if len(self._steps) > _MAX_REMEMBERED_STEPS:
            self._steps.popitem(last=False)

    # --- going back ---

    def open_episode(self, action: RollBack, signals: Signals) -> Pause | None:
        """Collective over the save group. What asks for a roll-back is looked into from now on; a Pause where there is no way back."""
        if self._next is not None:
            return None  # an open one goes on in another phase
        samples = action.skip_samples or (self._first_sample(action.onset_step, signals), self._state.data.next_sample)
        phase: Phase = "skipped" if action.mode == "skip" else "replay"
        opened = Episode(
            "",
            action.rule,
            action.reason,
            action.onset_step,
            signals.step + 1,
            samples,
            phase,
            ranks=self._ranks,
            to_step=action.to_step,
            lr_factor=self._next_lr_factor(action.rule),
        )
        told = broadcast_json(self._world, lead(self._world, lambda: self._opened(opened, action.to_step)))
        if told is None:
            return Pause("no_way_back", f"{action.reason}, and no clean checkpoint of step {action.to_step} or before is left")
        self._episodes = Episodes.from_json(told)
        self._next = Again(phase, action.reason)
        return None

    def go_back(self) -> None:
        """Collective over the save group. The roll-back that was decided, without what is to be left out from there on."""
        wish, episode = self._next, self.episode
        if wish is None or episode is None:
            return
        self._before_rotation = dict(self._steps) if wish.phase == "rotated" else {}
        if wish.phase == "skipped":
            lead(self._world, lambda: self._ask_to_skip(episode))
        factor = {"lr_factor": episode.lr_factor} if episode.lr_factor != 1.0 else {}
        fields: dict[str, object] = {"episode": episode.id, "phase": wish.phase, **factor}
        way = RollBackWay(episode.to_step, episode.rule, wish.reason, trusted_until=episode.onset_step - 1, fields=fields)
        self._recovery.roll_back(way)
        self._steps.clear()
        self.take_up()

    def _first_sample(self, step: int, signals: Signals) -> int:
        before = self._steps.get(step - 1)
        if before is not None:
            return before.next_sample
        num_steps = signals.step + 1 - step + 1
        return max(0, self._state.data.next_sample - num_steps * self._config.train.global_batch_size)

    def _next_lr_factor(self, rule: str) -> float:
        """The second line, where it is asked for: the same rule has been rolled back for before, and is back."""
        repeats = self._section.lr_factor > 0.0 and rule in self._episodes.closed_rules
        return self._episodes.lr_factor * (self._section.lr_factor if repeats else 1.0)

    # --- on rank 0 ---

    def _opened(self, episode: Episode, to_step: int) -> dict[str, Any] | None:
        if not self._recovery.ways_back(to_step):
            return None
        fields = {name: value for name, value in episode.as_json().items() if name != "id"}
        self._recorder.ledger(Event.EPISODE_OPENED, rule=episode.rule, reason=episode.reason, fields=fields)
        return fold_episodes(self._recorder.entries()).as_json()

    def _ask_to_skip(self, episode: Episode) -> None:
        first, end = episode.samples
        reason = f"{episode.id}: {episode.reason}"
        block = Block(
            "samples", f"{first}:{end}", "skip", samples=(first, end), reason=reason, by="surefoot", evidence_step=episode.onset_step
        )
        self._recorder.ledger(Event.BLOCK_ASKED, rule=episode.rule, reason=reason, fields=asked_fields(block))

    def _tell_cause(self, episode: Episode, diagnosis: Diagnosis) -> None:
        fields = {
            "episode": episode.id,
            "cause": diagnosis.cause,
            "ranks": list(diagnosis.ranks),
            "samples": list(episode.samples),
            "steps": [episode.onset_step, episode.detected_step],
            "transient": diagnosis.is_transient,
            "phase": episode.phase,
        }
        self._recorder.ledger(Event.EPISODE_DIAGNOSED, rule=episode.rule, reason=diagnosis.reason, fields=fields)

    def _tell(self, signals: Signals, verdict: Verdict, action: Action) -> None:
        step, recheck = signals.step + 1, self._recheck
        findings = verdict.findings
        self._ranks = named_ranks([finding for finding in findings if finding.asks is Asks.ROLL_BACK])
        cause = ""
        if recheck is not None and recheck.diagnosis is not None:
            diagnosis = recheck.diagnosis
            cause = diagnosis.cause
            first_rules = {found.rule for found in recheck.first.findings}
            findings = (*recheck.first.findings, *(found for found in findings if found.rule not in first_rules))
            fields = {
                "of_step": step,
                "rule": recheck.first.rule,
                "cause": cause,
                "ranks": list(diagnosis.ranks),
                "transient": diagnosis.is_transient,
                "num_runs": len(recheck.runs),
                "taken": action.proceeds,
            }
            self._recorder.ledger(Event.STEP_RECHECKED, rule=recheck.first.rule, reason=diagnosis.reason, fields=fields)
            self._recorder.warn(f"step {step} was computed again ({recheck.first.rule}): {cause}: {diagnosis.reason}")
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
