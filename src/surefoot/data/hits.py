"""Which documents a training sample holds, and where in its row: an order and the files beside the shards, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.core.blocking import TokenSpan
from surefoot.data.blocked import BlockedSpans
from surefoot.data.provenance import Provenance, StoredDocument
from surefoot.data.recipe import Sample


@dataclass(frozen=True, slots=True)
class Hit:
    """Positions [first, end) of the row of `sample` hold tokens of `document`, from token `start` of its source's stream on.

    `masked`: some of them are blocked, so that they have no loss and nothing attends to them.
    """

    sample: Sample
    first: int
    end: int
    start: int
    document: StoredDocument
    masked: bool

    @property
    def tokens(self) -> TokenSpan:
        return TokenSpan(self.document.source, self.start, self.start + self.end - self.first)


def hits_of(sample: Sample, *, provenance: Provenance, blocked: Mapping[str, BlockedSpans]) -> list[Hit]:
    """The documents of a sample in the order of its row."""
    hits: list[Hit] = []
    row = 0
    spans = blocked.get(sample.source, BlockedSpans())
    for start, count in sample.spans:
        for document in provenance.documents(TokenSpan(sample.source, start, start + count)):
            begin, end = max(start, document.start), min(start + count, document.end)
            masked = bool(spans.within(begin, end - begin, sample=sample.sample))
            hits.append(Hit(sample, row + begin - start, row + end - start, begin, document, masked))
        row += count
    return hits
