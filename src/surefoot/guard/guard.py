"""surefoot.Guard: six methods between any training loop and everything that protects it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch
from torch import nn

from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import EXIT_RETRY, SurefootError, TrainingHalted
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
from surefoot.guard.assembly import Handed, bind, what_is_missing
from surefoot.guard.beating import in_phase
from surefoot.guard.capabilities import NO_RATE
from surefoot.guard.judging import Measured
from surefoot.guard.loss_scale import loss_scaler
from surefoot.guard.quarantine import note_lost_shard
from surefoot.guard.replay import Figures
from surefoot.guard.reporting import report_of
from surefoot.guard.script import Script
from surefoot.heal.policy import BACK_OFF
from surefoot.monitor.detectors import bound_by_hand
from surefoot.monitor.windows import with_loss
from surefoot.tensors.world import World


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
        handed = Handed(
            model=model,
            optimizer=optimizer,
            data=data,
            evaluation=evaluation,
            extra=extra or {},
            numerics=numerics,
            scaler=loss_scaler(scaler, config),
            gauges=gauges,
            gradient_divisor=gradient_divisor,
            script=script,
            can_redo=can_redo,
            recompute=recompute,
        )
        self._run = bind(config, handed, world=world, lock=lock, clock=clock or SystemClock())
        self._signals: Signals | None = None
        self._action: Action | None = None
        self._leave: Leave | None = None
        self._restored = False
        self._said_no_rate = False

    @property
    def step(self) -> int:
        """Training steps finished, skipped updates included."""
        return self._run.state.step

    @property
    def finished(self) -> bool:
        """Whether `begin` found every step done and committed."""
        return self._leave is not None and self._leave.exit_code == 0

    @property
    def clip_scale(self) -> float:
        """What every gradient is multiplied by before the update that `judge` allowed: clipping, and the division by the live tokens."""
        if not isinstance(self._action, Proceed):
            raise SurefootError("there is no clip scale: judge did not let this step proceed", where=f"step {self._run.state.step + 1}")
        return self._action.clip_scale

    @property
    def lr_factor(self) -> float:
        """What the loop's learning rate is multiplied by: 1 unless `heal.lr_factor` lowered it after a roll-back."""
        return self._run.script.rate_factor(self._run.state.step + 1) if self._run.script is not None else self._run.investigation.lr_factor

    def restore(self) -> Resumed:
        """Collective over the world. Load the newest checkpoint of the lineage that verifies, or start fresh.

        Raises CheckpointError when checkpoints exist but none loads, DataError when the data changed or is not the same on
        all ranks, ConfigError when the config did.
        """
        self._run.beat.beat(phase=Phase.RESTORE, step=0)
        resumed = self._run.recovery.restore()
        self._run.pace.start(self._run.recovery.interruptions)
        self._run.saver.close_siblings()
        if self._run.script is None:
            self._run.saver.get_ready()
        self._run.judge.get_ready()
        self._run.investigation.resume()
        self._run.monitoring.get_ready()
        for line in bound_by_hand(self._run.config.heal):
            self._run.recorder.say(line)
        if self._run.is_foreign:
            for line in what_is_missing(self._run):
                self._run.recorder.say(f"not guarded: {line}")
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
        if self._leave is None and self._run.recovery.must_go_back:
            self._run.beat.beat(phase=Phase.RESTORE, step=self._run.state.step)
            self._run.recovery.go_back()
            self._run.investigation.turn()
        if self._leave is None and self._run.investigation.must_go_back:
            self._run.beat.beat(phase=Phase.RESTORE, step=self._run.state.step)
            self._run.investigation.go_back()
        if self._leave is None:
            self._leave = self._run.orders.take_agreed()
        if self._leave is None and self._run.state.step >= self._run.config.train.num_steps:
            self._finish_run()
        if self._leave is not None:
            return self._leave
        if self._run.steering.take_agreed(attempt=self._run.state.attempt):
            self._run.recovery.data_changed()
        if self._run.lease is not None:
            self._run.lease.check()
        self._run.monitoring.begin()
        self._run.times.begin()
        self._run.instruments.begin()
        self._run.beat.beat(phase=Phase.STEP, step=self._run.state.step, restored=True)
        return Go(step=self._run.state.step)

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
        self._run.times.judge()
        measured = Measured(loss_sum, num_live_tokens, data_wait_s, forward_backward_s, lr=math.nan if lr is None else float(lr))
        signals = self._run.judge.exchange(
            measured,
            leave=self._run.requests.reason is not None,
            block=self._run.steering.is_asked,
            order=self._run.orders.is_asked,
            blocklist_word=self._run.steering.word,
            saves=self._run.saver.words(),
            save_clock_s=self._run.saver.since_last_s,
            save_stall_s=self._run.saver.last_stall_s,
        )
        self._run.steering.agreed(signals)
        self._run.orders.agreed(signals)
        divisor = self._run.handed.gradient_divisor / self._run.state.loss_scale
        max_grad_norm = self._run.config.optimizer.max_grad_norm
        if self._run.script is not None:
            self._action = self._run.script.action(signals, max_grad_norm=max_grad_norm, gradient_divisor=divisor)
            self._signals = signals
        else:
            self._action, self._signals = self._run.healer.judge(signals, max_grad_norm=max_grad_norm, gradient_divisor=divisor)
        if self._action.proceeds:
            with in_phase(Phase.SAVE):
                waited_s = self._run.saver.staged()
            self._run.times.add("save_s", waited_s)  # an update must not meet a copy that is being taken
            self._run.judge.before_update()
        # A rate on the device is read only now: before the exchange, whose vector was to be sent, it would have waited for the backward.
        self._run.times.judged(measured, lr=measured.lr if lr is not None else float(self._run.state.optimizer.param_groups[0]["lr"]))
        if lr is None and self._run.is_foreign and not self._said_no_rate:
            self._said_no_rate = True
            self._run.recorder.say(f"not guarded: {NO_RATE}")
        return self._action

    def applied(self) -> None:
        """Local. The update that `judge` allowed has been made."""
        self._run.state.updates += 1
        self._run.times.applied()
        self._run.judge.applied()

    def finish(self) -> StepReport:
        """Collective over the world. Count the step, evaluate and save when due, tell everybody, return the report."""
        signals, action = self._judged()
        parts_s = self._run.instruments.end()
        if isinstance(action, RollBack):
            with in_phase(Phase.SAVE):  # it waits for what is on its way to storage
                action = self._run.healer.open_episode(action, signals) or action
        is_step = not isinstance(action, RollBack | Halt)  # what is gone back from, or ended at, is none
        if is_step:
            self._count(signals)
        self._tell_ledger(signals, action)
        saved = self._settle(signals)
        # What a replay threw out is not kept, nor what only repeats another run.
        may_save = is_step and self._leave is None and not self._run.recovery.must_go_back and self._run.script is None
        held_out = self._look_around() if may_save else None
        self._run.state.canary = held_out.loss if held_out is not None and math.isfinite(held_out.loss) else None
        if may_save and (due := self._due(signals)) is not None:
            # A kill between commit and row would leave this step without one for good; the row below takes this one's place.
            self._run.recorder.write(report_of(self._run, signals, action, held_out=held_out, saved=None, parts_s=parts_s))
            saved = self._save(due[0] + self._run.recovery.stands_on, due[1]) or saved
        report = report_of(self._run, signals, action, held_out=held_out, saved=saved, parts_s=parts_s)
        if is_step:  # else its row would stand in place of the last one's
            self._tell(report, signals)
        self._run.beat.beat(phase=Phase.STEP, step=self._run.state.step, micro_step=0, warm=True)
        if isinstance(action, Pause):
            self._pause(action)
        self._leave_if_agreed(signals)
        return report

    def close(self) -> None:
        """Release what the guard holds. After a Leave that is not a finished run it raises SystemExit with the code of that Leave."""
        if self._leave is not None:
            self._run.orders.refuse_rest(f"the run ended first: {self._leave.reason}")
        self._release(in_order=True)
        if self._leave is not None and self._leave.exit_code:
            self._run.recorder.say(f"left after step {self._run.state.step}: {self._leave.reason}")
            raise SystemExit(self._leave.exit_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            note_lost_shard(
                error,
                run_dir=self._run.place.run_dir,
                rank=self._run.world.rank,
                generation=self._run.place.generation,
                attempt=self._run.state.attempt,
                step=self._run.state.step,
                clock=self._run.clock,
            )
            self._release(in_order=False)

    def _release(self, *, in_order: bool) -> None:
        self._run.requests.close()
        self._run.saver.close(in_order=in_order, read_back=self._leave is None or self.finished)
        self._run.recorder.close(in_order=in_order)
        self._run.beat.beat(phase=Phase.STOPPED, step=self._run.state.step)
        if self._run.lease is not None:
            self._run.lease.close()
        if self._run.place.lock is not None:
            self._run.place.lock.release()

    # --- the parts of `finish`, in their order ---

    def _judged(self) -> tuple[Signals, Action]:
        """What `judge` left, once."""
        signals, action = self._signals, self._action
        if signals is None or action is None:
            raise SurefootError("finish was called before judge", where=f"step {self._run.state.step + 1}")
        self._signals = self._action = None
        return signals, action

    def _count(self, signals: Signals) -> None:
        """Collective over the save group where a replay differs, else local."""
        state, loss = self._run.state, signals.loss if signals.num_live_tokens else math.nan
        state.step += 1
        state.loss = loss if signals.num_live_tokens else state.loss
        state.tokens += signals.num_live_tokens
        state.monitor.losses = with_loss(state.monitor.losses, loss)
        self._compare_with_record(signals)

    def _tell_ledger(self, signals: Signals, action: Action) -> None:
        """What was not simply an update; the loss scale moves with it."""
        state, recorder = self._run.state, self._run.recorder
        if state.scaler is not None and (action.proceeds or signals.overflowed):
            state.scaler.update(overflowed=signals.overflowed)
        for redo in state.numerics.take_redos() if state.numerics is not None else ():
            recorder.ledger(Event.STEP_REDONE, rule=redo.rule, reason=redo.reason)
        if isinstance(action, Halt):
            recorder.ledger(Event.RUN_HALTED, rule=action.rule, reason=action.reason)
            self._leave = Leave(TrainingHalted.exit_code, action.reason)
        elif isinstance(action, SkipUpdate | Pause):
            recorder.ledger(Event.UPDATE_SKIPPED, rule=action.rule, reason=action.reason, fields={"loss": signals.loss})
        if isinstance(action, SkipUpdate):
            seeks_scale = action.rule == BACK_OFF and not signals.loss_scale_at_minimum
            if not seeks_scale:
                recorder.warn(f"step {state.step}: the update was skipped ({action.rule}): {action.reason}")

    def _settle(self, signals: Signals) -> str | None:
        """Collective over the save group when a save failed, else local. The id of what was agreed to be committed."""
        with self._run.times.measure("save_s"), in_phase(Phase.SAVE):
            saved = self._run.saver.settle(signals)
        self._run.pace.step(signals)
        if saved is not None:
            self._run.pace.committed(signals)
        return saved

    def _look_around(self) -> HeldOutLoss | None:
        """Collective over the world when something is due. Canary, audit, and the held-out loss."""
        with self._run.times.measure("evaluate_s"), in_phase(Phase.EVALUATE):
            self._run.monitoring.between_steps()
        return self._evaluate_if_due()

    def _due(self, signals: Signals) -> tuple[str, bool] | None:
        """Local. Why this state is saved now, and whether the loop waits; or None."""
        if self._run.investigation.holds_saves:
            return None
        return self._run.saver.due(signals, auto_steps=self._run.pace.auto_steps)

    def _tell(self, report: StepReport, signals: Signals) -> None:
        self._run.recorder.tell(report)
        if waited := self._run.waits.step(signals, step_s=report.step_s - report.save_s - report.evaluate_s):
            self._run.recorder.warn(waited)
        self._run.straggling.step(signals)

    def _leave_if_agreed(self, signals: Signals) -> None:
        is_last = self._run.state.step >= self._run.config.train.num_steps  # then there is nothing to come back for
        if not signals.leave_requested or is_last or self._leave is not None:
            return
        reason = self._run.requests.reason or "another rank was asked to leave"
        if self._run.saver.last_saved_step != self._run.state.step:
            reason += f"; it could not be saved, the newest checkpoint is {self._run.saver.last_id}"
        self._run.recorder.ledger(Event.RUN_LEFT, reason=reason)
        self._leave = Leave(EXIT_RETRY, reason)

    def _compare_with_record(self, signals: Signals) -> None:
        step, data = self._run.state.step, self._run.state.data
        halt = self._run.recovery.take(Figures(step, signals.loss, signals.grad_norm, data.next_sample, signals.num_live_tokens))
        if halt is not None:
            self._run.recorder.ledger(Event.RUN_HALTED, rule=halt.rule, reason=halt.reason)
            self._leave = Leave(TrainingHalted.exit_code, halt.reason)

    def _evaluate_if_due(self) -> HeldOutLoss | None:
        interval, step = self._run.config.train.eval_interval_steps, self._run.state.step
        last = step >= self._run.config.train.num_steps
        if self._run.handed.evaluation is None or not (last or (interval and step % interval == 0)):
            return None
        self._run.beat.beat(phase=Phase.EVALUATE, step=step)
        with self._run.times.measure("evaluate_s"):
            return self._run.handed.evaluation.held_out()

    def _pause(self, action: Pause) -> None:
        """Collective over the save group. Stand still, or leave; what is saved since the first ill step is suspect."""
        if (first := self._run.healer.suspect_from(action)) is not None:
            fields = {"from_step": first}
            self._run.recorder.ledger(Event.CHECKPOINT_SUSPECTED, rule=action.rule, reason=action.reason, fields=fields)
        held = self._run.orders.hold(rule=action.rule, reason=action.reason, limit_s=self._run.config.heal.pause_limit_s)
        if held == "left":
            self._leave = Leave(TrainingHalted.exit_code, action.reason)
        else:
            self._run.healer.released()

    def _save(self, reason: str, wait: bool) -> str | None:
        """The id of what is committed now; None when the save goes on beside the loop, or failed."""
        self._run.beat.beat(phase=Phase.SAVE, step=self._run.state.step)
        with self._run.times.measure("save_s"):
            if wait:
                return self._run.saver.save(reason=reason)
            self._run.pace.save_begun()
            self._run.saver.begin(reason=reason)
            return None

    def _finish_run(self) -> None:
        if self._run.saver.last_saved_step != self._run.state.step:
            self._save("the run is finished", wait=True)
        self._run.beat.beat(phase=Phase.SAVE, step=self._run.state.step)
        self._run.saver.save_for_good()
        self._run.recorder.ledger(
            Event.RUN_FINISHED, fields={"state_digest": self._run.saver.last_digest, "checkpoint": self._run.saver.last_id}
        )
        self._leave = Leave(0, "finished")
