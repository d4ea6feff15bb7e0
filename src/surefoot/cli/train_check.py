"""`surefoot train --check`: the first steps of the real layout in a folder of their own, and what they and the machine show."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from surefoot.cli.console import say
from surefoot.cli.train_check_page import Found, as_json, checks_of, lines_of
from surefoot.config import LoadedConfig
from surefoot.core.errors import EXIT_DONE, EXIT_FAILED, SurefootError
from surefoot.core.events import Event
from surefoot.core.sections import RunConfig
from surefoot.core.strict_json import dumps

NUM_STEPS = 3
"""The first one compiles and connects; those after it tell what a step takes."""
STEPS_LIMIT_S = 600.0
"""Beyond the limit of a start: data that is yet to be prepared, and first steps of large models."""
WRITE_BYTES = 64 << 20
_SAVING = ("checkpoint.interval_steps=1", "checkpoint.interval_s=0.0")


@dataclass(slots=True)
class _Steps:
    """What is seen of the steps while they run. `peaks` in bytes of host memory, by rank."""

    peaks: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    num_done: int = 0


def check(loaded: LoadedConfig, overrides: Sequence[str], *, json_output: bool) -> int:
    """0 when the run can start, 1 with reasons when it cannot. Nothing of the run is written, nor are data that it would prepare."""
    run_dir = Path(loaded.config.run.dir)
    try:
        with _folder_beside(run_dir) as folder:
            if not json_output:
                say(f"checking {loaded.path} in {folder}, which goes away again")
            found = _look(loaded, overrides, folder)
    except OSError as error:
        found = Found(loaded.config, problem=f"no folder can be made beside the run folder {run_dir}: {error.strerror}")
    checks = checks_of(found)
    go = all(one.ok for one in checks)
    if json_output:
        say(dumps({"schema_version": 1, "run": loaded.config.run.name, "go": go, **as_json(found, checks)}))
    else:
        for line in (*lines_of(found, checks), "", "go" if go else "no go"):
            say(line)
    return EXIT_DONE if go else EXIT_FAILED


@contextmanager
def _folder_beside(run_dir: Path) -> Iterator[Path]:
    """On the file system that the run will be on, however much of its path is there yet."""
    place = next(parent for parent in run_dir.absolute().parents if parent.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=".surefoot-check-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _look(loaded: LoadedConfig, overrides: Sequence[str], folder: Path) -> Found:
    from surefoot.drill.scratch import QUIET, Scratch

    config = loaded.config
    prepared = bool(config.data.path) and Path(config.data.path).exists()
    elsewhere = () if prepared else (f"data.path={folder / 'prepared'}",)
    scratch = Scratch(folder, loaded.path, (*overrides, *QUIET, *_SAVING, *elsewhere))
    seen, problem, begun_s = _Steps(), "", time.monotonic()
    run = scratch.start("run")
    try:
        run.until(
            lambda: _follow(run.live(), run.entries(), seen, config),
            what="its first steps and a commit were done",
            limit_s=_limit_s(config),
        )
        run.process.terminate()  # it saves and leaves, and its metrics are whole
        run.wait(limit_s=config.launch.grace_s)
    except SurefootError as error:
        if run.process.poll() != EXIT_DONE:  # a run of fewer steps than these is done
            problem = f"{error.what}: {error.hint}"
    finally:
        run.end()
    took_s = time.monotonic() - begun_s
    rows, entries = _rows(run.dir), run.entries()
    on_devices = any(entry.fields.get("devices") for entry in entries if entry.event == Event.ATTEMPT_STARTED)
    sizes = sorted(_size(path) for path in (run.dir / "checkpoints").glob("s*")) if (run.dir / "checkpoints").exists() else []
    checkpoint_bytes = sizes[-1] if sizes else None
    return Found(
        config,
        problem=problem,
        prepared=prepared,
        took_s=took_s,
        peaks=seen.peaks,
        step_s=min((row["step_s"] for row in rows[1:]), default=rows[0]["step_s"] if rows else None),
        first_step_s=rows[0]["step_s"] if rows else None,
        exchange_s=rows[-1]["exchange_s"] if rows else None,
        device_bytes=max((row["memory_bytes"] for row in rows if on_devices and row["memory_bytes"]), default=None),
        checkpoint_bytes=checkpoint_bytes,
        write_bytes_per_s=_write_rate(folder),
        free_bytes=shutil.disk_usage(folder).free,
        refused=_refused(folder, checkpoint_bytes, config),
        versions=_versions(),
        limits=_limits(config),
    )


def _follow(live: Any, entries: Sequence[Any], seen: _Steps, config: RunConfig) -> bool | None:
    from surefoot.launch.processes import memory_of

    if live is None:
        return None
    for rank in live.ranks:
        if (view := memory_of(rank.pid)) is not None:
            seen.peaks[rank.rank] = max(seen.peaks.get(rank.rank, 0), view.peak_bytes)
    seen.num_done = min((rank.step for rank in live.ranks), default=0)
    enough = len(live.ranks) == config.parallel.num_ranks and seen.num_done >= min(NUM_STEPS, config.train.num_steps)
    return True if enough and any(entry.event == Event.CHECKPOINT_COMMITTED for entry in entries) else None


def _limit_s(config: RunConfig) -> float:
    return config.launch.init_limit_s + STEPS_LIMIT_S


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    from surefoot.observe.metrics import read_steps

    columns = ("step", "step_s", "exchange_s", "memory_bytes")
    rows: list[dict[str, Any]] = read_steps(run_dir, columns=columns).to_pylist() if (run_dir / "metrics").exists() else []
    return sorted(rows, key=lambda row: row["step"])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_rate(folder: Path) -> float | None:
    """Bytes per second into one file, made durable: what a save of one rank gets."""
    path, block = folder / "write", os.urandom(1 << 20)
    begun_s = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(WRITE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)
    return WRITE_BYTES / (time.monotonic() - begun_s)


def _refused(folder: Path, checkpoint_bytes: int | None, config: RunConfig) -> str:
    """Why the file system, or a quota of it, would not take what the run keeps; empty when it would. Reserved and let go at once.

    Free space is compared first, so that nothing that is missing is asked for; a file system that cannot reserve is not asked to write.
    """
    from surefoot.cli.train_check_page import kept_bytes

    needed = kept_bytes(config, checkpoint_bytes) if checkpoint_bytes else 0
    if not needed or needed > shutil.disk_usage(folder).free:
        return ""
    path = folder / "reserved"
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("wb") as file:
        failed = libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(needed))
        error = ctypes.get_errno() if failed else 0
    with suppress(OSError):
        path.unlink()
    return os.strerror(error) if error in (errno.EDQUOT, errno.ENOSPC, errno.EFBIG) else ""


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in ("surefoot", "torch", "numpy")}}


def _limits(config: RunConfig) -> str:
    from surefoot.coordinate.phase_limits import configured_limits, worst_case_line
    from surefoot.launch.watch import LOOK_INTERVAL_S

    return worst_case_line(configured_limits(config.launch), look_s=LOOK_INTERVAL_S)
