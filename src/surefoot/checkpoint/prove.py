"""A checkpoint is trusted after others have loaded it: clean processes that know nothing of the run. No torch in this process.

`prove` starts them and waits, bounded. They inherit its scheduling class, so a caller that runs in time that nobody else wants has them run
there too. They never touch an accelerator, and end with their parent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from surefoot.checkpoint.manifest import read_manifest
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import CheckpointError, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import Manifest, Problem, Rung
from surefoot.core.strict_json import dumps

OTHER_WORLD_SIZES = (2, 3, 4)
"""Numbers of ranks that a proof takes in turn; the one that saved is left out."""
LIMIT_S = 3600.0
_POLL_S = 0.05
_MEMORY_SHARE = 4
_RANK_MODULE = "surefoot.checkpoint.prove_rank"
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONSTARTUP")


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of one load. `ok` with `world_size` 1 makes a checkpoint loadable; with another number of ranks than saved, proven."""

    checkpoint: str
    state_digest: str
    world_size: int
    saved_world_size: int
    dim: int
    ok: bool
    problems: tuple[Problem, ...]
    num_tensors: int
    num_bytes: int
    wall_s: float
    host: str

    @property
    def rung(self) -> Rung | None:
        """The rung that this load reached; None when it failed."""
        if not self.ok:
            return None
        return Rung.PROVEN if self.world_size > 1 and self.world_size != self.saved_world_size else Rung.LOADABLE

    def event(self) -> tuple[Event, Mapping[str, object]]:
        """What the ledger says about it."""
        fields: dict[str, object] = {
            "id": self.checkpoint,
            "host": self.host,
            "wall_s": round(self.wall_s, 3),
            "world_size": self.world_size,
        }
        if not self.ok:
            return Event.CHECKPOINT_DAMAGED, {**fields, "by": f"a load by {self.world_size} ranks", "problems": list(self.problems)}
        if self.rung is Rung.PROVEN:
            return Event.CHECKPOINT_PROVEN, {**fields, "dim": self.dim}
        return Event.CHECKPOINT_LOADED, fields


def prove(
    path: Path,
    *,
    num_ranks: int = 1,
    dim: int = 0,
    expected_state_digest: str | None = None,
    budget_bytes: int | None = None,
    limit_s: float = LIMIT_S,
    clock: Clock | None = None,
) -> Proof:
    """Local. Have `num_ranks` clean processes load the whole checkpoint folder `path` and compare every digest.

    With one, each tensor is loaded whole; with more, as a DTensor cut on `dim` (counted from the end again where a tensor has fewer).
    No more than `budget_bytes` (default: a quarter of what is free) of it is in memory at a time. What is wrong with the checkpoint is in
    `Proof.problems`; SurefootError means that nothing is known about it: processes were killed, or not done within `limit_s`.
    """
    clock = clock or SystemClock()
    began_s = clock.monotonic_s()
    budget_bytes = budget_bytes or psutil.virtual_memory().available // _MEMORY_SHARE
    job: dict[str, Any] = {"path": str(path.absolute()), "world_size": num_ranks, "dim": dim, "expected": expected_state_digest}
    problems = _run_ranks({**job, "budget_bytes": budget_bytes, "limit_s": limit_s}, clock=clock)
    manifest = _manifest_or_none(path)
    return Proof(
        checkpoint=manifest.id if manifest else path.name,
        state_digest=manifest.state_digest if manifest else "",
        world_size=num_ranks,
        saved_world_size=manifest.topology.get("world_size", 0) if manifest else 0,
        dim=dim,
        ok=not problems,
        problems=tuple(problems),
        num_tensors=len(manifest.tensors) if manifest else 0,
        num_bytes=sum(file.num_bytes for file in manifest.files) if manifest else 0,
        wall_s=clock.monotonic_s() - began_s,
        host=socket.gethostname(),
    )


def other_world_size(saved: int, *, turn: int) -> int:
    """A number of ranks that did not save; another one at each `turn`."""
    others = [size for size in OTHER_WORLD_SIZES if size != saved]
    return others[turn % len(others)]


def clean_environment() -> dict[str, str]:
    """What a process that loads may know: nothing of a run, one thread, no accelerator, loopback alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_INHERITED and not name.startswith(("SUREFOOT_", "TORCHELASTIC_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


def _run_ranks(job: Mapping[str, Any], *, clock: Clock) -> list[Problem]:
    size = int(job["world_size"])
    with tempfile.TemporaryDirectory(prefix="surefoot-prove-") as name:
        folder = Path(name)
        children = []
        try:
            for rank in range(size):
                children.append(_start(rank, {**job, "rank": rank, "folder": name}, folder=folder))
            _wait(children, folder=folder, limit_s=float(job["limit_s"]), clock=clock)
        finally:
            for child in children:
                child.kill()
                child.wait()
                if child.stdin is not None:
                    child.stdin.close()
        found = json.loads((folder / "problems.json").read_text())
    return [Problem(**problem) for problem in found]


def _start(rank: int, job: Mapping[str, Any], *, folder: Path) -> subprocess.Popen[bytes]:
    """Its stdin is a pipe that nobody writes to: it closes when this process ends, and the child with it."""
    with (folder / f"rank_{rank}.log").open("wb") as log:
        command = [sys.executable, "-m", _RANK_MODULE, dumps(job)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=clean_environment())


def _wait(children: list[subprocess.Popen[bytes]], *, folder: Path, limit_s: float, clock: Clock) -> None:
    """Until all have ended well. Raises SurefootError for the first that did not, or when the time is up."""
    give_up_s = clock.monotonic_s() + limit_s
    while any(child.poll() is None for child in children):
        failed = next((rank for rank, child in enumerate(children) if child.poll() not in (None, 0)), None)
        if failed is not None or clock.monotonic_s() >= give_up_s:
            break
        clock.sleep(_POLL_S)
    for rank, child in enumerate(children):
        code = child.poll()
        if code not in (None, 0):
            raise _inconclusive(f"rank {rank} of {len(children)} {_ending(int(code or 0))}", folder / f"rank_{rank}.log")
    if any(child.poll() is None for child in children):
        raise SurefootError(
            f"the load was not done within {limit_s:g} s", where="proof", hint="nothing is known about the checkpoint; try again"
        )


def _ending(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _inconclusive(what: str, log: Path) -> SurefootError:
    lines = log.read_text(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    return SurefootError(f"{what}{last}", where="proof", hint="nothing is known about the checkpoint; is there enough memory?")


def _manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
