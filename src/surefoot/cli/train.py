"""`surefoot train`: starts a run, goes on with a stopped one, says so when it is finished."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer

from surefoot.config import LoadedConfig, load_config
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import SystemClock
from surefoot.core.errors import EXIT_RETRY, ConfigError, DataError, Preempted
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.launch.agent import Agent
from surefoot.launch.run_folder import CONFIG_NAME, LEDGER_NAME, open_run_folder, refuse_halted
from surefoot.launch.torchrun import foreign_launcher, missing_variables, what_is_missing
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_counters, fold_lineage

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
OnDataChange = Annotated[
    Literal["refuse", "map", "restart-source"],
    typer.Option("--on-data-change", help="when the prepared data is not the one of the checkpoint"),
]


def train(
    target: Target, overrides: Overrides = None, accept_changes: AcceptChanges = None, on_data_change: OnDataChange = "refuse"
) -> None:
    """Train. The same command starts a run, restarts it and resumes it.

    \b
    Examples:
      surefoot train examples/quickstart.toml
      surefoot train runs/quickstart
      surefoot train run.toml train.num_steps=60 parallel.dp_replicate=1
    """
    loaded = load_config(_config_file(target), tuple(overrides or ()))
    os.environ["SUREFOOT_ON_DATA_CHANGE"] = on_data_change  # the ranks inherit it; it is a wish of this start, not of the run
    launcher = foreign_launcher(os.environ)
    for warning in loaded.warnings:
        typer.echo(f"note: {warning}", err=True)
    if launcher is not None:
        _train_as_rank_of(launcher, loaded, accepted=tuple(accept_changes or ()))
        return
    with _leaving_on_signals():
        raise typer.Exit(_train_under_agent(loaded, accepted=tuple(accept_changes or ())))


def _config_file(target: Path) -> Path:
    if target.is_dir():
        if not (target / CONFIG_NAME).exists():
            raise ConfigError(f"no {CONFIG_NAME} in it, so it is not a run", where=str(target), hint="give a TOML to start one")
        return target / CONFIG_NAME
    return target


def _train_under_agent(loaded: LoadedConfig, *, accepted: tuple[str, ...]) -> int:
    run_dir, clock = Path(loaded.config.run.dir), SystemClock()
    _make_folder(run_dir)
    with RunLock.acquire(run_dir, job=uuid.uuid4().hex[:12], clock=clock, lease_s=loaded.config.launch.lease_s) as lock:
        entries = read_ledger(run_dir / LEDGER_NAME)
        ledger = Ledger(run_dir / LEDGER_NAME, clock=clock, by="agent")
        if lock.taken_over is not None:
            counters = fold_counters(entries)
            ledger.append(
                Event.LOCK_TAKEN_OVER,
                generation=counters.generation,
                attempt=counters.attempt,
                step=counters.step,
                reason=lock.taken_over.reason,
                fields=lock.taken_over.former,
            )
        open_run_folder(loaded, ledger=ledger, entries=entries, accepted=accepted)
        refuse_halted(entries)
        if _is_over(entries, loaded.config):
            _say_over(entries, run_dir)
            return 0
        _prepare_missing_data(loaded.config)
        _say_start(loaded.config, run_dir)
        agent = Agent(
            loaded.config,
            run_dir=run_dir,
            num_ranks=_num_ranks(loaded.config),
            entry=ENTRY,
            warm=WARM,
            ledger=ledger,
            lock=lock,
            first_generation=fold_counters(entries).generation + 1,
            clock=clock,
            console=typer.echo,
        )
        exit_code = agent.run()
    _say_end(exit_code, run_dir)
    return exit_code


def _train_as_rank_of(launcher: str, loaded: LoadedConfig, *, accepted: tuple[str, ...]) -> None:
    """One rank of a stock launcher: rank 0 opens the folder, the guard takes the lock, and what we cannot give is said."""
    from surefoot.cli.worker import set_up_logging, train_here
    from surefoot.tensors.heap import keep_freed_pages

    missing = missing_variables(os.environ)
    if missing:
        raise ConfigError(
            f"{launcher} did not set {', '.join(missing)}", where="environment", hint="use torchrun, or srun with a torchrun in it"
        )
    if os.environ["RANK"] == "0":
        run_dir, clock = Path(loaded.config.run.dir), SystemClock()
        _make_folder(run_dir)
        entries = read_ledger(run_dir / LEDGER_NAME)
        ledger = Ledger(run_dir / LEDGER_NAME, clock=clock, by="rank 0")
        open_run_folder(loaded, ledger=ledger, entries=entries, accepted=accepted)
        refuse_halted(entries)
        _prepare_missing_data(loaded.config)
        for line in what_is_missing(launcher):
            typer.echo(line)
    set_up_logging()
    keep_freed_pages()
    train_here(loaded.config)


def _make_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run folder cannot be made: {error.strerror}", where=str(run_dir), hint="choose another [run] dir"
        ) from error


def _num_ranks(config: RunConfig) -> int:
    return config.parallel.num_ranks


def _is_over(entries: Sequence[LedgerEntry], config: RunConfig) -> bool:
    newest = fold_lineage(entries).newest()
    return fold_counters(entries).finished and newest is not None and newest.step >= config.train.num_steps


def _prepare_missing_data(config: RunConfig) -> None:
    """Make the prepared data when the config says from what and it is not there. A person's own folder is never overwritten."""
    path = Path(config.data.path)
    if not config.data.path:
        raise ConfigError("no data", where="[data] path", hint="name a prepared folder, or one to make from [[data.sources]]")
    if (path / "manifest.json").exists():
        return
    if not config.data.sources or not all(source.files for source in config.data.sources):
        raise DataError(
            "no prepared data here, and [[data.sources]] names no files to make it from",
            where=str(path),
            hint="`surefoot data prepare INPUT --out DIR` makes it",
        )
    from surefoot.data.prepare import prepare

    prepare(
        config.data.sources,
        out=path,
        tokenizer=config.data.tokenizer,
        heldout_fraction=config.data.heldout_fraction,
        progress=lambda progress: typer.echo(str(progress)),
    )


