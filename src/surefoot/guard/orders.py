"""Orders of people, bound to the loop: seen by rank 0, agreed on in the exchange of a step, followed by all ranks between two steps.

The answer in the ledger is one line, and whatever has to survive a kill hangs on that line: a pause holds, a stop is not started again, a
roll-back is the wish of the next start. Without the line the order is still open, and nothing was done that cannot be done again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from surefoot.coordinate.beats import BeatSlot
from surefoot.core.clock import Clock
from surefoot.core.errors import TrainingHalted
from surefoot.core.events import Event
from surefoot.core.records import Leave, Phase, Resumed, Signals
from surefoot.core.sections import RunConfig
from surefoot.guard.order_rules import Refusal, Standing, answer, answered, blocks_of, told_of
from surefoot.guard.recording import Recorder
from surefoot.guard.recovery import NotBack, RollBackWay
from surefoot.guard.saving import Saver
from surefoot.guard.state import TrainState
from surefoot.observe.blocks import asked_with_fields
from surefoot.observe.control import ControlTail, NoOrder, Order
from surefoot.observe.incidents import open_episodes
from surefoot.observe.live import read_lock
from surefoot.tensors.world import World, broadcast_json, gather_json, lead

TICK_S = 0.5
"""How often a paused run looks up. Nobody notices a sooner answer, and ranks that sleep leave their cores to others."""
_DEFAULT_PAUSE_S = 600.0
_MAX_LINES_TOLD = 20  # of those that are no orders, by one process: a file of rubbish must not fill the ledger

Done = Leave | Literal["resumed"] | None


class Orders:
    """One per guard, on every rank. Only rank 0 reads the control file.

    `roll_back` puts another checkpoint in the place of the present state, on all ranks, or says why not; `looked_into` is called there when
    a person has decided about what was found, and the ledger says so; `asked_to_leave` says why this rank should leave.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        config: RunConfig,
        world: World,
        recorder: Recorder,
        saver: Saver,
        run_dir: Path,
        clock: Clock,
        beat: BeatSlot,
        asked_to_leave: Callable[[], str | None],
        roll_back: Callable[[RollBackWay], Resumed | NotBack],
        looked_into: Callable[[], object],
    ) -> None:
        self._state = state
        self._config = config
        self._world = world
        self._recorder = recorder
        self._saver = saver
        self._run_dir = run_dir
        self._clock = clock
        self._beat = beat
        self._asked_to_leave = asked_to_leave
        self._roll_back = roll_back
        self._looked_into = looked_into
        self._tail = ControlTail(run_dir, clock=clock, look_every_s=config.observe.ledger_look_s) if world.leads else None
        self._waiting: list[Order | NoOrder] = []
        self._answered: set[str] | None = None
        self._num_lines_told = 0
        self._agreed = False
        self._until_s = 0.0
        self._by_policy = False

    @property
    def is_asked(self) -> bool:
        """Local. Whether somebody waits for an answer. Cheap: for the vector of each step."""
        with suppress(OSError):  # a look that failed is made again
            self._look()
        return bool(self._waiting)

    def agreed(self, signals: Signals) -> None:
        """Local. What came out of the exchange of a step."""
        self._agreed = signals.order_requested

    def take_agreed(self) -> Leave | None:
        """Collective over the save group when the last exchange asked for it, else local. Follow all orders, one after the other.

        A Leave where the run ends by them. After a roll-back the state is another one, at its step.
        """
        is_due, self._agreed = self._agreed, False
        if not is_due:
            return None
        done = self._follow_all(is_paused=False)
        return done if isinstance(done, Leave) else None

    def hold(self, *, rule: str, reason: str, limit_s: float, save: bool = True, by: str = "") -> Literal["resumed", "left"]:
        """Collective over the save group. Stand still until a person says `resume`, or for `limit_s`; 0 ends at once.

        With `save` the state is saved first, so that whatever happens meanwhile loses nothing. `by` is who asked for it, empty for the
        policy. "left": halted in the ledger, and the loop ends with the code of a halt.
        """
        saved = self._save_now(f"the run is paused: {reason}") if save else None
        who = {"by": by} if by else {}
        self._recorder.ledger(Event.RUN_PAUSED, rule=rule, reason=reason, fields={"limit_s": limit_s, "checkpoint": saved, **who})
        self._recorder.say(f"paused after step {self._state.step}: {reason}; `surefoot resume {self._run_dir}` goes on")
        begun_s = self._clock.monotonic_s()
        self._until_s, self._by_policy = begun_s + limit_s, not by
        while True:
            self._beat.beat(phase=Phase.STOPPED, step=self._state.step)
            if (done := self._follow_all(is_paused=True)) is not None:
                break
            now_s = self._clock.monotonic_s()
            if (why := self._why_leave(begun_s, now_s=now_s)) is not None:
                done = Leave(TrainingHalted.exit_code, f"{reason}; {why}")
                break
            self._clock.sleep(min(TICK_S, max(0.0, self._until_s - now_s)))
        paused_s = self._clock.monotonic_s() - begun_s
        if isinstance(done, Leave):
            self._recorder.ledger(Event.RUN_HALTED, rule=rule, reason=done.reason, fields=who)
            return "left"
        self._recorder.ledger(Event.RUN_UNPAUSED, rule=rule, reason=reason, fields={"paused_s": round(paused_s, 3)})
        self._recorder.say(f"going on after {paused_s:.0f} s of pause")
        return "resumed"

    def refuse_rest(self, why: str) -> None:
        """On rank 0, else nothing. The run ends: whoever still waits is told at once."""
        with suppress(OSError):
            self._look(now=True)
        for order in self._waiting:
            self._refuse(order, Refusal(why))
        self._waiting.clear()

    # --- one after the other ---

    def _follow_all(self, *, is_paused: bool) -> Done:
        """Collective over the save group. What is left to do, None when nothing is: the pause is over, or the run ends."""
        done: Done = None
        while done is None:
            told = broadcast_json(self._world, lead(self._world, lambda: self._next(is_paused=is_paused)))
            if told is None:
                return None
            done = self._follow(Order(**told["order"]), told["taken"], is_paused=is_paused)
        return done

    def _follow(self, order: Order, taken: Mapping[str, Any], *, is_paused: bool) -> Done:
        by = f"{order.verb}, asked for by {order.by}" + (f": {order.reason}" if order.reason else "")
        match order.verb:
            case "save" if not is_paused:
                self._tell_taken(order, taken)
                self._saver.ask(by)
            case "save":
                self._tell_taken(order, {**taken, "checkpoint": self._save_now(by)})
            case "stop":
                return self._stop(order, taken, by, is_paused=is_paused)
            case "pause":
                return self._pause(order, taken, by, is_paused=is_paused)
            case "resume":
                self._resume(order, taken)
                return "resumed"
            case "rollback":
                self._go_back(order, taken, by)
            case "drain":
                self._tell_taken(order, taken)  # the line is what the agent reads; the ranks leave when the coordinator says so
        return None

    def _stop(self, order: Order, taken: Mapping[str, Any], by: str, *, is_paused: bool) -> Leave:
        saved = self._save_now(by)
        reason = by if saved else f"{by}; it could not be saved, the newest checkpoint is {self._saver.last_id}"
        self._tell_taken(order, {**taken, "checkpoint": saved})
        if not is_paused:
            self._recorder.ledger(Event.RUN_LEFT, rule="stop", reason=reason)
        return Leave(TrainingHalted.exit_code, reason)

    def _pause(self, order: Order, taken: Mapping[str, Any], by: str, *, is_paused: bool) -> Done:
        self._tell_taken(order, taken)
        limit_s = float(taken["limit_s"])
        if is_paused:  # it begins anew
            self._until_s = self._clock.monotonic_s() + limit_s
            return None
        held = self.hold(rule="pause", reason=order.reason or "no reason was given", limit_s=limit_s, by=order.by)
        return Leave(TrainingHalted.exit_code, by) if held == "left" else None

    def _go_back(self, order: Order, taken: Mapping[str, Any], by: str) -> None:
        """What is to be left out stands in the line that takes the order, and so it is taken where the state stands then.

        A checkpoint that does not load ends no run: it goes on as it stands, or from the newest where nothing stands any more.
        """
        self._close_episodes(order)
        self._tell_taken(order, {**taken, **asked_with_fields(blocks_of(order))})
        step = self._state.step
        fields = {"order": order.id, "by": order.by}
        way = RollBackWay(
            int(taken["checkpoint_step"]), "rollback", by, trusted_until=step, checkpoint=str(taken["checkpoint"]), fields=fields
        )
        self._beat.beat(phase=Phase.RESTORE, step=step)
        back = self._roll_back(way)
        if not isinstance(back, NotBack):
            return
        goes_on = "from the newest checkpoint that loads" if back.is_lost else f"as it stands, after step {step}"
        self._refuse(order, Refusal(f"{back.reason}; the run goes on {goes_on}"))
        if back.is_lost:
            self._roll_back(RollBackWay(step, "rollback", f"{way.checkpoint} was asked for, and does not load", step, fields=fields))

    def _resume(self, order: Order, taken: Mapping[str, Any]) -> None:
        """Who lets a run go on that stood still by itself has looked into it, as who releases one that has ended."""
        self._close_episodes(order, only="" if self._by_policy else str(taken.get("incident", "none")))
        self._tell_taken(order, taken)
        if self._by_policy:
            self._recorder.ledger(Event.RUN_RELEASED, rule="resume", reason=order.reason, fields={"by": order.by, **taken})
        self._looked_into()

    def _close_episodes(self, order: Order, *, only: str = "") -> None:
        for episode in open_episodes(self._recorder.entries()):  # none on other ranks
            if only in ("", episode):
                self._recorder.ledger(
                    Event.EPISODE_CLOSED, rule=order.verb, reason=order.reason, fields={"episode": episode, "by": order.by}
                )

    def _save_now(self, reason: str) -> str | None:
        """Collective over the save group. The checkpoint of the present state; None when it could not be saved."""
        if self._saver.last_saved_step == self._state.step:
            self._saver.drain()  # it may be on its way
        if self._saver.last_saved_step == self._state.step:
            return self._saver.last_id
        self._beat.beat(phase=Phase.SAVE, step=self._state.step)
        return self._saver.save(reason=reason)

    def _why_leave(self, begun_s: float, *, now_s: float) -> str | None:
        """Collective over the save group. Why a pause ends in leaving, the same on all ranks; None while it goes on."""
        told = gather_json(self._world, [self._asked_to_leave(), now_s >= self._until_s, round(now_s - begun_s)])
        asked = next((reason for reason, *_ in told if reason), None)
        if asked is not None:
            return f"{asked} meanwhile"
        _, is_over, passed_s = told[0]  # one clock for all
        return f"nobody went on with it for {passed_s} s" if is_over else None

    # --- on rank 0 ---

    def _look(self, *, now: bool = False) -> None:
        news = self._tail.news(now=now) if self._tail is not None else []
        if not news:
            return
        if self._answered is None:
            self._answered = answered(self._recorder.entries())
        for order in news:
            if order.id not in self._answered:
                self._answered.add(order.id)  # a line that stands there twice is one order
                self._waiting.append(order)

    def _next(self, *, is_paused: bool) -> dict[str, Any] | None:
        """The next order that is taken, with what follows from it; those before it that cannot be followed are refused in the ledger."""
        with suppress(OSError):
            self._look(now=True)
        while self._waiting:
            order = self._waiting.pop(0)
            taken = answer(order, self._standing(is_paused=is_paused))
            if isinstance(taken, Refusal):
                self._refuse(order, taken)
            elif isinstance(order, Order):
                return {"order": order, "taken": taken}
        return None

    def _standing(self, *, is_paused: bool) -> Standing:
        lock = read_lock(self._run_dir)
        return Standing(
            run_dir=self._run_dir,
            job=lock.job if lock is not None else "",
            step=self._state.step,
            num_steps=self._config.train.num_steps,
            is_paused=is_paused,
            default_pause_s=self._config.heal.pause_limit_s or _DEFAULT_PAUSE_S,
            entries=self._recorder.entries(),
        )

    def _refuse(self, order: Order | NoOrder, why: Refusal) -> None:
        who = f"{order.verb}, as {order.by} asked" if isinstance(order, Order) else "an order"
        self._recorder.warn(f"not followed: {who}: {why}")
        if isinstance(order, NoOrder):
            self._num_lines_told += 1
            if self._num_lines_told > _MAX_LINES_TOLD:
                return
        self._recorder.ledger(Event.ORDER_REFUSED, rule="control", reason=why, fields=told_of(order, {}))

    def _tell_taken(self, order: Order, more: Mapping[str, Any]) -> None:
        self._recorder.ledger(Event.ORDER_TAKEN, rule="control", reason=order.reason, fields=told_of(order, more))
        self._recorder.say(f"order taken after step {self._state.step}: {order.verb}, by {order.by}")
