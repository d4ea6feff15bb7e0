"""`surefoot resume`: the one way on after a pause, a halt, a breaker or a hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.ledgering import tell, user_name
from surefoot.cli.operators import WAIT_S, Desk, Json, Run, Told, Wait, WaitS, live_job
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.halts import standing_halt
from surefoot.observe.incidents import open_episodes, refuse_unknown_incident
from surefoot.observe.ledger import LEDGER_NAME, read_ledger


def resume(
    run: Run,
    incident: Annotated[str, typer.Option("--incident", metavar="ID", help="The episode or incident that this closes, as e12.")] = "",
    cause: Annotated[str, typer.Option("--cause", "--reason", metavar="TEXT", help="What it was, for the ledger.")] = "",
    json_output: Json = False,
    wait: Wait = True,
    wait_s: WaitS = WAIT_S,
) -> None:
    """Let a paused or halted run go on. A run that stands still goes on at once; for one that has ended, `surefoot train RUN` does then.

    \b
    Examples:
      surefoot resume runs/quickstart --cause "bad shard, replaced"
      surefoot resume runs/quickstart --incident e41 --cause "node 7 was drained"
    """
    if not (run / LEDGER_NAME).exists():
        raise ConfigError("no ledger in it, so it is not a run", where=str(run), hint="give the folder of a run")
    job = live_job(run)
    entries = read_ledger(run / LEDGER_NAME)
    if incident and (why := refuse_unknown_incident(incident, run_dir=run, entries=entries)):
        raise ConfigError(why, where=f"--incident {incident}", hint=f"`surefoot ledger {run}` and {run / 'incidents'} have their names")
    halt = standing_halt(entries)
    if job is None:
        told = _release(run, entries, halt, incident=incident, cause=cause)
    elif halt is None:
        told = _nothing(run, entries)
    else:
        desk = Desk(run, "resume", job=job, wait_s=wait_s)
        told = desk.give(reason=cause, incident=incident)
        if wait:
            taken = desk.answer()
            desk.until(lambda entry: entry.event == Event.RUN_UNPAUSED and entry.seq > taken.seq)
            told = desk.told(taken, f"resumed: the run goes on after step {taken.step}", more={"released": True})
    told.say(json_output=json_output)


def _release(run: Path, entries: list[LedgerEntry], halt: LedgerEntry | None, *, incident: str, cause: str) -> Told:
    """No job trains it: the ledger says that it may go on."""
    closes = incident in open_episodes(entries)
    if halt is None and not closes:
        return _nothing(run, entries)
    if closes:
        tell(run, Event.EPISODE_CLOSED, rule="resume", reason=cause, fields={"episode": incident, "by": user_name()})
    if halt is None:
        return Told("resume", run, "done", f"episode {incident} is closed; the run was not halted", more={"released": False})
    released = tell(run, Event.RUN_RELEASED, reason=cause, fields={"incident": incident} if incident else {})
    words = f"released: `surefoot train {run}` goes on"
    return Told("resume", run, "done", words, by=released.by, step=released.step, seq=released.seq, more={"released": True})


def _nothing(run: Path, entries: list[LedgerEntry]) -> Told:
    words = "the run is neither paused nor halted: there is nothing to release"
    return Told("resume", run, "done", words, step=entries[-1].step if entries else None, more={"released": False})
