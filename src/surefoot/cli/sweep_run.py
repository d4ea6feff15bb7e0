"""`surefoot sweep run`: trains what is not trained yet, by the public commands alone, several runs at a time when asked to."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.console import say
from surefoot.cli.sweep_folder import Point, SweepFolder, read_sweep
from surefoot.cli.sweep_numbers import flops
from surefoot.core.clock import SystemClock
from surefoot.core.errors import EXIT_RETRY, ConfigError, Preempted, SurefootError
from surefoot.core.units import show_duration

_POLL_S = 0.2
_HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `sweep plan --out` or `sweep probe` made.")],
    max_flops: Annotated[float, typer.Option("--max-flops", metavar="FLOPS", help="Agree to train this much; needed once.")] = 0.0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time; they share the machine.")] = 1,
) -> None:
    """Train the runs of a sweep. Again after anything: what is finished stays, what was under way goes on, the rest begins.

    A run that fails is named and left out, the others go on; exit 1 when one was.

    Example: surefoot sweep run sweeps/first --max-flops 3e13 --jobs 2
    """
    flops(max_flops, where="--max-flops")
    folder = read_sweep(path)
    left = [point for point in folder.points if not is_finished(folder.run_dir(point.name), num_steps=point.num_steps)]
    _agree(folder, left, max_flops=max_flops)
    done_flops = sum(point.trained_flops for point in folder.points) - sum(point.trained_flops for point in left)
    say(f"{len(folder.points) - len(left)} of {len(folder.points)} runs are finished, {done_flops:.3g} FLOPs of {_all_flops(folder):.3g}")
    state = _State(folder, waiting=list(left))
    with _Forwarding(state):
        _work_off(state, jobs=jobs)
    if state.stopped and (state.waiting or state.cut_off):
        raise Preempted("the sweep was stopped", where=str(path), hint=f"the same command goes on: surefoot sweep run {path}")
    for name, why in state.failed.items():
        say(f"left out: {name}: {why}")
    say(f"{len(folder.points) - len(state.failed)} of {len(folder.points)} runs are finished; next: surefoot sweep fit {path}")
    if state.failed:
        raise typer.Exit(1)


@dataclass
class _State:
    """What is waiting, under way and failed. `stopped` once somebody asked to leave; `cut_off` are those that did."""

    folder: SweepFolder
    waiting: list[Point]
    running: dict[str, _Job] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    cut_off: list[str] = field(default_factory=list)
    trained_flops: float = 0.0
    began_s: float = field(default_factory=time.monotonic)


@dataclass
class _Job:
    point: Point
    process: subprocess.Popen[bytes]

    def ask_to_leave(self) -> None:
        """Harmless for one that has ended."""
        self.process.send_signal(signal.SIGTERM)


def is_finished(run_dir: Path, *, num_steps: int) -> bool:
    from surefoot.observe.ledger import LEDGER_NAME, read_ledger
    from surefoot.observe.lineage import fold_lineage

    try:
        lineage = fold_lineage(read_ledger(run_dir / LEDGER_NAME, up_to_damage=True))
    except SurefootError:
        return False
    newest = lineage.newest()
    return lineage.counters.finished and newest is not None and newest.step >= num_steps


def _all_flops(folder: SweepFolder) -> float:
    return sum(point.trained_flops for point in folder.points)


def _agree(folder: SweepFolder, left: Sequence[Point], *, max_flops: float) -> None:
    """Nothing is trained that nobody agreed to. A limit given to `sweep plan` is an agreement."""
    cost = sum(point.trained_flops for point in left)
    limit = max_flops or float(folder.about.get("max_flops") or 0.0)
    if cost > limit:
        what = f"{len(left)} runs would train {cost:.4g} FLOPs" + (
            f", the limit is {limit:.4g}" if limit else " and nobody has agreed to that"
        )
        hint = f"surefoot sweep run {folder.path} --max-flops {cost * 1.01:.3g}"
        raise ConfigError(what, where=str(folder.path), hint=hint, got=cost, limit=limit)


def _work_off(state: _State, *, jobs: int) -> None:
    from surefoot.data.manifest import MANIFEST_NAME

    data = _data_path(state.folder)
    while (state.waiting and not state.stopped) or state.running:
        # Data that nobody has prepared is made by the first run, and by it alone.
        room = jobs if data is None or (data / MANIFEST_NAME).exists() else 1
        while not state.stopped and len(state.running) < room and (point := _next(state)) is not None:
            _start(state, point)
        time.sleep(_POLL_S)
        for name in [name for name, job in state.running.items() if job.process.poll() is not None]:
            _ended(state, state.running.pop(name))


def _data_path(folder: SweepFolder) -> Path | None:
    from surefoot.config import load_config

    for point in (point for point in folder.points if not point.parent):
        with suppress(ConfigError):  # its own run will say so
            return Path(load_config(folder.config_file(point.name)).config.data.path)
    return None


def _next(state: _State) -> Point | None:
    """The first whose parent is no longer under way: it has the checkpoint then, or it never will."""
    ahead = {*state.running, *(point.name for point in state.waiting)}
    point = next((point for point in state.waiting if point.parent not in ahead), None)
    if point is not None:
        state.waiting.remove(point)
    return point


def _start(state: _State, point: Point) -> None:
    """Unless somebody asks to leave before it trains: then it waits for the next time."""
    folder, run_dir = state.folder, state.folder.run_dir(point.name)
    _wait_for_former(state, run_dir)
    if not state.stopped and is_finished(run_dir, num_steps=point.num_steps):
        return
    branched = state.stopped or not point.parent or run_dir.exists() or _branch(folder, point)
    if state.stopped:  # whatever became of the branch: it is whole or absent
        state.waiting.insert(0, point)
    elif branched:
        _train(state, point)
    else:
        state.failed[point.name] = f"it could not branch from {point.parent} at step {point.branch_step}: {_last_word(folder, point)}"
        say(f"  {point.name}: {state.failed[point.name]}")


def _branch(folder: SweepFolder, point: Point) -> bool:
    arguments = ["--from", str(point.branch_step), "--dir", str(folder.run_dir(point.name)), *point.overrides]
    command = _command("checkpoint", "branch", str(folder.parent_dir(point)), *arguments)
    folder.log_file(point.name).parent.mkdir(exist_ok=True)
    with folder.log_file(point.name).open("ab") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0


def _train(state: _State, point: Point) -> None:
    folder, run_dir = state.folder, state.folder.run_dir(point.name)
    folder.log_file(point.name).parent.mkdir(exist_ok=True)
    target = run_dir if (run_dir / "config.toml").is_file() else folder.config_file(point.name)
    with folder.log_file(point.name).open("ab") as log:
        # A group of its own: what is asked of the sweep reaches its runs once, through `_Forwarding`.
        process = subprocess.Popen(_command("train", str(target)), stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0)
    job = state.running[point.name] = _Job(point, process)
    if state.stopped:  # while it was being started, so that `_Forwarding` did not know of it
        job.ask_to_leave()
    say(f"  {point.name}: {point.trained_flops:.3g} FLOPs, pid {process.pid}, log {folder.log_file(point.name)}")


def _ended(state: _State, job: _Job) -> None:
    point, code = job.point, job.process.returncode
    if code == 0:
        state.trained_flops += point.trained_flops
        rate = state.trained_flops / (time.monotonic() - state.began_s)
        left_flops = sum(one.trained_flops for one in state.waiting) + sum(one.point.trained_flops for one in state.running.values())
        rest = f", about {show_duration(left_flops / rate)} left" if left_flops else ""
        say(f"  {point.name}: finished; {rate:.3g} FLOP/s over all runs{rest}")
    elif state.stopped and code in (EXIT_RETRY, -signal.SIGTERM):  # the latter where it was too young to heed the request
        state.cut_off.append(point.name)
    else:
        state.failed[point.name] = f"exit {code}: {_last_word(state.folder, point)}"
        say(f"  {point.name}: {state.failed[point.name]}")


def _wait_for_former(state: _State, run_dir: Path) -> None:
    """A sweep that was killed leaves its runs training: each is waited for, not started twice. Until somebody asks to leave."""
    from surefoot.observe.live import is_held, read_lock

    told = False
    while not state.stopped and (lock := read_lock(run_dir)) is not None and is_held(lock, clock=SystemClock()):
        if not told:
            say(f"  {run_dir.name}: is being trained by pid {lock.holder.pid} on {lock.holder.host}; waiting for it")
            told = True
        time.sleep(_POLL_S)


def _last_word(folder: SweepFolder, point: Point) -> str:
    """The last error line of the log: a hint follows it, indented."""
    lines = folder.log_file(point.name).read_text(errors="replace").splitlines()
    told = [line for line in lines if line.startswith("surefoot:")] or [line for line in lines if line.strip()]
    return told[-1].removeprefix("surefoot:").strip() if told else f"see {folder.log_file(point.name)}"


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "surefoot.cli.main", *arguments]


class _Forwarding:
    """While it is open, a request to leave reaches the runs, which save and end with 75; nothing new begins."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._former: Mapping[int, object] = {}

    def __enter__(self) -> None:
        self._former = {number: signal.signal(number, self._leave) for number in _HEEDED}

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]  # what signal.signal gave back it also takes

    def _leave(self, *_: object) -> None:
        self._state.stopped = True
        for job in self._state.running.values():
            job.ask_to_leave()
