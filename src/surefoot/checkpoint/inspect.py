"""What lies in a checkpoints folder, without torch: for listings and for finding the newest."""

from __future__ import annotations

from pathlib import Path

from surefoot.checkpoint.manifest import MANIFEST_NAME, parse_id, read_manifest
from surefoot.core.records import CheckpointRef, Manifest


def published(root: Path) -> list[str]:
    """Ids of the published checkpoints under `root`, by (step, attempt, retry). The order is no lineage: that is the ledger's."""
    ids = [(parsed, entry.name) for entry in root.glob("s*") if (parsed := parse_id(entry.name)) and (entry / MANIFEST_NAME).is_file()]
    return [name for _, name in sorted(ids)]


def num_bytes(manifest: Manifest) -> int:
    """Bytes of the checkpoint's files, its manifest left out."""
    return sum(file.num_bytes for file in manifest.files)


def read_ref(path: Path) -> CheckpointRef:
    """What the manifest of the folder `path` says about itself. Raises Incomplete, Corrupt or Incompatible."""
    manifest = read_manifest(path)
    return CheckpointRef(
        id=manifest.id,
        step=manifest.step,
        attempt=manifest.attempt,
        parent=manifest.parent,
        state_digest=manifest.state_digest,
        num_bytes=num_bytes(manifest),
    )
