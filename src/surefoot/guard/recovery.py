"""Verified recovery, bound to the loop: restore, compare the next steps, and go back a generation where they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from surefoot.checkpoint.restore import Loaded
from surefoot.core.errors import CheckpointError, ConfigError, DataError
from surefoot.core.events import Event
from surefoot.core.hashing import sha256_json
from surefoot.core.identity import code_hashes, section_hashes
from surefoot.core.layouts import topology
from surefoot.core.ports import EvalPort, NamedData
from surefoot.core.records import CheckpointRef, Halt, LedgerEntry, Manifest, Resumed
from surefoot.core.sections import RunConfig
from surefoot.guard.agreeing import agree_ranks
from surefoot.guard.environment import changed_facts, describe_environment, gather_devices
from surefoot.guard.recording import Recorder
from surefoot.guard.replay import (
    Difference,
    FallBack,
    Figures,
    GoOn,
    Mode,
    Recorded,
    Replay,
    StopHere,
    advance,
    after_difference,
    from_json,
    to_json,
)
from surefoot.guard.restoring import Loader
from surefoot.guard.saving import Saver
from surefoot.guard.state import TrainState
from surefoot.guard.steering import Steering
from surefoot.guard.survey import Survey, survey, survey_from_json
from surefoot.guard.trajectory import (
    COLUMNS,
    DataChange,
    Facts,
    difference_fields,
    facts_of,
    fold_history,
    recorded_after,
    saw_the_same,
    stage_changes,
)
from surefoot.observe.interruptions import Interruptions
from surefoot.observe.lineage import Lineage, candidates, fold_lineage
from surefoot.tensors.world import World, broadcast_json, gather_json, lead

NOTHING_RECORDED = "nothing was recorded after it"
DATA_CHANGED = "what follows was recorded with samples that are left out, or changed, by now"


@dataclass(frozen=True, slots=True)
class RollBackWay:
    """Where to go back to on purpose: the newest clean checkpoint of at most `to_step`, or the one that is named.

    What was recorded up to step `trusted_until` is well: the replay is compared with it. `fields` are more for the ledger.
    """

    to_step: int
    rule: str
    reason: str
    trusted_until: int
    checkpoint: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotBack:
    """Why the checkpoint that a person named does not load. `is_lost`: it had begun to, so the state from before is no more."""

    reason: str
    is_lost: bool


class Recovery:
    """One per guard. Ranks hold the same records and see the same figures, so each knows by itself whether a step differs."""

    def __init__(
        self,
        state: TrainState,
        *,
        config: RunConfig,
        world: World,
        generation: int,
        recorder: Recorder,
        saver: Saver,
        steering: Steering,
        evaluation: EvalPort | None,
        root: Path,
    ) -> None:
        self._state = state
        self._config = config
        self._world = world
        self._generation = generation
        self._recorder = recorder
        self._saver = saver
        self._steering = steering
        self._root = root
        self.interruptions = Interruptions(0, 0.0, None)
        self._replay: Replay | None = None
        self._asked_for = False
        self._devices: Mapping[str, object] = {}
        self._back_to: FallBack | GoOn | None = None
        self._loader = Loader(state, config, world, recorder, steering, root, evaluation, self._facts, lambda: saver.slots)

    @property
    def must_go_back(self) -> bool:
        """Whether the next thing to do is `go_back`; nothing is saved until then."""
        return self._back_to is not None

    @property
    def stands_on(self) -> str:
        """For the reason of a save that is made before the replay is over; empty afterwards."""
        if self._replay is None:
            return ""
        replay = self._replay
        return f"; stands on {replay.checkpoint}, {replay.num_done} of whose {len(replay.recorded)} steps to compare are verified"

    def restore(self) -> Resumed:
        """Collective over the world. Begin the next attempt, from the newest checkpoint that proves itself or from the start.

        A checkpoint that does not is rejected by name and the one before it is tried. Raises CheckpointError when there were some and
        none loads, ConfigError when the config of the newest differs and nobody accepted that, DataError when its data is gone, or is not
        the same on all ranks.
        """
        agree_ranks(self._state, config=self._config, world=self._world)
        self._agree_on_data()
        self._devices = gather_devices(self._world)
        surveyed = lead(self._world, lambda: survey(generation=self._generation, recorder=self._recorder, root=self._root))
        found = survey_from_json(broadcast_json(self._world, surveyed))
        self.interruptions = found.interruptions
        self._state.attempt = found.last_attempt
        self._steering.give()
        loaded, rejected = self._loader.load_first(found.candidates)
        if loaded is None and (rejected or found.wish):
            raise self._none_loads(found, rejected)
        resumed = self._begin(loaded, found)
        self._recorder.say(resumed.message)
        if loaded is not None:
            self._say_if_over()
        return resumed

    def take(self, seen: Figures) -> Halt | None:
        """Collective over the save group where a step differs, else local. Compare a finished step.

        A Halt where nobody can say how to go on.
        """
        if self._replay is None:
            return None
        self._replay, difference = advance(self._replay, seen)
        if difference is None:
            self._say_if_over()
            return None
        told = lead(self._world, lambda: self._decide(difference))
        decision = _decision_from(broadcast_json(self._world, told))
        if isinstance(decision, StopHere):
            self._replay = None
            return Halt("replay", decision.reason)
        if isinstance(decision, GoOn) and decision.checkpoint is None:
            self._accept(decision, difference)
        else:
            self._back_to = decision
        return None

    def go_back(self) -> None:
        """Collective over the world. Put another checkpoint in the place of the present state, under a new attempt."""
        back_to, left = self._back_to, self._replay
        if back_to is None or back_to.checkpoint is None or left is None:
            return
        self._back_to = None
        self._saver.drain()
        if isinstance(back_to, FallBack):
            self._recorder.ledger(Event.CHECKPOINT_REJECTED, rule="replay", reason=back_to.reason, fields={"id": left.checkpoint})
        told = lead(self._world, lambda: self._others(back_to))
        found = Survey(self._state.attempt, list(broadcast_json(self._world, told)))
        self._recorder.say(f"going back to {back_to.checkpoint}: {back_to.reason}")
        loaded, rejected = self._loader.load_first(found.candidates)
        if loaded is None:
            raise self._none_loads(found, rejected)
        resumed = self._begin(loaded, found)
        self._recorder.say(resumed.message)
        if isinstance(back_to, GoOn):
            self._accept(back_to, None)
        else:
            self._say_if_over()

    def drain(self) -> None:
        """Collective over the save group. Until no save is under way."""
        self._saver.drain()

    def ways_back(self, to_step: int) -> list[dict[str, str]]:
        """On rank 0. Checkpoints of the present line from step `to_step` or before that may be taken unasked, best first."""
        return [{"id": ref.id, "state_digest": ref.state_digest} for ref in self._clean(to_step)]

    def roll_back(self, way: RollBackWay) -> Resumed | NotBack:
        """Collective over the save group. Put an older checkpoint of the line in the place of the present state, under a new attempt.

        Its next steps are compared with what was recorded up to `trusted_until`. NotBack when one that is named does not load: then no
        attempt has begun. Raises CheckpointError when it may be any, and none loads.
        """
        self._saver.drain()
        told = lead(
            self._world, lambda: [found for found in self.ways_back(way.to_step) if way.checkpoint in ("", found["id"])] or self._named(way)
        )
        found = Survey(self._state.attempt, list(broadcast_json(self._world, told)))
        self._recorder.say(f"going back to {found.candidates[0]['id'] if found.candidates else 'nothing'}: {way.reason}")
        loaded, rejected = self._load_named(way.checkpoint, found) if way.checkpoint else self._loader.load_first(found.candidates)
        if loaded is None and way.checkpoint:
            return NotBack(rejected[0] if rejected else f"{way.checkpoint}: it is not there", self._loader.has_touched)
        if loaded is None:
            raise self._none_loads(found, rejected)
        self._back_to = self._replay = None
        resumed = self._begin(loaded, found, way=way)
        self._recorder.say(resumed.message)
        self._say_if_over()
        return resumed

    def _load_named(self, checkpoint: str, found: Survey) -> tuple[Loaded | None, list[str]]:
        """Collective over the save group. Where it does not load the data goes on from where it stood."""
        cursor = self._state.data.cursor()
        try:
            loaded, rejected = self._loader.load_first(found.candidates)
        except (ConfigError, DataError) as error:  # rank 0 compared it with settings and data of now: all ranks know the same
            loaded, rejected = None, [f"{checkpoint}: {error}"]
            self._recorder.ledger(Event.CHECKPOINT_REJECTED, reason=str(error), fields={"id": checkpoint})
        if loaded is None:
            self._state.data.seek(cursor)
        return loaded, rejected

    def _clean(self, to_step: int) -> list[CheckpointRef]:
        lineage = fold_lineage(self._recorder.entries())
        return [ref for ref in candidates(lineage) if ref.step <= to_step]

    def _named(self, way: RollBackWay) -> list[dict[str, str]]:
        """On rank 0. A checkpoint that a person named, wherever it stands."""
        ref = fold_lineage(self._recorder.entries()).ref(way.checkpoint)
        return [{"id": ref.id, "state_digest": ref.state_digest}] if ref is not None else []

    def _agree_on_data(self) -> None:
        """Collective over the save group. Raises the same DataError on all ranks when they have different data: each node reads its own."""
        by_rank = gather_json(self._world, self._data_hash())
        others = [rank for rank, found in enumerate(by_rank) if found != by_rank[0]]
        if others:
            got, wanted = by_rank[others[0]], by_rank[0]
            raise DataError(
                f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} of {self._world.size} would train on data that is not rank "
                f"0's: {got[:12] or 'without identity'} and {wanted[:12] or 'without identity'}",
                where=self._config.data.path or "data",
                hint="the manifests differ: copy the prepared folder of rank 0's node to the nodes of those ranks",
                got=got,
                wanted=wanted,
                ranks=tuple(others),
            )

    def _begin(self, loaded: Loaded | None, found: Survey, *, way: RollBackWay | None = None) -> Resumed:
        """The next attempt, from what was just loaded: counters, records to compare with, ledger."""
        state, wish = self._state, found.wish
        if loaded is not None:
            state.take_extras(dict(loaded.extras))
            state.loss = loaded.manifest.loss
            self._saver.stands_on(loaded.manifest)
        before = self._recorder.entries()
        self._asked_for = wish is not None or (way is not None and bool(way.checkpoint))
        state.attempt += 1
        manifest = loaded.manifest if loaded else None
        fields: dict[str, object] = {"checkpoint": manifest.id if manifest else None, **self._fact_fields()}
        more = {"asked_by": wish.by} if wish else {}
        self._recorder.ledger(Event.ATTEMPT_STARTED, fields={**fields, **more, **({"devices": self._devices} if self._devices else {})})
        if loaded is None or manifest is None:
            self._replay = None
            self._steering.take(attempt=state.attempt)
            start = "starting" if state.attempt == 1 else "no checkpoint yet, starting over"
            message = f"{start} at step 0, attempt {state.attempt}, seed {self._config.run.seed}"
            return Resumed(0, state.attempt, self._generation, None, None, message)
        weights = {"checkpoint": manifest.id, "state_digest": manifest.state_digest}
        if way is None:
            self._recorder.ledger(Event.RUN_RESUMED, fields=weights)
        else:
            told = {**weights, "trusted_until": way.trusted_until, **way.fields}
            self._recorder.ledger(Event.RUN_ROLLED_BACK, rule=way.rule, reason=way.reason, fields=told)
        self._tell_differences(manifest)
        self._steering.take(attempt=state.attempt)  # before anything of this attempt is compared with what others recorded
        self._replay = self._records_after(manifest, before if way is None else self._recorder.entries())
        for note in loaded.notes:
            self._recorder.say(f"note: {note}")
        return Resumed(manifest.step, state.attempt, self._generation, manifest.id, manifest.state_digest, self._restored_line(manifest))

    def data_changed(self) -> None:
        """Local. Something is left out of the data from now on: what was recorded of steps that hold it is compared with no more."""
        replay = self._replay
        if replay is None:
            return
        to_come = replay.recorded[replay.num_done :]
        changes = self._changes([(step.attempt, step.figures.next_sample) for step in to_come])
        kept = list(takewhile(lambda step: saw_the_same(step, changes), to_come))
        if replay.num_done + len(kept) < len(replay.recorded):
            self._replay = replace(replay, recorded=(*replay.recorded[: replay.num_done], *kept), cut_because=DATA_CHANGED)
            self._say_if_over()

    def _records_after(self, manifest: Manifest, before: list[LedgerEntry]) -> Replay:
        """Collective over the save group. `before` are the entries of the ledger up to this attempt, on rank 0."""
        told = lead(self._world, lambda: [to_json(found) for found in self._recorded(manifest, before)])
        of_now, recorded = (from_json(rows) for rows in broadcast_json(self._world, told))
        because = DATA_CHANGED if len(of_now) < len(recorded) else ""
        return Replay(manifest.id, manifest.step, of_now, self._config.checkpoint.replay_tolerance, cut_because=because)

    def _recorded(self, manifest: Manifest, before: list[LedgerEntry]) -> list[tuple[Recorded, ...]]:
        """On rank 0. What was recorded over the data of now, and what would count if nothing had been left out since."""
        max_steps = self._config.checkpoint.replay_steps
        lineage = fold_lineage(before)
        ref = lineage.ref(manifest.id)
        if ref is None or not max_steps:
            return [(), ()]
        rows = self._recorder.rows(range(manifest.step + 1, manifest.step + 1 + max_steps), columns=COLUMNS)
        history, now = fold_history(before, refs=lineage.refs), self._facts()
        left_out = self._changes([(int(row["attempt"]), int(row["next_sample"])) for row in rows])
        changes = (*left_out, *stage_changes(before))
        return [recorded_after(ref, history=history, rows=rows, now=now, max_steps=max_steps, changes=those) for those in (changes, ())]

    def _changes(self, recorded: Sequence[tuple[int, int]]) -> tuple[DataChange, ...]:
        """What is left out by now, and was not in some of the `recorded` steps: (attempt, next_sample) of each."""
        if not recorded:
            return ()
        return self._steering.changes(since=min(attempt for attempt, _ in recorded), until=max(sample for _, sample in recorded))

    def _decide(self, difference: Difference) -> dict[str, Any]:
        """On rank 0. What follows from a difference. Ledgered before the step's row is written: no later start takes that for a record."""
        entries = self._recorder.entries()
        lineage = fold_lineage(entries)
        history = fold_history(entries, refs=lineage.refs)
        older = _older_than(difference.checkpoint, lineage)
        decision = after_difference(difference, before=history.differences, older=older, asked_for=self._asked_for)
        self._recorder.ledger(Event.REPLAY_DIFFERED, reason=difference.reason, fields=difference_fields(difference))
        self._recorder.say(f"the replay of {difference.checkpoint} differs: {difference.reason}")
        return {"kind": type(decision).__name__, **asdict(decision)}

    def _others(self, back_to: FallBack | GoOn) -> list[dict[str, str]]:
        """On rank 0. The checkpoint to go back to, and those behind it in case it does not load."""
        lineage = fold_lineage(self._recorder.entries())
        wanted = back_to.checkpoint or ""
        ids = [wanted, *(_older_than(wanted, lineage) if isinstance(back_to, FallBack) else ())]
        by_id = {ref.id: ref for ref in lineage.refs}
        return [{"id": name, "state_digest": by_id[name].state_digest} for name in ids if name in by_id]

    def _accept(self, decision: GoOn, difference: Difference | None) -> None:
        """Go on although a replay differed."""
        replay, self._replay = self._replay, None
        self._asked_for = False
        if replay is None:
            return
        fields: dict[str, object] = {
            "checkpoint": replay.checkpoint,
            "from_step": replay.from_step,
            "num_steps": 0,
            "mode": Mode.SHOWN.value,
        }
        if decision.rule == "outvoted" and replay.recorded:
            fields["outvoted"] = replay.recorded[max(replay.num_done - 1, 0)].attempt
        if difference is not None:
            fields["largest_difference"] = replay.largest
        self._recorder.ledger(Event.REPLAY_VERIFIED, rule=decision.rule, reason=decision.reason, fields=fields)
        self._recorder.say(f"going on from {replay.checkpoint}: {decision.reason}")

    def _say_if_over(self) -> None:
        replay = self._replay
        if replay is None or not replay.is_over:
            return
        self._replay = None
        self._asked_for = False
        num_steps = replay.num_done if replay.mode != Mode.SHOWN else 0
        reason = _outcome(replay, num_steps)
        fields: dict[str, object] = {
            "checkpoint": replay.checkpoint,
            "from_step": replay.from_step,
            "num_steps": num_steps,
            "mode": replay.mode.value,
            "num_compared": replay.num_done,
            "largest_difference": replay.largest,
        }
        self._recorder.ledger(Event.REPLAY_VERIFIED, reason=reason, fields=fields)
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        where = f"step {replay.from_step}, checkpoint {replay.checkpoint}, config {self._config_word()}"
        self._recorder.say(f"resumed from {where}, verified {steps}: {reason}")

    def _restored_line(self, manifest: Manifest) -> str:
        replay = self._replay
        line = (
            f"restored step {manifest.step}, checkpoint {manifest.id}, attempt {self._state.attempt}, config {self._config_word()}, "
            f"digest verified {manifest.state_digest[:16]}"
        )
        canary = self._loader.canary
        if canary is not None and canary.mode != Mode.SHOWN:
            line += ", canary verified" if canary.agrees else ", canary within the tolerance"
        if replay is None or replay.is_over:
            return line
        attempts = sorted({step.attempt for step in replay.recorded})
        names = " and ".join(str(attempt) for attempt in attempts)
        return f"{line}; the next {len(replay.recorded)} are compared with what attempt {names} recorded"

    def _tell_differences(self, manifest: Manifest) -> None:
        now = facts_of(self._fact_fields())
        changed = changed_facts(facts_of(asdict(manifest)).surroundings, now.surroundings)
        if changed:
            self._recorder.ledger(Event.ENVIRONMENT_CHANGED, fields={"changed": changed})
            words = ", ".join(f"{name} was {before}, is {now}" for name, (before, now) in changed.items())
            self._recorder.say(f"note: the surroundings changed, so bits may differ from an undisturbed run: {words}")
        data = self._state.data
        if isinstance(data, NamedData) and data.data_change:
            self._recorder.ledger(Event.DATA_ACCEPTED, rule="--on-data-change", reason=data.data_change)
            self._recorder.say(f"note: the data changed; {data.data_change}")

    def _none_loads(self, found: Survey, rejected: list[str]) -> CheckpointError:
        if found.wish is not None:
            why = rejected[0] if rejected else "it is not there"
            return CheckpointError(
                f"{found.wish.checkpoint}, which {found.wish.by} asked for, does not load: {why}",
                where=str(self._root),
                hint="the same command without --resume-from goes on from the newest",
            )
        way_on = ""
        if found.left_out:
            *_, last = found.left_out
            them = f"{', '.join(found.left_out)} {'was' if len(found.left_out) == 1 else 'were'} not tried (abandoned or suspect)"
            way_on = f"{them}: `surefoot train RUN --resume-from {last} --yes` does; "
        what = f"none of the {len(rejected)} checkpoints of this run loads; the last one tried, {rejected[-1]}"
        return CheckpointError(
            what if len(rejected) > 1 else f"the only checkpoint of this run that may be tried does not load: {rejected[0]}",
            where=str(self._root),
            hint=f"{way_on}`surefoot checkpoint verify` names what is damaged in each; another [run] dir starts anew",
        )

    def _facts(self) -> Facts:
        return facts_of(self._fact_fields())

    def _fact_fields(self) -> dict[str, object]:
        return {
            "environment": describe_environment(
                self._state.model, self._state.optimizer, self._world, exact_sums=self._state.numerics is not None
            ),
            "topology": topology(self._config.parallel),
            "config_hashes": section_hashes(self._config) | code_hashes(self._config),
            "data_hash": self._data_hash(),
        }

    def _data_hash(self) -> str:
        data = self._state.data
        return data.data_hash if isinstance(data, NamedData) else ""

    def _config_word(self) -> str:
        return sha256_json(section_hashes(self._config))[:8]


def _older_than(checkpoint: str, lineage: Lineage) -> list[str]:
    """What could be restored unasked and was committed on the line before `checkpoint`, best first."""
    if checkpoint not in lineage.line:
        return []
    before = set(lineage.line[: lineage.line.index(checkpoint)])
    return [ref.id for ref in candidates(lineage) if ref.id in before]


def _decision_from(told: dict[str, Any]) -> FallBack | GoOn | StopHere:
    kinds: dict[str, type[FallBack] | type[GoOn] | type[StopHere]] = {kind.__name__: kind for kind in (FallBack, GoOn, StopHere)}
    kind = kinds[told.pop("kind")]
    return kind(**told)


def _outcome(replay: Replay, num_steps: int) -> str:
    if not replay.recorded:
        return replay.cut_because or NOTHING_RECORDED
    return "; ".join(filter(None, (_found(replay), replay.cut_because)))


def _found(replay: Replay) -> str:
    if replay.mode == Mode.SHOWN:
        return f"not comparable, config, code or data differ; over {replay.num_done} the loss moved by up to {replay.largest:.2g} of itself"
    if replay.mode == Mode.BITS:
        return "the same bits"
    return f"within {replay.tolerance:g}, the largest difference in loss is {replay.largest:.2g} of it"
