"""surefoot.Guard: six methods between any training loop and everything that protects it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from surefoot.coordinate.lease import LeaseKeeper
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import EXIT_RETRY, ConfigError, SurefootError, TrainingHalted
from surefoot.core.events import Event
from surefoot.core.ports import DataPort, EvalPort, GaugePort, LossScaler, NumericsPort, RecomputePort, Stateful
from surefoot.core.records import (
    Action,
    Go,
    Halt,
    HeldOutLoss,
    Leave,
    Pause,
    Phase,
    Proceed,
    Resumed,
    RollBack,
    Signals,
    SkipUpdate,
    StepReport,
)
from surefoot.core.sections import RunConfig
from surefoot.guard.audit import Audit
from surefoot.guard.capabilities import missing_capabilities
from surefoot.guard.columns import signal_columns
from surefoot.guard.healing import Healer
from surefoot.guard.instruments import Instruments
from surefoot.guard.judging import Judge, Measured
from surefoot.guard.loss_scale import loss_scaler
from surefoot.guard.monitoring import Monitoring
from surefoot.guard.orders import Orders
from surefoot.guard.pace import Pace
from surefoot.guard.place import find_place, under_agent
from surefoot.guard.quarantine import note_lost_shard
from surefoot.guard.recording import Recorder
from surefoot.guard.recovery import Recovery
from surefoot.guard.replay import Figures
from surefoot.guard.requests import LeaveRequests
from surefoot.guard.saving import Saver
from surefoot.guard.script import Script
from surefoot.guard.speed import Speed
from surefoot.guard.state import TrainState
from surefoot.guard.steering import Steering
from surefoot.guard.timing import StepTimes
from surefoot.guard.waiting import DataWaits
from surefoot.monitor.detectors import bound_by_hand
from surefoot.monitor.windows import with_loss
from surefoot.tensors.flight import evidence_path, keep_evidence_at
from surefoot.tensors.world import World, world_here


class Guard:
    """Binds checkpoints, monitoring, healing, coordination and the ledger to a training loop that stays the caller's.

    with Guard(config, model=model, optimizer=optimizer, data=port) as guard:
        guard.restore()
        while guard.begin():
            loss_sum, num_live_tokens = forward_backward(next(port))
            if guard.judge(loss_sum, num_live_tokens).proceeds:
                scale_all_gradients(guard.clip_scale)
                optimizer.step()
                guard.applied()
            optimizer.zero_grad()
            guard.finish()

    Gradients are those of the loss *summed* over live tokens and over ranks, divided by `gradient_divisor`: 1 for a sum, the world size
    under DistributedDataParallel's default mean. `model` may be wrapped; `data` is the caller's DataPort; `evaluation` is asked for the
    held-out loss every `train.eval_interval_steps`; `extra` are further parts with a JSON state_dict (a schedule, a scaler) that are saved
    and restored with the rest; `numerics` comes from a loop whose sums are exact, as our own can be. `scaler` is one whose scale the loop
    multiplies its loss by before the backward, and touches no further: `clip_scale` undoes the scale, and the guard moves it and saves it.
    `recompute` computes an atom of the last batch again, for audits.
    `can_redo`: when `judge` answers with a Redo the loop computes the same batch again, by its rotation, and asks anew.
    With a `script` the decisions of another run are taken over: nothing is judged, evaluated or saved. All methods but `applied` are
    collective: every rank calls them in the same order.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: DataPort,
        evaluation: EvalPort | None = None,
        extra: Mapping[str, Stateful] | None = None,
        numerics: NumericsPort | None = None,
        scaler: LossScaler | torch.amp.GradScaler | None = None,
        gauges: GaugePort | None = None,
        world: World | None = None,
        lock: RunLock | None = None,
        gradient_divisor: float = 1.0,
        script: Script | None = None,
        can_redo: bool = False,
        recompute: RecomputePort | None = None,
        clock: Clock | None = None,
    ) -> None:
        if config.numerics.sums == "exact" and numerics is None:
            what = "exact sums are made by our own training step, not by the guard around another loop"
            raise ConfigError(what, where="[numerics] sums", hint="leave it out")
        self._config = config
        scaler = loss_scaler(scaler, config)
        self._clock = clock or SystemClock()
        self._is_foreign = world is None  # our own loop hands over the world that it joined
        self._world = world or world_here(_device_of(optimizer), collective_limit_s=config.launch.collective_limit_s)
        # Before anybody outside can see that this run is there, and sends it a signal.
        self._requests = LeaveRequests(asked_by_agent=lambda: bool(self._place.board.leave_requested), takes_interrupts=not under_agent())
        try:
            self._place = find_place(config, self._world, clock=self._clock, lock=lock)
        except BaseException:
            self._requests.close()
            raise
        keep_evidence_at(evidence_path(self._place.run_dir, generation=self._place.generation, rank=self._world.rank))
        self._lease = LeaseKeeper(self._place.lock, lease_s=config.launch.lease_s) if self._place.lock is not None else None
        self._state = TrainState(model=model, optimizer=optimizer, data=data, extra=extra or {}, numerics=numerics, scaler=scaler)
        self._evaluation = evaluation
        self._recompute = recompute
        self._gradient_divisor = gradient_divisor
        self._script = script
        self._beat = self._place.board.slot(self._world.rank)
        self._recorder = Recorder(
            self._state,
            config=config,
            world=self._world,
            run_dir=self._place.run_dir,
            generation=self._place.generation,
            clock=self._clock,
        )
        self._instruments = Instruments(self._state, config=config, world=self._world, gauges=gauges)
        self._parts_s: Mapping[str, float] = {}
        self._speed = Speed(config, model=model, device=self._world.device, num_devices=self._world.size)
        self._judge = Judge(
            self._state,
            world=self._world,
            instruments=self._instruments,
            generation=self._place.generation,
            gradient_divisor=gradient_divisor,
            clock=self._clock,
        )
        self._saver = Saver(
            self._state,
            config=config,
            world=self._world,
            run_dir=self._place.run_dir,
            generation=self._place.generation,
            recorder=self._recorder,
            clock=self._clock,
        )
        self._steering = Steering(
            data,
            world=self._world,
            recorder=self._recorder,
            run_dir=self._place.run_dir,
            clock=self._clock,
            section=config.observe,
        )
        self._recovery = Recovery(
            self._state,
            config=config,
            world=self._world,
            generation=self._place.generation,
            recorder=self._recorder,
            saver=self._saver,
            steering=self._steering,
            evaluation=evaluation,
            root=self._place.run_dir / "checkpoints",
        )
        self._orders = Orders(
            self._state,
            config=config,
            world=self._world,
            recorder=self._recorder,
            saver=self._saver,
            run_dir=self._place.run_dir,
            clock=self._clock,
            beat=self._beat,
            asked_to_leave=lambda: self._requests.reason,
            roll_back=self._recovery.roll_back,
            looked_into=lambda: self._healer.take_up(),
        )
        audit = Audit(self._state, config=config, world=self._world, recorder=self._recorder, recompute=recompute)
        self._monitoring = Monitoring(self._state, config=config, evaluation=evaluation, audit=audit)
        self._healer = Healer(
            self._state,
            config=config,
            world=self._world,
            recorder=self._recorder,
            recovery=self._recovery,
            monitoring=self._monitoring,
            can_redo=can_redo,
        )
        self._pace = Pace(config.checkpoint, world=self._world, recorder=self._recorder)
        self._times = StepTimes(self._clock)
        self._waits = DataWaits(config.monitor)
        self._signals: Signals | None = None
        self._action: Action | None = None
        self._leave: Leave | None = None
        self._restored = False

    @property
    def step(self) -> int:
        """Training steps finished, skipped updates included."""
        return self._state.step

    @property
    def finished(self) -> bool:
        """Whether `begin` found every step done and committed."""
        return self._leave is not None and self._leave.exit_code == 0

    @property
    def clip_scale(self) -> float:
        """What every gradient is multiplied by before the update that `judge` allowed: clipping, and the division by the live tokens."""
        if not isinstance(self._action, Proceed):
            raise SurefootError("there is no clip scale: judge did not let this step proceed", where=f"step {self._state.step + 1}")
        return self._action.clip_scale

    @property
    def lr_factor(self) -> float:
        """What the loop's learning rate is multiplied by: 1 unless `heal.lr_factor` lowered it after a roll-back."""
        return self._script.rate_factor(self._state.step + 1) if self._script is not None else self._healer.lr_factor

    def restore(self) -> Resumed:
        """Collective over the world. Load the newest checkpoint of the lineage that verifies, or start fresh.

        Raises CheckpointError when checkpoints exist but none loads, DataError when the data changed or is not the same on
        all ranks, ConfigError when the config did.
        """
        self._beat.beat(phase=Phase.RESTORE, step=0)
        resumed = self._recovery.restore()
        self._pace.start(self._recovery.interruptions)
        self._saver.close_siblings()
        if self._script is None:
            self._saver.get_ready()
        self._judge.get_ready()
        self._healer.take_up()
        self._monitoring.get_ready()
        for line in bound_by_hand(self._config.heal):
            self._recorder.say(line)
        if self._is_foreign:
            self._say_what_is_missing()
        self._restored = True
        return resumed

    def begin(self) -> Go | Leave:
        """Local. Where what was agreed in the last exchange takes effect: go on with the next step, or leave for good.

        Collective over the world when a replay differed: then the state is that of an older checkpoint afterwards, at its step. Where
        something is to be left out of the data: this is the sample from which on it is. Where people gave orders: to save, to stop, to go
        back, or to stand still, and then this returns when the pause is over. And at the end, where the last save must have come back from
        storage.
        """
        if not self._restored:
            raise SurefootError(
                "begin was called before restore", where="surefoot.Guard", hint="call guard.restore() once, before the loop"
            )
        if self._leave is None and self._recovery.must_go_back:
            self._beat.beat(phase=Phase.RESTORE, step=self._state.step)
            self._recovery.go_back()
        if self._leave is None and self._healer.must_go_back:
            self._beat.beat(phase=Phase.RESTORE, step=self._state.step)
            self._healer.go_back()
        if self._leave is None:
            self._leave = self._orders.take_agreed()
        if self._leave is None and self._state.step >= self._config.train.num_steps:
            self._finish_run()
        if self._leave is not None:
            return self._leave
        if self._steering.take_agreed(attempt=self._state.attempt):
            self._recovery.data_changed()
        if self._lease is not None:
            self._lease.check()
        self._monitoring.begin()
        self._times.begin()
        self._instruments.begin()
        self._beat.beat(phase=Phase.STEP, step=self._state.step, restored=True)
        return Go(step=self._state.step)

    def judge(
        self,
        loss_sum: torch.Tensor,
        num_live_tokens: int,
        *,
        lr: float | None = None,
        data_wait_s: float = 0.0,
        forward_backward_s: float = 0.0,
    ) -> Action:
        """Collective over the loop group. Measure the gradients, exchange one vector, and decide what all ranks do with this step.

        `loss_sum` is this rank's loss in nats summed over its `num_live_tokens`; `lr` only reports the rate (default: that of the first
        parameter group).
        """
        self._times.judge()
        rate = lr if lr is not None else float(self._state.optimizer.param_groups[0]["lr"])
        measured = Measured(loss_sum, num_live_tokens, data_wait_s, forward_backward_s, lr=rate, tells_lr=lr is not None)
        self._signals = self._judge.exchange(
            measured,
            leave=self._requests.reason is not None,
            block=self._steering.is_asked,
            order=self._orders.is_asked,
            blocklist_word=self._steering.word,
            saves=self._saver.words(),
            save_clock_s=self._saver.since_last_s,
            save_stall_s=self._saver.last_stall_s,
        )
        self._steering.agreed(self._signals)
        self._orders.agreed(self._signals)
        decider = self._script.action if self._script is not None else self._healer.judge
        divisor = self._gradient_divisor / self._state.loss_scale
        self._action = decider(self._signals, max_grad_norm=self._config.optimizer.max_grad_norm, gradient_divisor=divisor)
        if self._action.proceeds:
            self._times.add("save_s", self._saver.staged())  # an update must not meet a copy that is being taken
            self._judge.before_update()
        self._times.judged(measured, lr=rate)
        return self._action

    def applied(self) -> None:
        """Local. The update that `judge` allowed has been made."""
        self._state.updates += 1
        self._times.applied()
        self._judge.applied()

    def finish(self) -> StepReport:
        """Collective over the world. Count the step, evaluate and save when due, tell everybody, return the report."""
        signals, action = self._signals, self._action
        if signals is None or action is None:
            raise SurefootError("finish was called before judge", where=f"step {self._state.step + 1}")
        self._signals = self._action = None
        self._parts_s = self._instruments.end()
        if isinstance(action, RollBack):
            action = self._healer.open_episode(action, signals) or action
        is_step = not isinstance(action, RollBack | Halt)  # what is gone back from, or ended at, is none
        if isinstance(action, Halt):
            self._recorder.ledger(Event.RUN_HALTED, rule=action.rule, reason=action.reason)
            self._leave = Leave(TrainingHalted.exit_code, action.reason)
        elif is_step:
            self._state.step += 1
            self._state.loss = signals.loss if signals.num_live_tokens else self._state.loss
            self._state.tokens += signals.num_live_tokens
            self._state.monitor.losses = with_loss(self._state.monitor.losses, signals.loss if signals.num_live_tokens else math.nan)
            self._compare_with_record(signals)
        if self._state.scaler is not None and (action.proceeds or signals.overflowed):
            self._state.scaler.update(overflowed=signals.overflowed)
        for redo in self._state.numerics.take_redos() if self._state.numerics is not None else ():
            self._recorder.ledger(Event.STEP_REDONE, rule=redo.rule, reason=redo.reason)
        if isinstance(action, SkipUpdate | Pause):
            self._recorder.ledger(Event.UPDATE_SKIPPED, rule=action.rule, reason=action.reason, fields={"loss": signals.loss})
        with self._times.measure("save_s"):
            saved = self._saver.settle(signals)
        self._pace.step(signals)
        if saved is not None:
            self._pace.committed(signals)
        # What a replay threw out is not kept, nor what only repeats another run.
        may_save = is_step and self._leave is None and not self._recovery.must_go_back and self._script is None
        if may_save:
            with self._times.measure("evaluate_s"):
                self._monitoring.between_steps()
        held_out = self._evaluate_if_due() if may_save else None
        self._state.canary = held_out.loss if held_out is not None and math.isfinite(held_out.loss) else None
        if may_save and self._healer.episode is None and (due := self._saver.due(signals, auto_steps=self._pace.auto_steps)) is not None:
            # A kill between commit and row would leave this step without one for good; the row below takes this one's place.
            self._recorder.write(self._report(signals, action, held_out, saved=None))
            saved = self._save(due[0] + self._recovery.stands_on, due[1]) or saved
        report = self._report(signals, action, held_out, saved=saved)
        if is_step:  # else its row would stand in place of the last one's
            self._recorder.tell(report)
            if waited := self._waits.step(signals, step_s=report.step_s - report.save_s - report.evaluate_s):
                self._recorder.warn(waited)
        self._beat.beat(phase=Phase.STEP, step=self._state.step)
        if isinstance(action, Pause):
            self._pause(action)
        is_last = self._state.step >= self._config.train.num_steps  # then there is nothing to come back for
        if signals.leave_requested and not is_last and self._leave is None:
            reason = self._requests.reason or "another rank was asked to leave"
            if self._saver.last_saved_step != self._state.step:
                reason += f"; it could not be saved, the newest checkpoint is {self._saver.last_id}"
            self._recorder.ledger(Event.RUN_LEFT, reason=reason)
            self._leave = Leave(EXIT_RETRY, reason)
        return report

    def close(self) -> None:
        """Release what the guard holds. After a Leave that is not a finished run it raises SystemExit with the code of that Leave."""
        if self._leave is not None:
            self._orders.refuse_rest(f"the run ended first: {self._leave.reason}")
        self._release(in_order=True)
        if self._leave is not None and self._leave.exit_code:
            self._recorder.say(f"left after step {self._state.step}: {self._leave.reason}")
            raise SystemExit(self._leave.exit_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            note_lost_shard(
                error,
                run_dir=self._place.run_dir,
                rank=self._world.rank,
                generation=self._place.generation,
                attempt=self._state.attempt,
                step=self._state.step,
                clock=self._clock,
            )
            self._release(in_order=False)

    def _release(self, *, in_order: bool) -> None:
        self._requests.close()
        self._saver.close(in_order=in_order, read_back=self._leave is None or self.finished)
        self._recorder.close(in_order=in_order)
        self._beat.beat(phase=Phase.STOPPED, step=self._state.step)
        if self._lease is not None:
            self._lease.close()
        if self._place.lock is not None:
            self._place.lock.release()

    def _say_what_is_missing(self) -> None:
        missing = missing_capabilities(
            model=self._state.model,
            data=self._state.data,
            evaluation=self._evaluation,
            extra=self._state.extra,
            world_size=self._world.size,
            under_agent=self._place.under_agent,
            recompute=self._recompute,
        )
        for line in missing:
            self._recorder.say(f"not guarded: {line}")

    def _compare_with_record(self, signals: Signals) -> None:
        step, data = self._state.step, self._state.data
        halt = self._recovery.take(Figures(step, signals.loss, signals.grad_norm, data.next_sample, signals.num_live_tokens))
        if halt is not None:
            self._recorder.ledger(Event.RUN_HALTED, rule=halt.rule, reason=halt.reason)
            self._leave = Leave(TrainingHalted.exit_code, halt.reason)

    def _evaluate_if_due(self) -> HeldOutLoss | None:
        interval, step = self._config.train.eval_interval_steps, self._state.step
        last = step >= self._config.train.num_steps
        if self._evaluation is None or not (last or (interval and step % interval == 0)):
            return None
        self._beat.beat(phase=Phase.EVALUATE, step=step)
        with self._times.measure("evaluate_s"):
            return self._evaluation.held_out()

    def _pause(self, action: Pause) -> None:
        """Collective over the save group. Stand still, or leave; what is saved since the first ill step is suspect."""
        if (first := self._healer.suspect_from_step) is not None:
            fields = {"from_step": first}
            self._recorder.ledger(Event.CHECKPOINT_SUSPECTED, rule=action.rule, reason=action.reason, fields=fields)
        held = self._orders.hold(rule=action.rule, reason=action.reason, limit_s=self._config.heal.pause_limit_s)
        if held == "left":
            self._leave = Leave(TrainingHalted.exit_code, action.reason)
        else:
            self._healer.released()

    def _save(self, reason: str, wait: bool) -> str | None:
        """The id of what is committed now; None when the save goes on beside the loop, or failed."""
        self._beat.beat(phase=Phase.SAVE, step=self._state.step)
        with self._times.measure("save_s"):
            if wait:
                return self._saver.save(reason=reason)
            self._pace.save_begun()
            self._saver.begin(reason=reason)
            return None

    def _finish_run(self) -> None:
        self._saver.save_for_good()
        self._recorder.ledger(Event.RUN_FINISHED, fields={"state_digest": self._saver.last_digest, "checkpoint": self._saver.last_id})
        self._leave = Leave(0, "finished")

    def _report(self, signals: Signals, action: Action, held_out: HeldOutLoss | None, *, saved: str | None) -> StepReport:
        times: dict[str, Any] = self._times.end(num_live_tokens=signals.num_live_tokens)
        return StepReport(
            step=self._state.step,
            attempt=self._state.attempt,
            generation=self._place.generation,
            loss=signals.loss,
            num_live_tokens=signals.num_live_tokens,
            data_wait_s=max(part.data_wait_s for part in signals.ranks),
            tokens=self._state.tokens,
            grad_norm=signals.grad_norm,
            clip_scale=action.clip_scale if isinstance(action, Proceed) else 0.0,
            action=_NAMES.get(type(action), type(action).__name__.lower()),
            next_sample=self._state.data.next_sample,
            cpu_s=sum(part.cpu_s for part in signals.ranks),
            val_loss=held_out.loss if held_out else None,
            bits_per_byte=held_out.bits_per_byte if held_out else None,
            val_losses=held_out.per_source if held_out else {},
            canary_loss=self._monitoring.canary_loss,
            saved=saved,
            device_tokens_per_s=self._speed.of_device(times["tokens_per_s"]),
            mfu=self._speed.mfu(times["tokens_per_s"], next_sample=self._state.data.next_sample),
            **signal_columns(signals, losses=self._state.monitor.losses, times=self._parts_s),
            **times,
        )


_NAMES: dict[type, str] = {Proceed: "proceed", SkipUpdate: "skip", Halt: "halt", RollBack: "rollback", Pause: "pause"}


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Of its first parameter: a group may be empty on a stage of a pipeline."""
    parameters: list[torch.Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters[0].device
