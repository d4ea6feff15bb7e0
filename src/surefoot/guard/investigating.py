"""An episode bound to the loop: what asked for a roll-back is looked into, phase by phase, until its cause has a name.

What is open stands in the ledger, as rank 0 tells it; what is known of the present phase alone is in memory, and a restart begins the phase
anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from surefoot.core.blocking import Block
from surefoot.core.events import Event
from surefoot.core.ports import DataPort, SteerableData
from surefoot.core.records import Action, Pause, Resumed, RollBack, Signals, Verdict
from surefoot.core.sections import RunConfig
from surefoot.guard.recording import Recorder
from surefoot.guard.recovery import NotBack, Recovery, RollBackWay
from surefoot.guard.state import TrainState
from surefoot.heal.diagnosis import Diagnosis, Run, compare_rotated, run_of
from surefoot.heal.episodes import Again, Close, Episode, Episodes, GiveUp, Means, Phase, fold_episodes, follow
from surefoot.heal.policy import agreed_on, with_votes
from surefoot.observe.blocks import asked_fields, fold_blocks
from surefoot.tensors.world import World, broadcast_json, lead

_MAX_REMEMBERED_STEPS = 2000
"""Steps whose samples are remembered: an onset lies no farther back."""

_ROTATED_TOLERANCE = 0.01
"""By how much a rank's figures may differ in a replay on other ranks: sums in another order leave the weights alike, and not the same."""


@runtime_checkable
class RotatingData(DataPort, Protocol):
    """A DataPort that can give every rank's atoms to the next rank."""

    rotation: int


