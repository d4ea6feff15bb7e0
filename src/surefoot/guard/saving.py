"""Saves: when, under which id, beside the loop or with it, again when one failed, and when to stop because none works.

A save is begun at the end of a step and copied while the next one computes (`staged` waits for that before an update). What became of it
travels in the vector of each step, so all ranks learn it at the same step, and whatever follows is decided by all of them there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path

from surefoot.checkpoint.commit import await_outcome, error_of, no_memory, outcome_of, prepare, tell
from surefoot.checkpoint.manifest import checkpoint_id, read_manifest
from surefoot.checkpoint.retention import boundaries
from surefoot.checkpoint.save_plan import SavePlans
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.staging import CudaCopies, DeviceCopies, Snapshot, Work
from surefoot.core.clock import Clock
from surefoot.core.errors import CheckpointError, SurefootError, Torn
from surefoot.core.events import Event
from surefoot.core.records import Manifest, Signals
from surefoot.core.sections import RunConfig
from surefoot.guard.host_copies import HostCopies
from surefoot.guard.recording import Recorder
from surefoot.guard.save_contents import Contents, SaveContents, overlap_refused_by
from surefoot.guard.save_policy import is_kept_for_good, reason_to_save
from surefoot.guard.state import TrainState
from surefoot.guard.under_way import Failures, SaveWords, UnderWay
from surefoot.guard.upload_thread import upload_thread
from surefoot.monitor.vector import SaveState
from surefoot.tensors.world import World, broadcast_json, gather_json

logger = logging.getLogger(__name__)


class Saver:
    """All saves of this process. Of older ones it knows only the newest commit; the rest is in the ledger and in the folders."""

    def __init__(
        self,
        state: TrainState,
        *,
        config: RunConfig,
        world: World,
        run_dir: Path,
        generation: int,
        recorder: Recorder,
        clock: Clock,
        note_late: Callable[[], None],
    ) -> None:
        self.root = run_dir / "checkpoints"
        self.last_id: str | None = None
        self.last_saved_step = 0
        self.last_stall_s = 0.0
        self._state = state
        self._config = config
        self._section = config.checkpoint
        self._boundaries = boundaries(config)
        self._world = world
        self._recorder = recorder
        self._clock = clock
        self._note_late = note_late
        self._contents = SaveContents(state, config=config, world=world, generation=generation, recorder=recorder, clock=clock)
        self._plans = SavePlans()
        self._copies: DeviceCopies | None = CudaCopies(world.device) if world.device.type == "cuda" else None
        self._under_way: deque[UnderWay] = deque()
        self._point = 0
        self._failures = Failures(config.checkpoint.max_save_tries, began_s=clock.monotonic_s())
        self._put_off: str | None = None
        self._put_off_at_s = 0.0
        self._asked: str | None = None
        self._last_began_s = clock.monotonic_s()
        self._committed_slot: tuple[Slot, str] | None = None
        self._committed_step = 0
        self._told_damaged = ""
        self._begun_at: tuple[int, int] = (-1, 0)
        self._host = HostCopies(config.checkpoint, world=world, recorder=recorder)
        self._uploads = None
        if not self._host.are_the_agents:
            self._uploads = upload_thread(
                self._host.own, config=config, run_dir=run_dir, generation=generation, leads=world.leads, clock=clock
            )

    @property
    def since_last_s(self) -> float:
        """Seconds since the last save began, or since the start."""
        return self._clock.monotonic_s() - self._last_began_s

    @property
    def last_digest(self) -> str | None:
        """On rank 0. State digest of the newest commit."""
        return read_manifest(self.root / self.last_id).state_digest if self.last_id is not None else None

    @property
    def slots(self) -> list[Slot]:
        """This rank's, and those of its siblings on this machine until `close_siblings`: what an agent kept over a restart."""
        return self._host.all

    def close_siblings(self) -> None:
        """Local. After the restore: what other ranks hold is theirs."""
        self._host.close_siblings()

    def stands_on(self, manifest: Manifest) -> None:
        """The state is that of `manifest` now: the parent of the next save."""
        self.last_id, self.last_saved_step, self._committed_step = manifest.id, manifest.step, manifest.step
        self._put_off = self._asked = None
        self._failures.forget()

    def get_ready(self) -> None:
        """Collective over the save group. Plan the first save, see what fits into memory, and take it, beside the loop.

        All ranks raise ConfigError when not even one host copy fits.
        """
        if self._uploads is not None and not self._uploads.is_alive:
            self._uploads.start()
        if overlap_refused_by(self._state) and self._section.overlap:
            self._recorder.say(f"note: saves are not overlapped with the next step: {overlap_refused_by(self._state)}")
        rehearsed = self._contents.now("s0-a1", parent=None, for_plan_only=True)
        self._host.fit(self._prepared(rehearsed).planned, may_reserve=True)

    # --- in each step ---

    def ask(self, reason: str) -> None:
        """Local, on all ranks alike. Save at the end of the next step, beside the loop."""
        self._asked = reason

    def words(self) -> SaveWords:
        """Local. For the vector of this step."""
        oldest = self._under_way[0] if self._under_way else None
        state, _ = self._look(oldest) if oldest else (SaveState.NONE, None)
        has_ended = state in (SaveState.COMMITTED, SaveState.FAILED)  # then all ranks know it before a slot is filled
        return SaveWords(
            oldest.point if oldest else 0,
            state,
            slot_free=self._free_slot(kept_from=1 if has_ended else 0) is not None,
            wants_save=self._found_damaged(),
        )

    def staged(self) -> float:
        """Local. Wait until nothing reads the live tensors any more; the seconds that took. Bounded by `checkpoint.upload_limit_s`."""
        started_s = self._clock.monotonic_s()
        for save in self._under_way:
            if save.snapshot is not None:
                save.snapshot.wait(limit_s=self._section.upload_limit_s)
        waited_s = self._clock.monotonic_s() - started_s
        self.last_stall_s += waited_s
        return waited_s

    def settle(self, signals: Signals) -> str | None:
        """Collective over the save group when a save failed, else local. What all ranks agreed on in this step: the id of a commit.

        Raises CheckpointError when saves have failed for so long that the run must not go on.
        """
        if not signals.save_outcome or not self._under_way or self._under_way[0].point != signals.save_point:
            return None
        save = self._under_way.popleft()
        if signals.save_outcome == "committed":
            self._committed(save)
            return save.id
        _, told = self._look(save)
        if save.slot is not None:
            save.slot.cancel()
        self._note_failure(save, told)
        return None

    def due(self, signals: Signals, *, auto_steps: int) -> tuple[str, bool] | None:
        """Local, the same on all ranks. Why the present state is saved now, and whether the loop waits for the commit; or None.

        A save for which some rank has no free slot is put off to the first step at which all have one, but for no longer than an upload may
        take: then it is tried, and fails by name. One that is wanted of this very step is not put off: the loop waits, as at the end.
        """
        step = self._state.step
        wanted = reason_to_save(
            step,
            signals,
            self._section,
            num_steps=self._config.train.num_steps,
            last_saved_step=self.last_saved_step,
            auto_steps=auto_steps,
        )
        asked, self._asked = self._asked, None
        reason = wanted or asked or self._failures.again or self._put_off
        if reason is None or step == self.last_saved_step:
            return None
        if step >= self._config.train.num_steps or signals.leave_requested:
            return reason, True
        is_exact = wanted is not None and is_kept_for_good(step, milestone_steps=self._section.milestone_steps, boundaries=self._boundaries)
        if is_exact and not signals.save_slot_free:
            self._put_off = None  # what was put off until now is saved with it
            return reason, True
        now_s = signals.ranks[0].step_clock_s  # one clock for all
        if self._put_off is None:
            self._put_off_at_s = now_s
        if not signals.save_slot_free and now_s - self._put_off_at_s <= self._section.upload_limit_s:
            self._put_off = reason
            return None
        self._put_off = None
        return reason, False

    def begin(self, *, reason: str) -> str:
        """Collective over the save group. Begin to save the present state beside the loop; the id under which it is tried.

        Whatever goes wrong is told in the vector of the next step.
        """
        is_retry, self._failures.again = self._failures.again is not None, None
        overlap = self._section.overlap and not is_retry and not overlap_refused_by(self._state)
        save = self._begin(reason, overlap=overlap)
        self._under_way.append(save)
        return save.id

    def save(self, *, reason: str) -> str | None:
        """Collective over the save group. Save the present state and wait for the commit; its id, or None when no try worked.

        Raises CheckpointError when the run is finished, and thus must not go unsaved, or when it must not go on.
        """
        self.drain()
        error: SurefootError | None = None
        for _ in range(self._section.max_save_tries):
            self._host.wait_free(limit_s=self._section.upload_limit_s, clock=self._clock)
            save = self._begin(reason, overlap=False)
            error = self._await(save)
            if error is None:
                self._committed(save)
                return save.id
        if error is not None and self._state.step >= self._config.train.num_steps:
            raise error
        return None

    def drain(self) -> None:
        """Collective over the save group. Until no save is under way: nothing reads the live tensors, and all outcomes are known.

        For what changes the state in place: a roll-back, a restore. Raises CheckpointError as `settle` does.
        """
        while self._under_way:
            save = self._under_way.popleft()
            if self._await(save) is None:
                self._committed(save)

    def save_for_good(self) -> None:
        """Collective over the save group. The last commit stands when storage gave it back; one that came back damaged is saved again.

        Raises CheckpointError when each of `checkpoint.max_save_tries` came back damaged: a finished run must not stand on such a one.
        """
        for _ in range(self._section.max_save_tries):
            if not broadcast_json(self._world, self._came_back_damaged()):
                return
            self.save(reason="storage gave back other bytes than the last save wrote")
        if broadcast_json(self._world, self._came_back_damaged()):
            raise CheckpointError(
                f"the last {self._section.max_save_tries} saves were written, but storage gave back other bytes",
                where=self.last_id or "",
                hint="the disk, its cable or its driver is at fault: another [run] dir on another disk, or older checkpoints, are safer",
            )

    def _came_back_damaged(self) -> bool:
        """Local. On rank 0: wait until storage gave back the newest commit, at most `checkpoint.upload_limit_s`; whether it is damaged."""
        if not self._world.leads or self._committed_slot is None:
            return False
        slot, checkpoint = self._committed_slot
        deadline_s = self._clock.monotonic_s() + self._section.upload_limit_s
        while self._clock.monotonic_s() < deadline_s and not self._uploads_are_gone():
            header = slot.header()
            if header is None or header.id != checkpoint:
                return False
            if header.read_back:
                return header.read_back == "damaged"
            self._clock.sleep(0.005)
        return False

    def close(self, *, in_order: bool, read_back: bool) -> None:
        """Local. Let staging and uploads of this process end. Where an agent has the slots, it goes on with what is staged."""
        launch = self._config.launch
        after_error_s = launch.grace_s if self._world.size == 1 else launch.settle_s  # other ranks' parts may never come
        limit_s = self._section.upload_limit_s if in_order else after_error_s
        for save in self._under_way:
            if save.snapshot is not None:
                _let_end(save.snapshot, limit_s=limit_s)
        self._host.await_reserved()
        if self._uploads is not None:
            self._uploads.end(limit_s=limit_s, read_back=read_back)
        self._under_way.clear()
        self._committed_slot = None
        if self._copies is not None:
            self._copies.close()
        self._host.close()

    # --- one save ---

    def _begin(self, reason: str, *, overlap: bool) -> UnderWay:
        self._last_began_s = started_s = self._clock.monotonic_s()
        self._point += 1
        step, tries = self._begun_at
        retry = tries if step == self._state.step else 0
        self._begun_at = self._state.step, retry + 1
        checkpoint = checkpoint_id(self._state.step, attempt=self._state.attempt, retry=retry)
        save = UnderWay(checkpoint, self._state.step, self._point, reason, started_s)
        self._note_late()
        try:
            contents = self._contents.now(checkpoint, parent=self.last_id)
            work = self._prepared(contents, overlap=overlap, reason=reason)
            self._host.fit(work.planned, may_reserve=not self._under_way)
        except CheckpointError as refused:
            save.error = refused
        else:
            self._stage(save, work)
        self.last_saved_step = self._state.step
        self.last_stall_s = self._clock.monotonic_s() - started_s
        return save

    def _prepared(self, contents: Contents, *, overlap: bool = False, reason: str = "") -> Work:
        """Collective over the save group. All ranks raise the same CheckpointError."""
        return prepare(
            contents.draft,
            state=contents.state,
            extras=contents.extras,
            world=self._world,
            plans=self._plans,
            overlap=overlap,
            updates=lambda: self._state.updates,
            reason=reason,
            error=contents.error,
        )

    def _stage(self, save: UnderWay, work: Work) -> None:
        """Local. Fill a slot, or say why not: no other rank waits here."""
        self._host.await_reserved()
        slot = self._free_slot()
        if slot is None:
            save.error = CheckpointError("no slot is free: the upload before is not done", where=f"rank {self._world.rank}")
            return
        try:
            save.slot = self._host.take(slot)
            save.snapshot = Snapshot(slot, work, copies=self._copies, on_end=self._kick)
            save.snapshot.begin()
            save.snapshot.start()
        except OSError as error:
            save.error = no_memory(error, where=str(slot))
        except SurefootError as error:
            save.error = error

    def _free_slot(self, *, kept_from: int = 0) -> Slot | None:
        """A slot that says what became of a save is kept until all ranks know it: those of the saves under way, but for the first ones."""
        return self._host.free(but=[save.slot for save in list(self._under_way)[kept_from:] if save.slot is not None])

    def _look(self, save: UnderWay) -> tuple[SaveState, SurefootError | None]:
        """Local. What this rank knows of a save."""
        error = save.error or (save.snapshot.error if save.snapshot is not None else None)
        if error is not None or save.slot is None:
            return SaveState.FAILED, error
        outcome, error = outcome_of(save.slot, save.id)
        if outcome:
            return (SaveState.COMMITTED, None) if outcome == "committed" else (SaveState.FAILED, error)
        if self._uploads_are_gone():
            return SaveState.FAILED, CheckpointError("the upload thread died", where=save.id)
        if (passed_s := self._clock.monotonic_s() - save.began_s) > self._section.upload_limit_s:
            hint = "raise checkpoint.upload_limit_s if storage is that slow"
            return SaveState.FAILED, CheckpointError(f"not committed after {passed_s:.0f} s", where=save.id, hint=hint)
        return SaveState.UNDER_WAY, None

    def _await(self, save: UnderWay) -> SurefootError | None:
        """Collective over the save group. Wait for the outcome: None when it is committed, else the error, the same on all ranks, noted."""
        try:
            await_outcome(
                self._world,
                slot=save.slot,
                checkpoint=save.id,
                error=lambda: self._look(save)[1],
                work=lambda: False,
                limit_s=self._section.upload_limit_s,
                clock=self._clock,
            )
        except CheckpointError as error:
            if save.slot is not None:
                save.slot.cancel()
                self._kick()
            self._note(save, error)
            return error
        return None

    def _committed(self, save: UnderWay) -> None:
        self.last_id, self._committed_step = save.id, save.step
        self._committed_slot = (save.slot, save.id) if save.slot is not None else None
        self._failures.none(now_s=self._clock.monotonic_s())

    def _note_failure(self, save: UnderWay, told: SurefootError | None) -> None:
        """Collective over the save group. All ranks failed this save in this step: gather why, and decide what follows."""
        causes = gather_json(self._world, tell(told) if told else None)
        self._note(save, error_of([["failed", cause] if cause else ["", None] for cause in causes], save.id))

    def _note(self, save: UnderWay, error: SurefootError) -> None:
        """Collective over the save group. Say that a save failed, and count it. Raises it when the run must not go on."""
        self._recorder.warn(f"save {save.id} failed: {error}")
        event = Event.SNAPSHOT_TORN if isinstance(error, Torn) else Event.SAVE_FAILED
        self._recorder.ledger_if_possible(
            event, reason=str(error), fields={"id": save.id, "retry": self._failures.tries, "wanted": save.reason}
        )
        if self.last_saved_step == save.step:
            self.last_saved_step = -1  # this state is not saved
        self._failures.one(save.reason)
        unsaved_s = float(broadcast_json(self._world, self._clock.monotonic_s() - self._failures.last_success_s))  # one clock for all
        if self._failures.points >= self._section.max_failed_saves and unsaved_s >= self._section.save_grace_s:
            raise error

    def _kick(self) -> None:
        if self._uploads is not None:
            self._uploads.kick()

    def _uploads_are_gone(self) -> bool:
        return self._uploads is not None and not self._uploads.is_alive

    def _found_damaged(self) -> bool:
        """Local. Whether storage gave back something else than the newest commit; said once."""
        if self._committed_slot is None:
            return False
        slot, checkpoint = self._committed_slot
        header = slot.header()
        if header is None or header.id != checkpoint or header.read_back != "damaged" or self._told_damaged == checkpoint:
            return False
        self._told_damaged = checkpoint
        return True


def _let_end(snapshot: Snapshot, *, limit_s: float) -> None:
    """On the way out there may be another error already, which is the one to tell."""
    try:
        snapshot.join(limit_s=limit_s)
    except SurefootError as error:
        logger.warning("%s", error)
