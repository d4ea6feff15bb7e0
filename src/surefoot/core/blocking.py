"""What is left out of the data, and from which sample on: entries of a log that only grows.

Each entry carries its effective sample, so a run that goes back to an earlier sample trains on exactly what it trained on then up to there.
A cursor holds the number of entries and the head of the chain: a log that lacks one of them, or holds another, shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.core.errors import DataError
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.strict_json import canonical

BlockKind = Literal["document", "file", "shard", "samples"]
BlockMode = Literal["mask", "replace", "skip"]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start, end) of the training stream of one source."""

    source: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """One decision to leave something out.

    `name` is what was named: a document's hash (32 hex digits), a source file, "source/shard", or "first:end" of global samples. A
    document, file or shard comes with its `spans` in the data of `manifest_sha256`; `mask` silences these, `replace` puts samples of the
    reserve in the place of the samples that hold them. Samples are skipped: the run goes on behind them. `effective_sample` is the first
    global sample that knows of it; while it is only asked for it is the earliest that is wished (0: as soon as can be).
    """

    kind: BlockKind
    name: str
    mode: BlockMode
    spans: tuple[TokenSpan, ...] = ()
    samples: tuple[int, int] | None = None
    effective_sample: int = 0
    manifest_sha256: str = ""
    reason: str = ""
    by: str = ""
    evidence_step: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "samples": list(self.samples) if self.samples else None}


def block_from_json(value: Mapping[str, Any]) -> Block:
    """Raises DataError when `value` is no entry of the log."""
    try:
        samples = value["samples"]
        return Block(
            **{
                **value,
                "spans": tuple(TokenSpan(**span) for span in value["spans"]),
                "samples": (int(samples[0]), int(samples[1])) if samples else None,
            }
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"an entry of the blocklist is damaged: {error!r}", where="blocklist", hint="`surefoot ledger --verify`") from error


def next_head(head: str, block: Block) -> str:
    """The head of the chain after `block`: sha256 over the head before and the entry's canonical JSON."""
    return hashlib.sha256(head.encode() + canonical(block.as_json())).hexdigest()


def head_of(blocks: Iterable[Block]) -> str:
    """The head of a whole chain; 64 zeros for none."""
    head = ZERO_HASH
    for block in blocks:
        head = next_head(head, block)
    return head
