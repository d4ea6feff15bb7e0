"""`surefoot pause`: have a live run stand still, with its processes, until somebody resumes it."""

from __future__ import annotations

from typing import Annotated

import typer

from surefoot.cli.operators import WAIT_S, Desk, Json, Reason, Run, Wait, WaitS, require_live
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.units import show_duration
from surefoot.observe.control import MAX_PAUSE_S


def pause(
    run: Run,
    for_s: Annotated[
        float | None,
        typer.Option("--for", metavar="SECONDS", min=0.0, help="How long processes are kept. Default: heal.pause_limit_s, or 600."),
    ] = None,
    reason: Reason = "",
    json_output: Json = False,
    wait: Wait = True,
    wait_s: WaitS = WAIT_S,
) -> None:
    """Have a live run save and stand still. It keeps its processes and takes orders; when the time is over it ends with exit code 6.

    Whatever becomes of its processes, it goes on when, and only when, `surefoot resume RUN` has been said.

    \b
    Examples:
      surefoot pause runs/quickstart --reason "a look at the loss"
      surefoot pause runs/quickstart --for 3600
    """
    if for_s is not None and not for_s <= MAX_PAUSE_S:  # not a number is none either
        what, hint = f"a pause of {for_s:g} s", f"it takes 0 to {MAX_PAUSE_S:.0f}: a month; `surefoot stop` keeps nothing waiting"
        raise ConfigError(what, where=f"--for {for_s:g}", hint=hint, got=for_s, limit=MAX_PAUSE_S)
    desk = Desk(run, "pause", job=require_live(run, "pause"), wait_s=wait_s)
    told = desk.give(reason=reason, limit_s=for_s)
    if wait:
        taken = desk.answer()
        paused = taken
        if not taken.fields.get("prolongs"):
            paused = desk.until(lambda entry: entry.event == Event.RUN_PAUSED and entry.seq > taken.seq)
        checkpoint = desk.checkpoint(paused.fields.get("checkpoint"))
        limit_s = float(str(taken.fields["limit_s"]))
        saved = f", saved as {checkpoint['id']}" if checkpoint else ""
        words = f"paused after step {taken.step}{saved}, for up to {show_duration(limit_s)}; `surefoot resume {run}` goes on"
        told = desk.told(taken, words, more={"checkpoint": checkpoint, "limit_s": limit_s})
    told.say(json_output=json_output)
