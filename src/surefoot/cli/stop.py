"""`surefoot stop`: have a live run save and end."""

from __future__ import annotations

from surefoot.cli.operators import WAIT_S, Desk, Json, Reason, Run, Wait, WaitS, require_live


def stop(run: Run, reason: Reason = "", json_output: Json = False, wait: Wait = True, wait_s: WaitS = WAIT_S) -> None:
    """Have a live run save and end, with exit code 6: no scheduler starts it again. `surefoot train RUN` goes on with it.

    \b
    Examples:
      surefoot stop runs/quickstart --reason "the machines are needed"
      surefoot stop runs/quickstart --no-wait --json
    """
    desk = Desk(run, "stop", job=require_live(run, "stop"), wait_s=wait_s)
    told = desk.give(reason=reason)
    if wait:
        taken = desk.answer()
        desk.until_gone()
        checkpoint = desk.checkpoint(taken.fields.get("checkpoint"))
        saved = f"saved as {checkpoint['id']} ({checkpoint['rung']})" if checkpoint else "not saved: see `surefoot ledger`"
        words = f"stopped after step {taken.step}, {saved}; `surefoot train {run}` goes on"
        told = desk.told(taken, words, more={"checkpoint": checkpoint})
    told.say(json_output=json_output)
