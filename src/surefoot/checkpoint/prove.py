"""A checkpoint is trusted after others have loaded it: clean processes that know nothing of the run. No torch in this process."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from surefoot.checkpoint.clean import run_clean
from surefoot.checkpoint.manifest import parse_id, read_manifest
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import CheckpointError, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import Manifest, Problem, Rung

OTHER_WORLD_SIZES = (2, 3, 4)
"""Numbers of ranks that a proof takes in turn; the one that saved is left out."""
LIMIT_S = 3600.0
_MEMORY_SHARE = 4
_RANK_MODULE = "surefoot.checkpoint.prove_rank"


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
    No more than `budget_bytes` (default: `free_budget`) of it is in memory at a time. What is wrong with the checkpoint is in
    `Proof.problems`; SurefootError means that nothing is known about it: processes were killed, or not done within `limit_s`.
    """
    clock = clock or SystemClock()
    began_s = clock.monotonic_s()
    was_there = path.is_dir()
    job = {"path": str(path.absolute()), "dim": dim, "expected": expected_state_digest, "budget_bytes": budget_bytes or free_budget()}
    problems = [Problem(**problem) for problem in run_clean(_RANK_MODULE, job, size=num_ranks, limit_s=limit_s, clock=clock)]
    if was_there and not path.is_dir():
        raise SurefootError("the checkpoint was removed while it was being loaded", where=str(path), hint="prove a newer one")
    manifest = _manifest_or_none(path)
    return Proof(
        checkpoint=path.name if parse_id(path.name) or manifest is None else manifest.id,
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


def free_budget() -> int:
    """Bytes that a proof may hold at a time: a quarter of what this machine has free."""
    return int(psutil.virtual_memory().available) // _MEMORY_SHARE


def _manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
