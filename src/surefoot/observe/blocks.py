"""What the ledger says about the blocklist: who asked for what, what the run took and from which sample on, what it refused and why.

Pure functions over ledger entries. The log is the entries `block.taken` in their order; it only grows, whatever the run goes back to. A
wish (`block.asked`) is open until an entry that is taken or refused names it by its `seq`. Whoever asks to go back says in that same line
what is to be left out from there on, so that a kill leaves both wishes or none; `item` numbers those of one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.core.blocking import Block, block_from_json, next_head
from surefoot.core.errors import DataError
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.records import LedgerEntry


@dataclass(frozen=True, slots=True)
class Asked:
    """A wish as it stands in the ledger; `block` is JSON, for a wish may be damaged and is refused then. `order` is the id of the order
    that it came with: what could not be gone back for is not left out either."""

    seq: int
    time_utc: str
    by: str
    block: Mapping[str, Any]
    item: int = 0
    order: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """An entry of the log, taken in `attempt` after `step` finished steps. `asked` is the wish; None where a branch brought it along."""

    block: Block
    seq: int
    time_utc: str
    attempt: int
    step: int
    asked: int | None


@dataclass(frozen=True, slots=True)
class Refused:
    asked: int
    seq: int
    time_utc: str
    reason: str


@dataclass(frozen=True, slots=True)
class Blocklist:
    """The log so far, its heads (the first for no entry at all), and what is not in it."""

    taken: tuple[Taken, ...] = ()
    open: tuple[Asked, ...] = ()
    refused: tuple[Refused, ...] = ()
    heads: tuple[str, ...] = (ZERO_HASH,)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(taken.block for taken in self.taken)

    @property
    def count(self) -> int:
        return len(self.taken)

    @property
    def head(self) -> str:
        return self.heads[-1]


def fold_blocks(entries: Iterable[LedgerEntry], *, onto: Blocklist | None = None) -> Blocklist:
    """The blocklist after `entries`, oldest first, which follow on those that gave `onto`. Raises DataError for a damaged entry."""
    log = onto or Blocklist()
    for entry in entries:
        match entry.event:
            case Event.BLOCK_ASKED:
                asked = Asked(entry.seq, entry.time_utc, entry.by, _block(entry))
                log = replace(log, open=(*log.open, asked))
            case Event.RESUME_ASKED | Event.ORDER_TAKEN:
                log = replace(log, open=(*log.open, *_asked_with(entry)))
            case Event.ORDER_REFUSED if order := entry.fields.get("id"):
                log = replace(log, open=tuple(wish for wish in log.open if wish.order != order))
            case Event.BLOCK_TAKEN:
                log = _with_taken(log, entry)
            case Event.BLOCK_REFUSED:
                refused = Refused(_asked(entry) or 0, entry.seq, entry.time_utc, entry.reason)
                log = replace(log, open=_still_open(log, entry), refused=(*log.refused, refused))
    return log


def asked_fields(block: Block) -> dict[str, object]:
    """Of `block.asked`."""
    return {"block": block.as_json()}


def asked_with_fields(blocks: Sequence[Block]) -> dict[str, object]:
    """Of a line that asks to go back: what is to be left out from there on."""
    return {"blocks": [block.as_json() for block in blocks]} if blocks else {}


def taken_fields(block: Block, *, asked: int | None, count: int, head: str, item: int = 0) -> dict[str, object]:
    """Of `block.taken`: the entry, its wish, and the log with it."""
    return {"block": block.as_json(), "asked": asked, "count": count, "head": head, **({"item": item} if item else {})}


def refused_fields(*, asked: int, block: Mapping[str, Any], item: int = 0) -> dict[str, object]:
    """Of `block.refused`."""
    return {"block": block, "asked": asked, **({"item": item} if item else {})}


def refuse_other_log(log: Blocklist, *, cursor: Mapping[str, Any], checkpoint: str) -> None:
    """Raises DataError unless the log begins with the entries that `cursor` was taken with. A cursor without a blocklist knows of none."""
    held = cursor.get("blocklist")
    if not isinstance(held, Mapping):
        return
    count, head = held.get("count"), held.get("head")
    if isinstance(count, int) and 0 <= count <= log.count and log.heads[count] == head:
        return
    if isinstance(count, int) and count > log.count:
        what = f"it was made with {count} entries of the blocklist, the ledger has {log.count}"
    else:
        what = f"the first {count} entries of the blocklist in the ledger are not those that it was made with"
    raise DataError(
        what,
        where=checkpoint,
        hint="a ledger was cut or replaced, or the checkpoint is of a run that left other data out: put the ledger back, or resume from "
        "a checkpoint of this run",
        got=log.heads[count] if isinstance(count, int) and 0 <= count <= log.count else None,
        wanted=head,
    )


def _with_taken(log: Blocklist, entry: LedgerEntry) -> Blocklist:
    """Raises DataError when the entry does not continue the chain: it was made over another log."""
    block = block_from_json(_block(entry))
    head = next_head(log.head, block)
    if (entry.fields.get("count"), entry.fields.get("head")) != (log.count + 1, head):
        raise DataError(
            f"entry {log.count + 1} of the blocklist does not follow on the one before it",
            where=f"ledger entry {entry.seq}",
            hint="`surefoot ledger RUN --verify` finds what was changed; put a copy of the ledger back",
            got=entry.fields.get("head"),
            wanted=head,
        )
    taken = Taken(block, entry.seq, entry.time_utc, entry.attempt, entry.step, _asked(entry))
    return Blocklist((*log.taken, taken), _still_open(log, entry), log.refused, (*log.heads, head))


def _still_open(log: Blocklist, answer: LedgerEntry) -> tuple[Asked, ...]:
    answered = (_asked(answer), answer.fields.get("item", 0))
    return tuple(wish for wish in log.open if (wish.seq, wish.item) != answered)


def _asked_with(entry: LedgerEntry) -> list[Asked]:
    told = entry.fields.get("blocks")
    blocks = told if isinstance(told, list) else []
    by = str(entry.fields.get("by") or entry.by)
    order = str(entry.fields.get("id") or "") if entry.event == Event.ORDER_TAKEN else ""
    wished = [block if isinstance(block, Mapping) else {} for block in blocks]
    return [Asked(entry.seq, entry.time_utc, by, block, item, order) for item, block in enumerate(wished)]


def _block(entry: LedgerEntry) -> Mapping[str, Any]:
    told = entry.fields.get("block")
    return told if isinstance(told, Mapping) else {}


def _asked(entry: LedgerEntry) -> int | None:
    asked = entry.fields.get("asked")
    return asked if isinstance(asked, int) else None
