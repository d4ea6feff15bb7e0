"""What `surefoot train` tells a person before and after its ranks, and whether the end it tells of is a good one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from surefoot.cli.console import say
from surefoot.cli.trust import how_far_trusted
from surefoot.config import load_config
from surefoot.core.errors import EXIT_RETRY, CheckpointError
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import AlertsSection, RunConfig
from surefoot.heal.alerts import is_named
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.plan.promise import promise


def say_start(config: RunConfig, run_dir: Path) -> None:
    shown, pid = _shown(run_dir), os.getpid()
    say(f"run folder    {shown}, {config.parallel.num_ranks} ranks under agent pid {pid}")
    if planned := promise(config.plan):
        say(planned)
    say("in a second terminal:")
    say(f"  {_command()} status {shown}    where it stands")
    say(f"  kill -9 PID                 of a rank, the nursery or the agent ({pid}): nothing is lost but steps since the last save")
    say(f"  kill {pid}                  or Ctrl-C here: saves and leaves with {EXIT_RETRY}; the same command goes on")
    say("")


def no_alerts(alerts: AlertsSection) -> list[str]:
    """For a start without the agent, whose process sends them."""
    return ["no alerts: [alerts] names somewhere, but the process that sends them belongs to surefoot's agent"] if is_named(alerts) else []


def refuse_damaged(entries: Sequence[LedgerEntry], run_dir: Path) -> None:
    """A finished run whose last checkpoint was found damaged is not fine. Raises CheckpointError."""
    lineage = fold_lineage(entries)
    head, newest = lineage.head, lineage.newest()
    if head is None or not head.damaged:
        return
    shown = _shown(run_dir)
    way_on = f"; `surefoot train {shown}` goes on from {newest.id}" if newest is not None and not newest.damaged else ""
    raise CheckpointError(
        f"the run is finished, but the last look at its checkpoint {head.id} found damage",
        where=shown,
        hint=f"put a copy of it back; `surefoot checkpoint verify {shown}` looks again and remembers what it finds{way_on}",
    )


def say_damage(entries: Sequence[LedgerEntry]) -> None:
    lineage = fold_lineage(entries)
    head, newest = lineage.head, lineage.newest()
    if head is not None and newest is not None and head.damaged and newest.step < head.step:
        say(f"note: the last look at {head.id} found damage; going on from {newest.id}, so its last steps are trained again")


def say_over(entries: Sequence[LedgerEntry], run_dir: Path, *, just_now: bool) -> None:
    lineage = fold_lineage(entries)
    last = lineage.head if just_now else lineage.newest()
    if last is not None:
        say(f"the run is finished: {last.step} steps, checkpoint {last.id}, state digest {last.state_digest}")
        say(how_far_trusted(last, command=_command(), run=_shown(run_dir)))
        if not just_now:
            say(f"its bytes were not read again: `{_command()} checkpoint verify {_shown(run_dir)}` does")
    _say_next(run_dir)


def say_unused_data(config: RunConfig, run_dir: Path) -> None:
    """A finished run takes no other data, and a person who names some is told."""
    trained_on = load_config(run_dir / CONFIG_NAME).config.data.path
    if config.data.path != trained_on:
        say(f"note: data.path = {_shown(Path(config.data.path))} changes nothing: the run is finished, on {_shown(Path(trained_on))}")
        say("      to train on, give more steps: train.num_steps=N --accept-changes train")


def say_end(exit_code: int, run_dir: Path) -> None:
    if exit_code == 0:
        entries = read_ledger(run_dir / LEDGER_NAME)
        refuse_damaged(entries, run_dir)
        say_over(entries, run_dir, just_now=True)
    elif exit_code == EXIT_RETRY:
        say(f"left with {EXIT_RETRY}: `{_command()} train {_shown(run_dir)}` goes on")


def _say_next(run_dir: Path) -> None:
    shown = _shown(run_dir)
    say("what to do next:")
    say(f"  {_command()} status {shown}                 where it stands")
    say(f"  {_command()} checkpoint list {shown}        what was kept")
    say(f"  {_command()} checkpoint verify {shown}      read every byte of the newest one again")
    say(f"  {_command()} checkpoint prove {shown}       load it in clean processes")
    say(f"  {_command()} ledger {shown} --verify        the history, checked line by line")


def _command() -> str:
    """How this program is called from here: by its name where the shell finds it, else by its path."""
    return "surefoot" if shutil.which("surefoot") else _shown(Path(sys.argv[0]).absolute())


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("../..") else str(path)
