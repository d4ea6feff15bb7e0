"""What the ledger says about a save, whoever brings it home: the uploader of an agent, or a thread of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.core.events import Event
from surefoot.core.records import Manifest, Problem


def commit_fields(manifest: Manifest) -> dict[str, object]:
    """Of `checkpoint.committed` and `checkpoint.adopted`."""
    return {
        "id": manifest.id,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "state_digest": manifest.state_digest,
        "num_bytes": sum(file.num_bytes for file in manifest.files),
    }


def read_back_event(manifest: Manifest, problems: Sequence[Problem], *, host: str, wall_s: float) -> tuple[Event, dict[str, object]]:
    """What storage gave back of a commit: `checkpoint.verified`, or `checkpoint.damaged` with every problem by name."""
    fields: dict[str, object] = {"id": manifest.id, "host": host, "wall_s": round(wall_s, 3), "by": "read-back"}
    if problems:
        return Event.CHECKPOINT_DAMAGED, {**fields, "problems": list(problems)}
    num_bytes = sum(file.num_bytes for file in manifest.files)
    return Event.CHECKPOINT_VERIFIED, {**fields, "num_files": len(manifest.files), "num_bytes": num_bytes}
