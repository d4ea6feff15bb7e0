"""The blocklist in a run: what people asked for in the ledger, taken by all ranks at the same sample.

A wish is a line of the ledger. Rank 0 sees it, the group agrees in the exchange of a step, and between that step and the next one all ranks
hand the same entries to their data ports, before rank 0 ledgers them: a crash in between leaves the wish open and no step trained on it.
The log never goes back, whatever checkpoint the run goes back to; an entry's effective sample keeps what came before it as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.core.blocking import Block, block_from_json, next_head
from surefoot.core.clock import Clock
from surefoot.core.errors import DataError, SurefootError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.ports import DataPort, SteerableData, TouchedData
from surefoot.core.records import Signals
from surefoot.core.sections import ObserveSection
from surefoot.guard.recording import Recorder
from surefoot.guard.trajectory import DataChange
from surefoot.observe.blocks import Blocklist, fold_blocks, refuse_other_log, refused_fields, taken_fields
from surefoot.observe.ledger import LEDGER_NAME
from surefoot.observe.ledger_tail import LedgerTail
from surefoot.tensors.world import World, agree_ok, broadcast_json, gather_json, is_peer_failure, lead

logger = logging.getLogger(__name__)

_NO_PORT = "the data port of this loop has no block and skip"


@dataclass(frozen=True, slots=True)
class _Entry:
    """Of the log, as every rank knows it: `attempt` is the one that took it."""

    attempt: int
    block: Block


class Steering:
    """One per guard, on every rank. Only rank 0 knows what is asked for."""

    def __init__(self, data: DataPort, *, world: World, recorder: Recorder, run_dir: Path, clock: Clock, section: ObserveSection) -> None:
        self._data = data
        self._port = data if isinstance(data, SteerableData) else None
        self._world = world
        self._recorder = recorder
        self._log = Blocklist()
        self._taken: list[_Entry] = []
        self._agreed = False
        asks = (Event.BLOCK_ASKED, Event.RESUME_ASKED, Event.ORDER_TAKEN, Event.ORDER_REFUSED)
        events = (*asks, Event.BLOCK_TAKEN, Event.BLOCK_REFUSED)
        path, look_every_s = run_dir / LEDGER_NAME, section.ledger_look_s
        self._tail = LedgerTail(path, events=events, clock=clock, look_every_s=look_every_s) if world.leads else None

    @property
    def is_asked(self) -> bool:
        """Local. Whether somebody waits for an answer. Cheap: for the vector of each step."""
        with suppress(OSError):  # a look that failed is made again
            self._look()
        return bool(self._log.open)

    @property
    def word(self) -> int:
        """Local. The first 8 bytes of the chain's head, by which ranks see in each step that they leave out the same."""
        return int.from_bytes(bytes.fromhex(self._held()[1][:16]), "big", signed=True)

    def agreed(self, signals: Signals) -> None:
        """Local. What came out of the exchange of a step."""
        self._agreed = signals.block_requested

    def give(self) -> None:
        """Collective over the save group. Everything that was ever taken, to every rank's port, before that meets a cursor.

        Raises DataError on all ranks when a port does not take what the run was trained with.
        """
        told = broadcast_json(self._world, lead(self._world, self._read_log))
        self._taken = [_Entry(int(entry["attempt"]), block_from_json(entry["block"])) for entry in told]
        error: SurefootError | None = None
        try:
            self._hand_over()
        except SurefootError as found:
            error = found
        if (agreed := agree_ok(self._world, error)) is not None:
            raise agreed

    def check(self, cursor: Mapping[str, Any], *, checkpoint: str) -> None:
        """On rank 0. Raises DataError when the log lacks something that `cursor` was taken with."""
        refuse_other_log(self._log, cursor=cursor, checkpoint=checkpoint)

    def take_agreed(self, *, attempt: int) -> bool:
        """Collective over the save group when the last exchange asked for it, else local. Whether something was taken."""
        is_due, self._agreed = self._agreed, False
        return is_due and self.take(attempt=attempt)

    def take(self, *, attempt: int) -> bool:
        """Collective over the save group. Answer everything that is asked for now: into every rank's port, then into the ledger.

        An entry holds from the sample that comes next, or from a later one that was wished. What cannot be honoured is refused in the
        ledger. Raises SurefootError when ranks, or their ports, come to different answers.
        """
        wishes: list[dict[str, Any]] = broadcast_json(self._world, lead(self._world, self._open_wishes))
        if not wishes:
            return False
        answers = [self._answer(wish) for wish in wishes]
        self._agree_on(answers)
        lead(self._world, lambda: self._ledger(wishes, answers))
        taken = [_Entry(attempt, answer) for answer in answers if isinstance(answer, Block)]
        self._taken += taken
        return bool(taken)

    def changes(self, *, since: int, until: int) -> tuple[DataChange, ...]:
        """Local, the same on all ranks. What was left out after attempt `since` had begun, of samples before `until`."""
        newer = [entry for entry in self._taken if entry.attempt > since]
        found = [(entry.attempt, self._first_changed(entry.block, until=until)) for entry in newer]
        return tuple(DataChange(attempt, sample) for attempt, sample in found if sample is not None)

    def _first_changed(self, block: Block, *, until: int) -> int | None:
        """The first sample before `until` that is not what it was without `block`; where nobody can say, the first that may not be."""
        first = block.effective_sample
        if block.samples is not None:
            # With ours, the step that ends where the range begins is what it was. A port that jumps at once ends it behind the range.
            first = max(first, block.samples[0]) - 1
        elif first < until and isinstance(self._data, TouchedData):
            return self._data.first_touched(block, first=first, until=until)
        return first if first < until else None

    # --- on rank 0 ---

    def _look(self, *, now: bool = False) -> None:
        if self._tail is not None:
            self._log = fold_blocks(self._tail.news(now=now), onto=self._log)

    def _read_log(self) -> list[dict[str, Any]]:
        self._look(now=True)
        return [{"attempt": taken.attempt, "block": taken.block.as_json()} for taken in self._log.taken]

    def _open_wishes(self) -> list[dict[str, Any]]:
        self._look(now=True)
        return [{"seq": wish.seq, "item": wish.item, "by": wish.by, "block": dict(wish.block)} for wish in self._log.open]

    def _ledger(self, wishes: Sequence[Mapping[str, Any]], answers: Sequence[Block | str]) -> None:
        head = self._log.head
        count = self._log.count
        for wish, answer in zip(wishes, answers, strict=True):
            if isinstance(answer, str):
                fields = refused_fields(asked=wish["seq"], block=wish["block"], item=wish["item"])
                self._recorder.ledger(Event.BLOCK_REFUSED, reason=answer, fields=fields)
                self._recorder.warn(f"not left out, as {wish['by']} asked: {answer}")
                continue
            count, head = count + 1, next_head(head, answer)
            fields = taken_fields(answer, asked=wish["seq"], count=count, head=head, item=wish["item"])
            self._recorder.ledger(Event.BLOCK_TAKEN, reason=answer.reason, fields=fields)
            self._recorder.say(
                f"from sample {answer.effective_sample} on: {answer.mode} {answer.kind} {answer.name}, asked for by {answer.by}"
            )
        self._look(now=True)

    # --- on every rank ---

    def _hand_over(self) -> None:
        blocks = [entry.block for entry in self._taken]
        if blocks and self._port is None:
            raise DataError(
                f"the run leaves out {len(blocks)} things, and {_NO_PORT}",
                where="blocklist",
                hint="hand over a port that has them, as the run had when they were taken",
            )
        for block in blocks[self._held()[0] :]:
            self._hand(block)
        self._refuse_other_chain()

    def _answer(self, wish: Mapping[str, Any]) -> Block | str:
        """The entry as this rank's port took it, or why it did not. The port may be the caller's code: nothing of it ends the run."""
        try:
            asked = block_from_json(wish["block"])
            block = replace(asked, effective_sample=max(asked.effective_sample, self._data.next_sample), by=asked.by or wish["by"])
            _refuse_passed(block)
            if self._port is None:
                return _NO_PORT
            self._hand(block)
        except SurefootError as error:
            return str(error)
        except Exception as error:  # the boundary to foreign code
            if is_peer_failure(error):
                raise
            logger.exception("rank %d: the data port refused an entry of the blocklist", self._world.rank)
            return f"{type(error).__name__}: {error}"
        return block

    def _agree_on(self, answers: Sequence[Block | str]) -> None:
        """Collective over the save group. Raises the same SurefootError on all ranks."""
        told = [answer.as_json() if isinstance(answer, Block) else answer for answer in answers]
        by_rank = gather_json(self._world, [told, list(self._held())])
        others = [rank for rank, found in enumerate(by_rank) if found != by_rank[0]]
        if others:
            raise SurefootError(
                f"ranks {others} take other entries into the blocklist than rank 0",
                where="blocklist",
                hint="their ports hold other data or run other code; nothing was taken, and the next start asks again",
                got=by_rank[others[0]],
                wanted=by_rank[0],
            )
        self._refuse_other_chain(*(answer for answer in answers if isinstance(answer, Block)))

    def _hand(self, block: Block) -> None:
        if self._port is not None:
            (self._port.skip if block.mode == "skip" else self._port.block)(block)

    def _held(self) -> tuple[int, str]:
        """What the port says that it holds."""
        count, head = self._port.blocklist if self._port is not None else (0, ZERO_HASH)
        return count, head

    def _refuse_other_chain(self, *more: Block) -> None:
        """Raises SurefootError unless the port holds what it was handed, in this order."""
        blocks = [*(entry.block for entry in self._taken), *more]
        head = ZERO_HASH
        for block in blocks:
            head = next_head(head, block)
        if (found := self._held()) != (len(blocks), head):
            raise SurefootError(
                f"the data port says that it holds {found[0]} entries of the blocklist with head {found[1][:16]}, "
                f"it was handed {len(blocks)} with head {head[:16]}",
                where="blocklist",
                hint="a port counts what it was handed and chains it with core.blocking.next_head",
            )


def _refuse_passed(block: Block) -> None:
    """Raises DataError for samples that the run has gone past."""
    if block.samples is not None and block.samples[1] <= block.effective_sample:
        what = f"the run goes on at sample {block.effective_sample}, which is behind them"
        raise DataError(what, where=f"{block.kind} {block.name}", hint="go back to a checkpoint before them, and ask again")
