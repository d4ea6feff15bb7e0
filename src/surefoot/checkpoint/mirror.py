"""Which checkpoint an object store should get next and which may go there: pure decisions, and one round of doing it. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.checkpoint.object_store import ObjectStore, kind_of
from surefoot.checkpoint.remote import Throttle, copy_checkpoint, remote_ids, retire_remote, unpublished
from surefoot.checkpoint.retention import Retirement
from surefoot.core.errors import CheckpointError
from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef

logger = logging.getLogger(__name__)

Tell = Callable[[Event, str, Mapping[str, object]], object]
"""Ledgers an event with its reason and fields."""


def next_copy(refs: Sequence[CheckpointRef], *, copied: Collection[str], retired: Collection[str]) -> CheckpointRef | None:
    """The newest of `refs` (in the order of their commits) that the store lacks and that is worth sending.

    Only what was read back from disk is sent: a copy of a damaged one is no second copy. Nobody goes back to suspect and abandoned ones.
    """
    for ref in reversed(refs):
        if ref.read_back and not (ref.damaged or ref.suspect or ref.abandoned) and ref.id not in copied and ref.id not in retired:
            return ref
    return None


def remote_retirements(refs: Sequence[CheckpointRef], *, copied: Collection[str], retired: Collection[str]) -> list[Retirement]:
    """Which copies go: those that were retired on disk, once a newer good one is in this store too. So a good one always stays."""
    good = [index for index, ref in enumerate(refs) if ref.id in copied and not (ref.suspect or ref.abandoned)]
    newest_good = good[-1] if good else -1
    return [
        Retirement(ref.id, f"retired on disk; {refs[newest_good].id} is newer and copied")
        for index, ref in enumerate(refs)
        if ref.id in copied and ref.id in retired and index < newest_good
    ]


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger says that a mirror goes by. `hashes`: of the manifests that were ledgered as copied to this store."""

    refs: Sequence[CheckpointRef]
    retired: Collection[str]
    hashes: Mapping[str, str] = field(default_factory=dict)


class Mirror:
    """Keeps one store up to date with the checkpoints folder `root`. What fails is told once, and tried again whenever it is asked."""

    def __init__(self, root: Path, store: ObjectStore, *, bytes_per_s: int, tell: Tell, on_progress: Callable[[], None]) -> None:
        self._root = root
        self._store = store
        self._throttle = Throttle(bytes_per_s)
        self._tell = tell
        self._on_progress = on_progress
        self._is_checked = False
        self._told: tuple[str, str] | None = None

    def round(self, known: Known) -> bool:
        """Copy one checkpoint or retire what may go; whether anything was done. Raises CheckpointError when the store cannot be used."""
        checkpoint = ""
        try:
            if not self._is_checked:
                self._store.check()
                self._say_leftovers(known)
                self._is_checked = True
            copied = set(known.hashes) & set(remote_ids(self._store))
            ref = next_copy(known.refs, copied=copied, retired=known.retired)
            if ref is not None:
                checkpoint = ref.id
                self._copy(ref)
                return True
            done = [self._retire(gone, known=known) for gone in remote_retirements(known.refs, copied=copied, retired=known.retired)]
        except CheckpointError as error:
            self._tell_once(checkpoint, error)
            raise
        self._told = None
        return any(done)

    def _copy(self, ref: CheckpointRef) -> None:
        start_s = time.monotonic()
        copied = copy_checkpoint(self._root / ref.id, self._store, throttle=self._throttle, on_progress=self._on_progress)
        self._told = None
        fields: dict[str, object] = {"id": ref.id, "tier": str(self._store.url), "manifest_hash": copied.manifest_hash}
        fields |= {"num_files": copied.num_files, "num_bytes": copied.num_bytes, "num_sent_bytes": copied.num_sent_bytes}
        fields |= {"ours": copied.ours, "wall_s": round(time.monotonic() - start_s, 3)}
        self._tell(Event.CHECKPOINT_COPIED, "every object was read back", fields)

    def _retire(self, gone: Retirement, *, known: Known) -> bool:
        failed = retire_remote(self._store, gone.id, manifest_hash=known.hashes[gone.id])
        for key, why in failed.items():
            logger.warning("%s/%s could not be deleted: %s", self._store.url, key, why)
        if not failed:
            self._tell(Event.CHECKPOINT_RETIRED, gone.reason, {"id": gone.id, "tier": str(self._store.url)})
        return not failed

    def _tell_once(self, checkpoint: str, error: CheckpointError) -> None:
        """The same thing again and again is one piece of news."""
        if self._told == (checkpoint, kind_of(error)):
            return
        self._told = (checkpoint, kind_of(error))
        logger.warning("the copy of %s to %s waits: %s", checkpoint or "checkpoints", self._store.url, error)
        fields = {"id": checkpoint or None, "tier": str(self._store.url), "kind": kind_of(error)}
        self._tell(Event.COPY_FAILED, str(error), fields)

    def _say_leftovers(self, known: Known) -> None:
        """Copies that were never finished and never will be. Whose they are cannot be known, so they are only named."""
        for name, part in unpublished(self._store):
            if name in known.retired or all(ref.id != name for ref in known.refs):
                logger.warning("%s/%s.%s is an unfinished copy that nobody goes on with: delete it by hand", self._store.url, name, part)
