"""A halt, a pause and a hold last until a person has released the run; a stop lasts for the job that it was given to. Pure.

A pause that a person asked for begins with the one line that answers the order, so a kill right after it loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surefoot.core.errors import Held, TrainingHalted
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry


def standing_halt(entries: Iterable[LedgerEntry]) -> LedgerEntry | None:
    """The last halt, pause or hold that no person has released, None when there is none."""
    standing: LedgerEntry | None = None
    for entry in entries:
        verb = entry.fields.get("verb") if entry.event == Event.ORDER_TAKEN else None
        if entry.event in (Event.RUN_HALTED, Event.RUN_PAUSED) or verb == "pause" or is_hold(entry):
            standing = entry
        elif entry.event in (Event.RUN_RELEASED, Event.RUN_UNPAUSED) or verb == "resume":
            standing = None
    return standing


def is_hold(entry: LedgerEntry) -> bool:
    """Whether this line says that the run is held after a large-scale fault: starting it again would meet the same."""
    stopped = entry.event == Event.RESTART_DECIDED and entry.fields.get("kind") == "stop"
    return stopped and entry.fields.get("exit_code") == Held.exit_code


def refuse_halted(entries: Iterable[LedgerEntry]) -> None:
    """Raises TrainingHalted while the run's last halt or pause has not been released by a person, Held after a large-scale fault."""
    standing = standing_halt(entries)
    if standing is None:
        return
    if is_hold(standing):
        raise Held(
            f"the run is held at step {standing.step} after a large-scale fault: {standing.reason}",
            where=f"ledger entry {standing.seq}",
            hint="find out what took the nodes away, then `surefoot resume RUN --cause TEXT` lets it go on from its newest checkpoint",
        )
    if standing.event == Event.RUN_HALTED:
        what = f"the run was halted at step {standing.step} by {standing.rule}: {standing.reason}"
    else:
        what = f"the run was paused at step {standing.step} by {standing.fields.get('by') or standing.rule}: {standing.reason}"
    raise TrainingHalted(
        what,
        where=f"ledger entry {standing.seq}",
        hint="find the cause, then `surefoot resume RUN --cause TEXT` lets it go on from its newest checkpoint",
    )


def refuse_stopped(entries: Sequence[LedgerEntry], *, generation: int) -> None:
    """Raises TrainingHalted when a person has stopped the run in `generation`: nobody but a person starts it again."""
    for entry in reversed(entries):
        if entry.generation < generation:
            return
        if entry.event == Event.ORDER_TAKEN and entry.fields.get("verb") == "stop":
            raise TrainingHalted(
                f"the run was stopped at step {entry.step} by {entry.fields.get('by')}: {entry.reason}",
                where=f"ledger entry {entry.seq}",
                hint="`surefoot train RUN` goes on from there",
            )