def _say_start(config: RunConfig, run_dir: Path) -> None:
    shown, pid = _shown(run_dir), os.getpid()
    typer.echo(f"run folder    {shown}, {config.parallel.num_ranks} ranks under agent pid {pid}")
    typer.echo("in a second terminal:")
    typer.echo(f"  surefoot status {shown}    where it stands")
    typer.echo(f"  kill -9 PID                 of a rank, the nursery or the agent ({pid}): nothing is lost but steps since the last save")
    typer.echo(f"  kill {pid}                  or Ctrl-C here: saves and leaves with {EXIT_RETRY}; the same command goes on")
    typer.echo("")


def _say_over(entries: Sequence[LedgerEntry], run_dir: Path) -> None:
    newest = fold_lineage(entries).newest()
    if newest is not None:
        typer.echo(f"the run is finished: {newest.step} steps, checkpoint {newest.id}, state digest {newest.state_digest}")
    _say_next(run_dir)


def _say_end(exit_code: int, run_dir: Path) -> None:
    if exit_code == 0:
        _say_over(read_ledger(run_dir / LEDGER_NAME), run_dir)
    elif exit_code == EXIT_RETRY:
        typer.echo(f"left with {EXIT_RETRY}: `surefoot train {_shown(run_dir)}` goes on")


def _say_next(run_dir: Path) -> None:
    shown = _shown(run_dir)
    typer.echo("what to do next:")
    typer.echo(f"  surefoot status {shown}                 where it stands")
    typer.echo(f"  surefoot checkpoint list {shown}        what was kept")
    typer.echo(f"  surefoot checkpoint verify {shown}      prove the newest one")
    typer.echo(f"  surefoot ledger {shown} --verify        the history, checked line by line")


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if not relative.startswith("../..") else str(path)


@contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """Until the agent takes the signals over (and after it), one of them ends this process with 75 and nothing half-written."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise Preempted(f"received {signal.Signals(number).name} before training began", hint="the same command starts again")

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    former = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
