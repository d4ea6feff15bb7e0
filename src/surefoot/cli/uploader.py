"""The uploader: brings what ranks staged in the agent's memory to disk, outside of their loops. `python -m surefoot.cli.uploader`, an aide.

While ranks train its work is done by a thread that lets them have the cores first: where each core computes, a thread that loses its turn
has all others wait. A drain, for which others do wait, is done by the main thread.

No torch. It may be killed at any time: the next one finds in the slots what is not committed yet, and uploads it anew.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surefoot.checkpoint.slot import Slot, SlotState
from surefoot.checkpoint.slot_pool import slots_handed_over
from surefoot.checkpoint.upload import Uploader
from surefoot.config import load_config
from surefoot.core.clock import SystemClock
from surefoot.core.errors import CheckpointError, PeerLost
from surefoot.guard.account import Account
from surefoot.launch.aide_duty import Duty
from surefoot.launch.process import let_others_first
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.lineage import fold_counters
from surefoot.observe.run_dir import CONFIG_NAME

logger = logging.getLogger(__name__)

# How late an upload may begin. Nobody waits for it but the last save of a run, and a look costs microseconds: no setting.
_LOOK_INTERVAL_S = 0.05


def give_up_older(slots: Sequence[Slot], *, generation: int) -> None:
    """What ranks of an older generation left here could not be brought home before this one began. It stays lost: the run has gone on
    without it, and whoever resumed may sweep away the folder that it would be written to."""
    for slot in slots:
        state, header = slot.state(), slot.header()  # in this order: a live rank writes its header before it begins to stage
        if header is not None and header.generation >= generation:
            continue
        if state in (SlotState.STAGED, SlotState.UPLOADING):
            logger.warning("%s of generation %d is given up", slot, header.generation if header else 0)
            slot.failed(CheckpointError("not committed before the next generation began", where=header.id if header else str(slot)))
        elif state is SlotState.STAGING:
            slot.reset()


def generation_to_tell_under(ledger: Path, *, own: int) -> int:
    """Never one that the agent has not opened yet: a line of a later generation would fence the agent itself, which may still have to say
    how the one before ended. What is left over of a drain is told in between."""
    return min(own, fold_counters(read_ledger(ledger)).generation)


def main(arguments: Sequence[str] | None = None) -> int:
    duty = Duty.begin(arguments, prog="surefoot.cli.uploader")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = load_config(duty.run_dir / CONFIG_NAME).config
    ledger = Ledger(duty.run_dir / LEDGER_NAME, clock=SystemClock(), by="uploader")
    root = duty.run_dir / "checkpoints"
    account = Account(ledger, config=config, root=root, generation=lambda: generation_to_tell_under(ledger.path, own=duty.generation))
    slots = slots_handed_over()
    give_up_older(slots, generation=duty.generation)
    uploader = Uploader(
        root,
        slots,
        limit_s=config.checkpoint.upload_limit_s,
        on_committed=account.committed,
        on_read_back=account.read_back,
        on_failed=account.not_committed,
    )
    with ThreadPoolExecutor(max_workers=1, initializer=let_others_first) as behind_the_ranks:
        while not duty.is_over and not account.is_fenced:
            worked = behind_the_ranks.submit(uploader.step).result()
            account.write()
            request = duty.wait(0.0 if worked else _LOOK_INTERVAL_S)
            if request is not None:
                # The ranks of the next generation wait for commits; what is read back meanwhile they need not wait for.
                failures = uploader.drain(limit_s=request.limit_s, ranks_are_gone=True, read_back=False)
                if not account.write():
                    failures.append("the ledger could not be written: the next restore adopts what it lacks")
                duty.drained(request, failures=failures)
    if account.is_fenced:
        return PeerLost.exit_code
    uploader.drain(limit_s=config.checkpoint.upload_limit_s, ranks_are_gone=True)
    return 0 if account.write() else 1


if __name__ == "__main__":
    sys.exit(main())
