"""A start: what ledger and folder say, and which checkpoint to go on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.retention import remove, sweep
from surefoot.core.errors import CheckpointError
from surefoot.core.events import Event
from surefoot.core.records import Manifest
from surefoot.guard.recording import Recorder
from surefoot.observe.halts import refuse_halted
from surefoot.observe.interruptions import Interruptions, fold_interruptions
from surefoot.observe.lineage import adoptable, candidates, fold_lineage
from surefoot.observe.saves import commit_fields
from surefoot.observe.wishes import Wish, open_wish

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """What ledger and folder say at a start, the same on all ranks. `candidates` are {id, state_digest}, best first; `left_out` are there
    too, but nobody may take them unasked."""

    last_attempt: int
    candidates: list[dict[str, str]]
    wish: Wish | None = None
    interruptions: Interruptions = field(default_factory=lambda: Interruptions(0, 0.0, None))
    left_out: tuple[str, ...] = ()


def survey(*, generation: int, recorder: Recorder, root: Path) -> dict[str, Any]:
    """On rank 0. What ledger and folder say, after what a dead process left undone is done. JSON types."""
    refuse_halted(recorder.entries())
    sweep(root, generation=generation)
    for manifest in adoptable(_readable_manifests(root), fold_lineage(recorder.entries())):
        reason = "published, but its writer died before it could say so"
        recorder.ledger(Event.CHECKPOINT_ADOPTED, reason=reason, fields=commit_fields(manifest))
    entries = recorder.entries()
    lineage = fold_lineage(entries)
    for checkpoint in lineage.retired.intersection(published(root)):
        remove(root, checkpoint, generation=generation)  # its process died between deciding and deleting
    found = candidates(lineage)
    wish = open_wish(entries)
    if wish is not None:
        found = [ref for ref in lineage.refs if ref.id == wish.checkpoint]
    return {
        "last_attempt": lineage.counters.attempt,
        "candidates": [{"id": ref.id, "state_digest": ref.state_digest} for ref in found],
        "wish": wish.as_json() if wish else None,
        "interruptions": asdict(fold_interruptions(entries)),
        "left_out": [ref.id for ref in lineage.refs if (ref.abandoned or ref.suspect) and (root / ref.id).is_dir()],
    }


def survey_from_json(told: Mapping[str, Any]) -> Survey:
    wish = Wish(**told["wish"]) if told["wish"] else None
    return Survey(
        int(told["last_attempt"]), list(told["candidates"]), wish, Interruptions(**told["interruptions"]), tuple(told["left_out"])
    )


def _readable_manifests(root: Path) -> list[Manifest]:
    """Manifests of the published checkpoints; one that cannot be read is nobody's to adopt, and a restore will name what is wrong."""
    manifests = []
    for checkpoint in published(root):
        try:
            manifests.append(read_manifest(root / checkpoint))
        except CheckpointError as error:
            logger.warning("checkpoint %s: %s", checkpoint, error)
    return manifests