class Investigation:
    """One per guard, on every rank. `can_rotate` says whether figures by rank move with their atoms in this layout."""

    def __init__(self, state: TrainState, *, config: RunConfig, world: World, recorder: Recorder, recovery: Recovery) -> None:
        self._state = state
        self._config = config
        self._world = world
        self._recorder = recorder
        self._recovery = recovery
        axes = config.parallel
        self.can_rotate = axes.tp * axes.cp * axes.pp == 1 and world.size > 1 and isinstance(state.data, RotatingData)
        self.can_skip = isinstance(state.data, SteerableData)
        self._episodes = Episodes()
        self._next: Again | None = None
        self._ends: OrderedDict[int, int] = OrderedDict()  # the first sample behind each of the newest steps
        self._onset: Run | None = None  # the onset of the open episode, as the present phase computed it
        self._onset_before: Run | None = None  # and as the phase before did

    @property
    def must_go_back(self) -> bool:
        return self._next is not None

    @property
    def open(self) -> Episode | None:
        return self._episodes.open

    @property
    def lr_factor(self) -> float:
        return self._episodes.lr_factor

    @property
    def holds_saves(self) -> bool:
        """Local. From the onset on nobody knows whether this state is well; with atoms on other ranks it is none to go on from."""
        episode = self.open
        return episode is not None and (episode.phase == "rotated" or self._state.step >= episode.onset_step)

    def num_rollbacks(self, *, step: int) -> int:
        return self._episodes.num_rollbacks(step=step, section=self._config.heal)

    # --- what stands in the ledger ---

    def refold(self) -> None:
        """Collective over the save group. What the ledger says about episodes, after a person has looked."""
        told = broadcast_json(self._world, lead(self._world, lambda: fold_episodes(self._recorder.entries()).as_json()))
        self._episodes = Episodes.from_json(told)
        self._next = None

    def resume(self) -> None:
        """Collective over the save group. After a start: an episode that is open, and whose way back was not begun or not finished.

        What stands on steps from its onset on is no state to go on from, whatever checkpoint is the newest.
        """
        self._begin_phase()
        episode = self.open
        if episode is not None and (self._state.step >= episode.onset_step or not self._episodes.is_back):
            self._next = Again(episode.phase, f"{episode.id} was open when the run ended")

    def _begin_phase(self) -> None:
        """Collective over the save group."""
        self.refold()
        self._onset_before, self._onset = self._onset, None
        self._ends.clear()
        self.turn()

    def turn(self) -> None:
        """Local. Where an attempt begins: atoms stay on their ranks for the whole of it, for a replay goes by attempts."""
        rotation = self.open.rotation if self.open is not None else 0
        if self.can_rotate and isinstance(self._state.data, RotatingData) and self._state.data.rotation != rotation:
            self._state.data.rotation = rotation

    # --- in each step ---

    def follow(self, signals: Signals, verdict: Verdict, action: Action) -> Action:
        """Local, the same on all ranks. What this step means for the episode that is open."""
        episode, step = self.open, signals.step + 1
        self._ends[step] = self._state.data.next_sample
        if len(self._ends) > _MAX_REMEMBERED_STEPS:
            self._ends.popitem(last=False)
        if episode is None:
            return action
        if step == episode.onset_step:
            self._onset = run_of(signals, rotation=episode.rotation)
        again = self._asks_again(verdict, action, step=step)
        if again and step < episode.onset_step:
            return Pause("episode", f"{again} at step {step}, in a replay and before the onset of {episode.id}", step)
        means = Means(self.can_rotate, self.can_skip, self._config.train.num_steps)
        says = follow(episode, step=step, again=again, means=means, rotated_says=self._rotated_says(episode))
        if isinstance(says, Again):
            self._next = says
            return RollBack(episode.to_step, "diagnose", episode.rule, says.reason, episode.onset_step)
        if isinstance(says, GiveUp):
            self._tell_cause(episode, says.diagnosis)
            return Pause("episode", f"{episode.id}, {says.diagnosis.cause}: {says.diagnosis.reason}", episode.onset_step)
        if isinstance(says, Close):
            self._tell_cause(episode, says.diagnosis)
            self._recorder.ledger(Event.EPISODE_CLOSED, rule=episode.rule, reason=says.diagnosis.reason, fields={"episode": episode.id})
            self._recorder.say(f"episode {episode.id} is over: {says.diagnosis.cause}: {says.diagnosis.reason}")
            self._episodes = replace(self._episodes, open=None, closed_rules=(*self._episodes.closed_rules, episode.rule))
        return action

    def _asks_again(self, verdict: Verdict, action: Action, *, step: int) -> str:
        """The rules that would roll back or pause now; empty for none."""
        section = self._config.heal
        votes = with_votes(self._state.monitor.heal, verdict.findings, step=step, section=section)
        agreed = agreed_on(votes, verdict.findings, section)
        if agreed:
            return ", ".join(sorted({found.rule for found in agreed}))
        return action.rule if isinstance(action, Pause | RollBack) else ""

    def _rotated_says(self, episode: Episode) -> Diagnosis | None:
        """What the figures of the onset say about ranks; None where they are not both known, or moved with their atoms."""
        if episode.phase != "rotated" or self._onset_before is None or self._onset is None:
            return None
        return compare_rotated(self._onset_before, self._onset, tolerance=_ROTATED_TOLERANCE)

    # --- going back ---

    def begin(self, action: RollBack, signals: Signals, *, ranks: tuple[int, ...]) -> Pause | None:
        """Collective over the save group. What asks for a roll-back is looked into from now on; a Pause where there is no way back."""
        if self._next is not None:
            return None  # an open one goes on in another phase
        self._recovery.drain()  # a save that is under way may be the way back
        opened = self._opened_by(action, signals, ranks=ranks)
        told = broadcast_json(self._world, lead(self._world, lambda: self._ledger_opened(opened)))
        if told is None:
            what = f"{action.reason}, and no clean checkpoint of step {action.to_step} or before is left"
            return Pause("no_way_back", what, action.onset_step)
        self._episodes = Episodes.from_json(told)
        self._next = Again(opened.phase, action.reason)
        return None

    def go_back(self) -> None:
        """Collective over the save group. The roll-back that was decided, without what is to be left out from there on."""
        wish, episode = self._next, self.open
        if wish is None or episode is None:
            return
        if wish.phase == "skipped":
            lead(self._world, lambda: self._ask_to_skip(episode))
        told: dict[str, object] = {"episode": episode.id, "phase": wish.phase}
        repeats_bits = wish.phase != "rotated" or self._config.numerics.sums == "exact"
        if episode.lr_factor != self._episodes.lr_factor:
            told["lr_factor"], repeats_bits = episode.lr_factor, False
        trusted_until = episode.onset_step - 1 if repeats_bits else 0
        way = RollBackWay(episode.to_step, episode.rule, wish.reason, trusted_until=trusted_until, fields=told)
        self._recovery.roll_back(way)
        self._begin_phase()

    def go_back_as_asked(self, way: RollBackWay) -> Resumed | NotBack:
        """Collective over the save group. The roll-back that a person ordered, and what was looked into is over."""
        back = self._recovery.roll_back(way)
        if isinstance(back, Resumed):
            self._begin_phase()
        else:
            self.refold()
        return back

    def _opened_by(self, action: RollBack, signals: Signals, *, ranks: tuple[int, ...]) -> Episode:
        phase: Phase = "skipped" if action.mode == "skip" else "replay"
        batch = self._config.train.global_batch_size
        num_steps = signals.step + 2 - action.onset_step
        end = self._state.data.next_sample
        first = self._ends.get(action.onset_step - 1, max(0, end - num_steps * batch))
        repeats = self._config.heal.lr_factor > 0.0 and action.rule in self._episodes.closed_rules
        return Episode(
            id="",
            rule=action.rule,
            reason=action.reason,
            onset_step=action.onset_step,
            detected_step=signals.step + 1,
            samples=(first, first + action.skip_steps * batch if action.skip_steps else end),
            phase=phase,
            ranks=ranks,
            to_step=action.to_step,
            lr_factor=self._episodes.lr_factor * (self._config.heal.lr_factor if repeats else 1.0),
        )

    # --- on rank 0 ---

    def _ledger_opened(self, episode: Episode) -> Mapping[str, Any] | None:
        if not self._recovery.ways_back(episode.to_step):
            return None
        fields = {name: value for name, value in episode.as_json().items() if name != "id"}
        self._recorder.ledger(Event.EPISODE_OPENED, rule=episode.rule, reason=episode.reason, fields=fields)
        return fold_episodes(self._recorder.entries()).as_json()

    def _ask_to_skip(self, episode: Episode) -> None:
        """Once: the log never goes back, and a crash may have come between this line and the roll-back."""
        first, end = episode.samples
        name = f"{first}:{end}"
        log = fold_blocks(self._recorder.entries())
        if any(block.name == name for block in log.blocks) or any(asked.block.get("name") == name for asked in log.open):
            return
        reason = f"{episode.id}: {episode.reason}"
        block = Block("samples", name, "skip", samples=(first, end), reason=reason, by="surefoot", evidence_step=episode.onset_step)
        fields = {**asked_fields(block), "episode": episode.id}
        self._recorder.ledger(Event.BLOCK_ASKED, rule=episode.rule, reason=reason, fields=fields)

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
