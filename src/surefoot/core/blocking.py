"""What is left out of the data, and from which sample on: entries of a log that only grows.

Each entry carries its effective sample, so a run that goes back to an earlier sample trains on exactly what it trained on then up to there.
A cursor holds the number of entries and the head of the chain: a log that lacks one of them, or holds another, shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

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
    """Raises DataError when `value` is no entry of the log, or one that means nothing."""
    try:
        samples = value["samples"]
        block = Block(
            **{
                **value,
                "spans": tuple(TokenSpan(**span) for span in value["spans"]),
                "samples": (samples[0], samples[1]) if samples else None,
            }
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"an entry of the blocklist is damaged: {error!r}", where="blocklist", hint="`surefoot ledger --verify`") from error
    if wrong := _what_is_wrong(block):
        what = f"an entry of the blocklist is damaged: {wrong}"
        raise DataError(what, where=f"{block.kind} {block.name}", hint="`surefoot data block` writes entries that are whole")
    return block


def _what_is_wrong(block: Block) -> str:
    """Empty for an entry that a run can be asked for. What its spans are in the data is for who has the data to say."""
    if block.kind not in get_args(BlockKind):
        return f"there is no kind {block.kind!r}, there are {', '.join(get_args(BlockKind))}"
    if block.mode not in get_args(BlockMode):
        return f"there is no mode {block.mode!r}, there are {', '.join(get_args(BlockMode))}"
    if len({block.kind == "samples", block.mode == "skip", block.samples is not None}) > 1 or (block.samples and block.spans):
        return "samples are skipped, and nothing else is"
    if not all(isinstance(word, str) for word in (block.name, block.manifest_sha256, block.reason, block.by)):
        return "its name, reason, data and author are words"
    if not _is_count(block.effective_sample) or not (block.evidence_step is None or _is_count(block.evidence_step)):
        return f"effective sample {block.effective_sample!r}, evidence step {block.evidence_step!r}"
    if block.samples is not None and not (all(map(_is_count, block.samples)) and block.samples[0] < block.samples[1]):
        return f"no samples from {block.samples[0]!r} to {block.samples[1]!r}"
    for span in block.spans:
        if not (isinstance(span.source, str) and _is_count(span.start) and _is_count(span.end) and span.start <= span.end):
            return f"no tokens from {span.start!r} to {span.end!r} of {span.source!r}"
    return ""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def next_head(head: str, block: Block) -> str:
    """The head of the chain after `block`: sha256 over the head before and the entry's canonical JSON."""
    return hashlib.sha256(head.encode() + canonical(block.as_json())).hexdigest()


def head_of(blocks: Iterable[Block]) -> str:
    """The head of a whole chain; 64 zeros for none."""
    head = ZERO_HASH
    for block in blocks:
        head = next_head(head, block)
    return head
