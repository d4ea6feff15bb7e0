"""The prover: has clean processes load what was committed, in time that nobody else wants. `python -m surefoot.cli.prover`, an aide.

What comes of it is in the ledger and nowhere else, so it may be killed at any time: the next one goes on from there.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.prove import Proof, other_world_size, prove
from surefoot.cli.ledgering import tell
from surefoot.core.errors import CheckpointError, SurefootError
from surefoot.core.records import CheckpointRef, Rung
from surefoot.launch.aide_duty import Duty
from surefoot.launch.process import run_when_idle
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import Lineage, fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME

logger = logging.getLogger(__name__)

# No settings: what is done in idle time costs nobody anything, and a run that saves seldom is proven at its first look anyway.
OTHER_TOPOLOGY_EVERY = 4
_MAX_TRIES = 2
_LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """A load to have done: by one process, or by as many as did not save it (`turn` chooses)."""

    ref: CheckpointRef
    turn: int | None = None


def next_task(lineage: Lineage, *, tried: Counter[tuple[str, bool]], only_newest: bool = False) -> Task | None:
    """The newest checkpoint that nobody has loaded; when all are, the newest on another topology if that is due.

    `tried` counts the loads that came to nothing, by id and whether it was another topology: each is left alone after two.
    `only_newest`: the run is over, and only its last save is waited for.
    """
    standing = [ref for name in reversed(lineage.line) if name not in lineage.retired and (ref := lineage.ref(name)) is not None]
    for ref in standing[:1] if only_newest else standing:
        if not ref.damaged and ref.rung in (Rung.WRITTEN, Rung.COMMITTED) and tried[ref.id, False] < _MAX_TRIES:
            return Task(ref)
    if only_newest:
        return None
    on_line = [ref for name in lineage.line if (ref := lineage.ref(name)) is not None]
    proven = [index for index, ref in enumerate(on_line) if ref.rung is Rung.PROVEN]
    is_due = not proven or len(on_line) - 1 - proven[-1] >= OTHER_TOPOLOGY_EVERY
    for ref in standing[:1] if is_due else []:
        if not ref.damaged and tried[ref.id, True] < _MAX_TRIES:
            return Task(ref, turn=len(proven))
    return None


class Prover:
    """Goes through the ledger, load by load. One thread; a load is processes of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / LEDGER_NAME
        self._tried: Counter[tuple[str, bool]] = Counter()
        self._seen_bytes = -1

    def look(self, *, only_newest: bool = False) -> bool:
        """Do the next load, if there is one; whether there was. Between two commits it costs one look at the size of the ledger."""
        num_bytes = self._path.stat().st_size
        if num_bytes == self._seen_bytes and not only_newest:
            return False
        task = next_task(fold_lineage(read_ledger(self._path)), tried=self._tried, only_newest=only_newest)
        if task is None:
            self._seen_bytes = num_bytes
            return False
        is_other = task.turn is not None
        self._tried[task.ref.id, is_other] += 1
        try:
            self._tell(self._load(task))
        except (SurefootError, OSError) as error:
            if self._is_retired(task.ref.id):
                logger.info("checkpoint %s was retired before it was loaded", task.ref.id)
            else:
                logger.warning("checkpoint %s: %s", task.ref.id, str(error).replace(f"{self._run_dir}{os.sep}", ""))
        return True

    def _load(self, task: Task) -> Proof:
        path = self._run_dir / CHECKPOINTS_NAME / task.ref.id
        if task.turn is None:
            return prove(path, expected_state_digest=task.ref.state_digest or None)
        num_ranks = other_world_size(_saved_world_size(path), turn=task.turn)
        return prove(path, num_ranks=num_ranks, dim=task.turn % 2, expected_state_digest=task.ref.state_digest or None)

    def _tell(self, proof: Proof) -> None:
        """What was retired while it was loaded is damaged for no other reason."""
        if self._is_retired(proof.checkpoint):
            logger.info("checkpoint %s was retired while it was loaded", proof.checkpoint)
            return
        event, fields = proof.event()
        tell(self._run_dir, event, by="prover", fields=fields)

    def _is_retired(self, checkpoint: str) -> bool:
        return checkpoint in fold_lineage(read_ledger(self._path)).retired


def _saved_world_size(path: Path) -> int:
    try:
        return read_manifest(path).topology.get("world_size", 0)
    except CheckpointError:
        return 0  # the load will say what is wrong with it


def main(arguments: Sequence[str] | None = None) -> int:
    duty = Duty.begin(arguments, prog="surefoot.cli.prover")
    run_when_idle()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    prover = Prover(duty.run_dir)
    while not duty.is_over:
        duty.wait(0.0 if prover.look() else _LOOK_INTERVAL_S)
    while prover.look(only_newest=True):
        continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
