"""Keeps the ledger in step with what becomes of saves, and retires what is no longer needed. No torch: the uploader of an agent uses it,
and the upload thread of a rank."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surefoot.checkpoint.retention import boundaries, remove, retire
from surefoot.checkpoint.upload import Committed, NotCommitted, ReadBack
from surefoot.core.detection import slowest_detection_steps
from surefoot.core.errors import PeerLost, SurefootError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.saves import commit_fields, read_back_event

logger = logging.getLogger(__name__)


class Account:
    """Keeps the ledger in step with what happens to saves, in order; what cannot be written now, on a full disk, is written later.

    Raises nothing but PeerLost: the run is somebody else's.
    """

    def __init__(self, ledger: Ledger, *, config: RunConfig, root: Path, generation: Callable[[], int]) -> None:
        self._ledger = ledger
        self._section = config.checkpoint
        self._cover_steps = max(config.checkpoint.cover_steps, slowest_detection_steps(config))
        self._boundaries = boundaries(config)
        self._root = root
        self._generation = generation
        self._due: deque[Callable[[], None]] = deque()
        self._warned = False
        self.is_fenced = False

    def committed(self, done: Committed) -> None:
        fields = {**commit_fields(done.manifest), "host": done.host, "upload_s": round(done.wall_s, 3)}
        self._due.append(lambda: self._append(Event.CHECKPOINT_COMMITTED, done.manifest.attempt, done.manifest.step, done.reason, fields))
        self.write()

    def read_back(self, found: ReadBack) -> None:
        manifest = found.manifest
        event, fields = read_back_event(manifest, found.problems, host=found.host, wall_s=found.wall_s)
        self._due.append(lambda: self._append(event, manifest.attempt, manifest.step, "", fields))
        self._due.append(self._retire_old)
        self.write()

    def not_committed(self, ended: NotCommitted) -> None:
        """The ranks say it and save again, or the agent says it when there are none."""
        logger.warning("the upload of %s ended: %s", ended.header.id, ended.error)

    def write(self) -> bool:
        """Whether the ledger is in step now."""
        while self._due:
            try:
                self._do(self._due[0])
            except PeerLost as error:
                self.is_fenced = True
                logger.error("%s", error)
                return False
            except (SurefootError, OSError) as error:
                if not self._warned:
                    logger.warning("the ledger lacks %d entries about saves, tried again: %s", len(self._due), error)
                self._warned = True
                return False
            self._due.popleft()
        self._warned = False
        return True

    def _do(self, entry: Callable[[], None]) -> None:
        """A generation may begin between the look at the newest one and the append, which then refuses the older one. That is seen by a
        second look; whoever is fenced is refused again."""
        try:
            entry()
        except PeerLost:
            entry()

    def _append(self, event: Event, attempt: int, step: int, reason: str, fields: Mapping[str, object]) -> None:
        self._ledger.append(event, generation=self._generation(), attempt=attempt, step=step, reason=reason, fields=fields)

    def _retire_old(self) -> None:
        """Ledgered before the files go, so that no restore ever tries one that is half gone. A failed deletion is said and left."""
        entries = read_ledger(self._ledger.path)
        lineage = fold_lineage(entries)
        standing = [ref for ref in lineage.refs if ref.id not in lineage.retired]
        section, counters = self._section, lineage.counters
        for gone in retire(
            standing,
            keep_last=section.keep_last,
            milestone_steps=section.milestone_steps,
            boundaries=self._boundaries | trusted_steps(entries),
            cover_steps=self._cover_steps,
        ):
            self._ledger.append(
                Event.CHECKPOINT_RETIRED,
                generation=self._generation(),
                attempt=counters.attempt,
                step=counters.step,
                rule="retention",
                reason=gone.reason,
                fields={"id": gone.id},
            )
            remove(self._root, gone.id, generation=self._generation())


def trusted_steps(entries: Sequence[LedgerEntry]) -> frozenset[int]:
    """Pure. Steps up to which the state was found well, of audits that found it ill since the last roll-back: the way back from there.

    However long the run goes on after such a finding, what leads to before it is kept.
    """
    steps: set[int] = set()
    for entry in entries:
        if entry.event == Event.RUN_ROLLED_BACK:
            steps.clear()
        elif entry.event == Event.ANOMALY_FOUND and isinstance(evidence := entry.fields.get("evidence"), Mapping):
            steps.update([clean] if isinstance(clean := evidence.get("last_clean_step"), int) else [])
    return frozenset(steps)
