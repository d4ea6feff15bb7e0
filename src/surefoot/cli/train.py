"""`surefoot train`: starts a run, goes on with a stopped one, says so when it is finished."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from surefoot.cli.bound_rules import refuse_unknown_rules
from surefoot.cli.console import say
from surefoot.cli.resume_from import refuse_other_config, refuse_wish, wish_for
from surefoot.cli.stage_changes import base_of_next_start, refuse_other_unit, refuse_stage_change
from surefoot.cli.train_data import OnDataChange, is_other_data, prepare_missing_data, refuse_other_data
from surefoot.cli.train_lines import no_alerts, refuse_damaged, say_damage, say_end, say_over, say_start, say_unused_data
from surefoot.config import LoadedConfig, load_config
from surefoot.coordinate.budget import fold_history
from surefoot.coordinate.lease import LeaseKeeper
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import ConfigError, Preempted
from surefoot.core.events import Event
from surefoot.core.identity import STAGES, SettingChange
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.records import LedgerEntry, Phase
from surefoot.core.sections import RunConfig
from surefoot.launch.agent import Agent
from surefoot.launch.director import LocalDirector
from surefoot.launch.logs import logging_aside
from surefoot.launch.process import heeded_signals
from surefoot.launch.run_folder import compare_run_folder, record_run_folder
from surefoot.launch.torchrun import foreign_launcher, is_restart, missing_variables, what_is_missing
from surefoot.observe.halts import refuse_halted, refuse_stopped
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import Counters, fold_counters, fold_lineage
from surefoot.observe.live import LIVE_NAME, LiveRecord, write_live
from surefoot.observe.opening import note_take_over, open_ledger
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.observe.wishes import open_wish
from surefoot.plan.promise import promise

ENTRY = "surefoot.cli.worker:main"
WARM = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "surefoot.cli.worker",
)

Target = Annotated[Path, typer.Argument(metavar="FILE|RUN", help="a TOML config, or the folder of a run to go on with")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="for example train.num_steps=60")]
AcceptChanges = Annotated[
    list[str] | None, typer.Option("--accept-changes", metavar="SECTION", help="go on although this section differs; ledgered")
]
DataChange = Annotated[OnDataChange, typer.Option("--on-data-change", help="when the prepared data is not the one of the checkpoint")]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        "--resume-from",
        metavar="STEP|ID|PATH|URL",
        help="go on from this checkpoint, at this start only; `newest` takes an earlier wish back",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="also from one that is suspect, given up, or older than the newest proven one")]
Cause = Annotated[str, typer.Option("--cause", help="why, for the ledger")]
Check = Annotated[bool, typer.Option("--check", help="only do its first steps in a folder of their own, and say whether it can start")]
Json = Annotated[bool, typer.Option("--json", help="with --check: one JSON object")]


def train(
    target: Target,
    overrides: Overrides = None,
    accept_changes: AcceptChanges = None,
    on_data_change: DataChange = "refuse",
    resume_from: ResumeFrom = None,
    yes: Yes = False,
    cause: Cause = "",
    check: Check = False,
    json_output: Json = False,
) -> None:
    """Train. The same command starts a run, restarts it and resumes it.

    \b
    Examples:
      surefoot train examples/quickstart.toml
      surefoot train runs/quickstart
      surefoot train run.toml train.num_steps=60 parallel.dp_replicate=1
      surefoot train run.toml --check
      surefoot train runs/quickstart --resume-from 200 --yes --cause "the loss was odd after that"
    """
    wanted = _Wanted(tuple(accept_changes or ()), resume_from, yes, cause, on_data_change)
    loaded = load_config(_config_file(target), tuple(overrides or ()))
    if check:
        from surefoot.cli.train_check import check as check_run

        refuse_unknown_rules(loaded.config)
        raise typer.Exit(check_run(loaded, tuple(overrides or ()), json_output=json_output))
    os.environ["SUREFOOT_ON_DATA_CHANGE"] = on_data_change  # the ranks inherit it; it is a wish of this start, not of the run
    launcher = foreign_launcher(os.environ)
    for warning in loaded.warnings:
        say(f"note: {warning}")
    refuse_unknown_rules(loaded.config)
    if launcher is not None:
        _train_as_rank_of(launcher, loaded, wanted=wanted)
        return
    with _leaving_on_signals():
        raise typer.Exit(_train_under_agent(loaded, wanted=wanted))


@dataclass(frozen=True)
class _Wanted:
    """What the person allows and asks for at this start."""

    accepted: tuple[str, ...] = ()
    resume_from: str | None = None
    confirmed: bool = False
    cause: str = ""
    on_data_change: OnDataChange = "refuse"


def _config_file(target: Path) -> Path:
    if target.is_dir():
        if not (target / CONFIG_NAME).exists():
            raise ConfigError(f"no {CONFIG_NAME} in it, so it is not a run", where=str(target), hint="give a TOML to start one")
        return target / CONFIG_NAME
    return target


def _train_under_agent(loaded: LoadedConfig, *, wanted: _Wanted) -> int:
    from surefoot.cli.aides import aides_of  # the signals are answered by now: nothing slow stands before that

    run_dir, clock = Path(loaded.config.run.dir), SystemClock()
    if loaded.config.launch.nodes.strip() != "1":
        return _train_as_node(loaded, run_dir=run_dir, clock=clock, wanted=wanted)
    with _folder_of(run_dir), RunLock.acquire(run_dir, job=_new_job(), clock=clock, lease_s=loaded.config.launch.lease_s) as lock:
        opened = _open(loaded, lock=lock, clock=clock, by="agent", wanted=wanted)
        if opened.is_over:
            refuse_damaged(opened.entries, run_dir)
            say_over(opened.entries, run_dir, just_now=False)
            say_unused_data(loaded.config, run_dir)
            return 0
        say_damage(opened.entries)
        say_start(loaded.config, run_dir)
        num_ranks, counters, limits = loaded.config.parallel.num_ranks, fold_counters(opened.entries), loaded.config.launch
        agent = Agent(
            loaded.config,
            run_dir=run_dir,
            director=LocalDirector(limits, num_ranks=num_ranks, counters=counters, history=fold_history(opened.entries, limits=limits)),
            entry=ENTRY,
            warm=WARM,
            ledger=opened.ledger,
            lock=lock,
            clock=clock,
            console=say,
            aides=aides_of(
                loaded.config.checkpoint, run_dir, data=loaded.config.data, alerts=loaded.config.alerts, launch=loaded.config.launch
            ),
        )
        with logging_aside():
            exit_code = agent.run()
    say_end(exit_code, run_dir)
    return exit_code


def _train_as_node(loaded: LoadedConfig, *, run_dir: Path, clock: Clock, wanted: _Wanted) -> int:
    """One node of several. Whichever is first opens the run."""
    from surefoot.cli.aides import aides_of
    from surefoot.cli.train_nodes import train_on_nodes

    config = loaded.config

    def open_run(lock: RunLock) -> bool:
        opened = _open(loaded, lock=lock, clock=clock, by="agent", wanted=wanted)
        if opened.is_over:
            refuse_damaged(opened.entries, run_dir)
            say_over(opened.entries, run_dir, just_now=False)
            return False
        say_damage(opened.entries)
        say_start(config, run_dir)
        return True

    with _folder_of(run_dir):
        exit_code = train_on_nodes(
            loaded,
            open_run=open_run,
            entry=ENTRY,
            warm=WARM,
            clock=clock,
            agent_aides=lambda: aides_of(config.checkpoint, run_dir, data=config.data, alerts=config.alerts, launch=config.launch),
        )
    say_end(exit_code, run_dir)
    return exit_code


def _train_as_rank_of(launcher: str, loaded: LoadedConfig, *, wanted: _Wanted) -> None:
    """One rank of a stock launcher. Rank 0 takes the lock and opens the folder while the others wait; what we cannot give is said."""
    from surefoot.cli.worker import set_up_process, train_here

    missing = missing_variables(os.environ)
    if missing:
        hint = "use torchrun, or srun with a torchrun in it"
        raise ConfigError(f"{launcher} did not set {', '.join(missing)}", where="environment", hint=hint)
    run_dir, clock = Path(loaded.config.run.dir), SystemClock()

    def open_on_rank_0() -> RunLock:
        _make_folder(run_dir)
        lock = RunLock.acquire(run_dir, job=_new_job(), clock=clock, lease_s=loaded.config.launch.lease_s)
        try:
            _open(loaded, lock=lock, clock=clock, by="rank 0", wanted=wanted)
        except BaseException:
            lock.release()
            raise
        for line in filter(None, (promise(loaded.config.plan), *what_is_missing(launcher), *no_alerts(loaded.config.alerts))):
            say(line)
        return lock

    set_up_process()
    train_here(loaded.config, on_rank_0=open_on_rank_0)


@dataclass(frozen=True)
class _Opened:
    ledger: Ledger
    entries: list[LedgerEntry]
    is_over: bool


def _open(loaded: LoadedConfig, *, lock: RunLock, clock: Clock, by: str, wanted: _Wanted) -> _Opened:
    """Everything that may refuse comes before anything is written about the run; data is made while the lock is kept alive."""
    config, run_dir = loaded.config, Path(loaded.config.run.dir)
    ledger, entries = open_ledger(run_dir, clock=clock, by=by)
    changes = compare_run_folder(loaded, entries=entries, accepted=wanted.accepted)
    refuse_halted(entries)
    if is_restart(os.environ):
        refuse_stopped(entries, generation=fold_counters(entries).generation)
    if not changes and wanted.resume_from is None and _is_over(entries, config):
        return _Opened(ledger, entries, is_over=True)
    _refuse_start(loaded, entries=entries, changes=changes, lock=lock, clock=clock, wanted=wanted)
    if lock.taken_over is not None:
        note_take_over(ledger, entries, reason=lock.taken_over.reason, former=lock.taken_over.former)
        say(f"taking over the lock of a run that did not leave in order: {lock.taken_over.reason}")
    record_run_folder(loaded, ledger=ledger, entries=entries, changes=changes, accepted=wanted.accepted)
    if wanted.resume_from is not None:
        with LeaseKeeper(lock, lease_s=config.launch.lease_s) as keeper:
            wish_for(
                wanted.resume_from,
                config=config,
                run_dir=run_dir,
                entries=read_ledger(ledger.path),
                accepted=wanted.accepted,
                confirmed=wanted.confirmed,
                reason=wanted.cause,
            )
            keeper.check()
    return _Opened(ledger, entries, is_over=False)


def _refuse_start(
    loaded: LoadedConfig, *, entries: Sequence[LedgerEntry], changes: Sequence[SettingChange], lock: RunLock, clock: Clock, wanted: _Wanted
) -> None:
    """Raises whatever can be known without ranks to be in the way of this start. Writes nothing of the run; makes data that is missing."""
    config, run_dir = loaded.config, Path(loaded.config.run.dir)
    before = load_config(run_dir / CONFIG_NAME).config if (run_dir / CONFIG_NAME).exists() else None
    if wanted.resume_from is not None:
        refuse_wish(
            wanted.resume_from, config=config, run_dir=run_dir, entries=entries, accepted=wanted.accepted, confirmed=wanted.confirmed
        )
    base = base_of_next_start(run_dir, entries=entries, wanted=wanted.resume_from)
    if base is not None:
        refuse_other_config(base, config=config, run_dir=run_dir, entries=entries, accepted=wanted.accepted)
    cursor = base.cursor if base else {}
    if before is not None and any(section == STAGES for section, *_ in changes):
        refuse_stage_change(before, config, cursor=cursor, where=str(run_dir / CONFIG_NAME))
    refuse_other_unit(config, cursor=cursor, where=str(run_dir / CONFIG_NAME))
    with LeaseKeeper(lock, lease_s=config.launch.lease_s) as keeper:
        _show_phase_data(run_dir, fold_counters(entries), clock)
        vocab_size = prepare_missing_data(config, has_begun=any(entry.event == Event.ATTEMPT_STARTED for entry in entries))
        if config != before or is_other_data(config, cursor=cursor):  # else the ranks look at it, and nothing is written until then
            refuse_other_data(config, cursor=cursor, entries=entries, on_data_change=wanted.on_data_change)
        keeper.check()
    if not config.model.factory:
        resolve_sizes(config.model, vocab_size)
    if before is not None and changes:
        _refuse_other_shape(changes, before, config, vocab_size=vocab_size)


def _show_phase_data(run_dir: Path, counters: Counters, clock: Clock) -> None:
    """For `status`, while there is no rank yet."""
    record = LiveRecord(
        pid=os.getpid(),
        host=os.uname().nodename,
        generation=counters.generation,
        attempt=counters.attempt,
        phase=Phase.DATA.label,
        step=counters.step,
        ranks=(),
        updated_utc=clock.utc(),
        num_restarts=0,
    )
    with suppress(OSError):  # it only says what goes on
        write_live(run_dir, record)


def _new_job() -> str:
    return uuid.uuid4().hex[:12]


@contextmanager
def _folder_of(run_dir: Path) -> Iterator[None]:
    """The run folder; one that is made here and stays empty, because something was refused, goes again."""
    _make_folder(run_dir)
    try:
        yield
    finally:
        if not (run_dir / CONFIG_NAME).exists():
            with suppress(OSError):
                (run_dir / LIVE_NAME).unlink(missing_ok=True)
                run_dir.rmdir()  # only when nothing else is in it


def _make_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run folder cannot be made: {error.strerror}", where=str(run_dir), hint="choose another [run] dir"
        ) from error


def _is_over(entries: Sequence[LedgerEntry], config: RunConfig) -> bool:
    """Not while somebody's wish to go back is open: a kill between the wish and its start must not lose it."""
    newest = fold_lineage(entries).newest()
    return open_wish(entries) is None and fold_counters(entries).finished and newest is not None and newest.step >= config.train.num_steps


def _refuse_other_shape(changes: Sequence[SettingChange], old: RunConfig, new: RunConfig, *, vocab_size: int) -> None:
    """A change of the model's shape can be accepted by nobody: no checkpoint of the run would fit."""
    if any(section == "model" for section, *_ in changes) and not old.model.factory and not new.model.factory:
        before, after = resolve_sizes(old.model, vocab_size), resolve_sizes(new.model, vocab_size)
        if before != after:
            raise ConfigError(
                "the model would have another shape, which no checkpoint of this run fits",
                where="[model]",
                hint="another [run] dir starts anew",
            )


@contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """Until the agent takes the signals over (and after it), one of them ends this process with 75 and nothing half-written."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise Preempted(f"received {signal.Signals(number).name} before training began", hint="the same command starts again")

    heeded = heeded_signals()
    for number in heeded:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)  # the exit code is decided: what comes now must not replace it
