"""The uploader: brings what ranks staged in the agent's memory to disk, outside of their loops. `python -m surefoot.cli.uploader`, an aide.

No torch. It may be killed at any time: the next one finds in the slots what is not committed yet, and uploads it anew.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surefoot.checkpoint.retention import boundaries, remove, retire
from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.upload import Committed, NotCommitted, ReadBack, Uploader
from surefoot.config import load_config
from surefoot.core.clock import SystemClock
from surefoot.core.errors import CheckpointError, PeerLost, SurefootError
from surefoot.core.events import Event
from surefoot.core.sections import RunConfig
from surefoot.core.strict_json import loads
from surefoot.launch.aide_duty import Duty
from surefoot.launch.slots import SLOTS
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.run_dir import CONFIG_NAME
from surefoot.observe.saves import commit_fields, read_back_event

logger = logging.getLogger(__name__)

# How late an upload may begin. Nobody waits for it but the last save of a run, and a look costs microseconds: no setting.
_LOOK_INTERVAL_S = 0.05


class Account:
    """Keeps the ledger in step with what happens to saves, in order; what cannot be written now, on a full disk, is written later.

    Raises nothing but PeerLost: the run is somebody else's.
    """

    def __init__(self, ledger: Ledger, *, config: RunConfig, root: Path, generation: Callable[[], int]) -> None:
        self._ledger = ledger
        self._section = config.checkpoint
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
                self._due[0]()
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

    def _append(self, event: Event, attempt: int, step: int, reason: str, fields: Mapping[str, object]) -> None:
        self._ledger.append(event, generation=self._generation(), attempt=attempt, step=step, reason=reason, fields=fields)

    def _retire_old(self) -> None:
        """Ledgered before the files go, so that no restore ever tries one that is half gone. A failed deletion is said and left."""
        lineage = fold_lineage(read_ledger(self._ledger.path))
        standing = [ref for ref in lineage.refs if ref.id not in lineage.retired]
        section, counters = self._section, lineage.counters
        for gone in retire(
            standing,
            keep_last=section.keep_last,
            milestone_steps=section.milestone_steps,
            boundaries=self._boundaries,
            cover_steps=section.cover_steps,
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


def open_slots(environment: Mapping[str, str]) -> list[Slot]:
    """Every slot of this machine, from what the agent handed on."""
    slots = []
    for rank, number, variable in loads(environment[SLOTS]):
        fd = int(environment[variable])
        slots.append(Slot.open(fd, rank=rank, number=number))
        os.close(fd)
    return slots


def give_up_older(slots: Sequence[Slot], *, generation: int) -> None:
    """What ranks of an older generation left here could not be brought home before this one began. It stays lost: the run has gone on
    without it, and whoever resumed may sweep away the folder that it would be written to."""
    for slot in slots:
        header = slot.header()
        if header is not None and header.generation >= generation:
            continue
        if slot.state() in (SlotState.STAGED, SlotState.UPLOADING):
            logger.warning("%s of generation %d is given up", slot, header.generation if header else 0)
            slot.failed(CheckpointError("not committed before the next generation began", where=header.id if header else str(slot)))
        elif slot.state() is SlotState.STAGING:
            slot.reset()


def main(arguments: Sequence[str] | None = None) -> int:
    duty = Duty.begin(arguments, prog="surefoot.cli.uploader")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = load_config(duty.run_dir / CONFIG_NAME).config
    ledger = Ledger(duty.run_dir / LEDGER_NAME, clock=SystemClock(), by="uploader")
    root = duty.run_dir / "checkpoints"
    account = Account(ledger, config=config, root=root, generation=lambda: duty.generation)
    slots = open_slots(os.environ)
    give_up_older(slots, generation=duty.generation)
    uploader = Uploader(
        root,
        slots,
        limit_s=config.checkpoint.upload_limit_s,
        on_committed=account.committed,
        on_read_back=account.read_back,
        on_failed=account.not_committed,
    )
    while not duty.is_over and not account.is_fenced:
        worked = uploader.step()
        account.write()
        request = duty.wait(0.0 if worked else _LOOK_INTERVAL_S)
        if request is not None:
            failures = uploader.drain(limit_s=request.limit_s, ranks_are_gone=True)
            if not account.write():
                failures.append("the ledger could not be written: the next restore adopts what it lacks")
            duty.drained(request, failures=failures)
    if account.is_fenced:
        return PeerLost.exit_code
    uploader.drain(limit_s=config.checkpoint.upload_limit_s, ranks_are_gone=True)
    return 0 if account.write() else 1


if __name__ == "__main__":
    sys.exit(main())
