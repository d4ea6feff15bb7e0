"""`surefoot save`: have a live run save at its next step."""

from __future__ import annotations

from surefoot.cli.operators import WAIT_S, Desk, Json, Reason, Run, Wait, WaitS, require_live
from surefoot.core.errors import SurefootError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry


def save(run: Run, reason: Reason = "", json_output: Json = False, wait: Wait = True, wait_s: WaitS = WAIT_S) -> None:
    """Have a live run save at the end of its next step, beside its work. Says the checkpoint and how far it is trusted by then.

    \b
    Examples:
      surefoot save runs/quickstart --reason "before the maintenance"
      surefoot save runs/quickstart --json
    """
    desk = Desk(run, "save", job=require_live(run, "save"), wait_s=wait_s)
    told = desk.give(reason=reason)
    if wait:
        taken = desk.answer()
        if "checkpoint" in taken.fields:  # a paused run saves before it answers
            name = taken.fields["checkpoint"]
        else:
            name = desk.until(lambda entry: _is_commit_after(entry, taken)).fields["id"]
        checkpoint = desk.checkpoint(name)
        if checkpoint is None:
            raise SurefootError("the run took the order, and could not save", where=str(run), hint=f"`surefoot ledger {run}` says why")
        words = f"saved step {checkpoint['step']} as {checkpoint['id']} ({checkpoint['rung']})"
        told = desk.told(taken, words, more={"checkpoint": checkpoint})
    told.say(json_output=json_output)


def _is_commit_after(entry: LedgerEntry, taken: LedgerEntry) -> bool:
    """The commit of a later state: a save that was on its way when the order was taken is none of its own."""
    if entry.event not in (Event.CHECKPOINT_COMMITTED, Event.CHECKPOINT_ADOPTED) or entry.seq < taken.seq:
        return False
    attempt, step = entry.fields.get("attempt"), entry.fields.get("step")
    return isinstance(attempt, int) and isinstance(step, int) and (attempt, step) > (taken.attempt, taken.step)
