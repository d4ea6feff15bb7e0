"""The finished step as one record: what was known before its update, and what is known only after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.core.records import Action, Halt, HeldOutLoss, Pause, Proceed, RollBack, Signals, SkipUpdate, StepReport
from surefoot.guard.assembly import BoundRun
from surefoot.guard.columns import signal_columns, tells_parts

_NAMES: dict[type, str] = {Proceed: "proceed", SkipUpdate: "skip", Halt: "halt", RollBack: "rollback", Pause: "pause"}


def report_of(
    run: BoundRun, signals: Signals, action: Action, *, held_out: HeldOutLoss | None, saved: str | None, parts_s: Mapping[str, float]
) -> StepReport:
    """Local. `saved` is the id of what was committed in this step; `parts_s` what the loop gauged of its time, in seconds by name."""
    state = run.state
    times: dict[str, Any] = run.times.end(num_live_tokens=signals.num_live_tokens)
    by_part = tells_parts(
        state.step,
        interval_steps=run.config.monitor.rank_interval_steps,
        world_size=run.world.size,
        is_news=not isinstance(action, Proceed) or run.monitoring.has_findings,
    )
    return StepReport(
        step=state.step,
        attempt=state.attempt,
        generation=run.place.generation,
        loss=signals.loss,
        num_live_tokens=signals.num_live_tokens,
        data_wait_s=max(part.data_wait_s for part in signals.ranks),
        tokens=state.tokens,
        grad_norm=signals.grad_norm,
        clip_scale=action.clip_scale if isinstance(action, Proceed) else 0.0,
        action=_NAMES.get(type(action), type(action).__name__.lower()),
        next_sample=state.data.next_sample,
        cpu_s=sum(part.cpu_s for part in signals.ranks),
        val_loss=held_out.loss if held_out else None,
        bits_per_byte=held_out.bits_per_byte if held_out else None,
        val_losses=held_out.per_source if held_out else {},
        canary_loss=run.monitoring.canary_loss,
        saved=saved,
        device_tokens_per_s=run.speed.of_device(times["tokens_per_s"]),
        mfu=run.speed.mfu(times["tokens_per_s"], next_sample=state.data.next_sample),
        **signal_columns(signals, losses=state.monitor.losses, times=parts_s, by_part=by_part),
        **times,
    )
