"""What the first pass does with one chunk: name each document by its hash, put it to the rules, and collect what is no document."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.data.documents import BadRecord, Document
from surefoot.data.parts import Chunk
from surefoot.data.quality.rules import RuleSet
from surefoot.data.reader import Corpus, Reader, is_empty

SURVEY_ROW: Final = np.dtype([("digest", "u1", (32,)), ("text_bytes", "<u4"), ("rejected", "u1")])
_EXCERPT_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class RuleReject:
    """A document that a quality rule dropped. `line` is its record, `document` its hash."""

    source: str
    file: str
    line: int
    rule: str
    score: float
    document: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class ChunkSurvey:
    """A row for each document of a chunk, and what was rejected."""

    rows: npt.NDArray[Any]
    num_empty: int
    rejects: tuple[BadRecord | RuleReject, ...]

    @property
    def bad_records(self) -> list[BadRecord]:
        return [reject for reject in self.rejects if isinstance(reject, BadRecord)]


@dataclass(frozen=True, slots=True)
class Surveyor:
    reader: Reader
    rules: RuleSet | None = None
    rules_off: tuple[str, ...] = ()

    def __call__(self, chunk: Chunk) -> ChunkSurvey:
        rows: list[tuple[bytes, int, bool]] = []
        rejects: list[BadRecord | RuleReject] = []
        num_empty = 0
        for _, record in self.reader.records(chunk):
            if isinstance(record, BadRecord):
                rejects.append(record)
            elif is_empty(record):
                num_empty += 1
            else:
                data = record.text.encode()
                digest = hashlib.sha256(data).digest()
                reject = self._judge(record, digest=digest)
                rejects += [reject] if reject else []
                rows.append((digest, len(data), reject is not None))
        return ChunkSurvey(_table(rows), num_empty, tuple(rejects))

    def _judge(self, document: Document, *, digest: bytes) -> RuleReject | None:
        hits = self.rules.judge(document.text, source=document.source, off=self.rules_off) if self.rules else []
        if not hits or hits[0].action != "drop":
            return None
        return RuleReject(
            source=document.source,
            file=document.file,
            line=document.record,
            rule=hits[0].rule,
            score=hits[0].score,
            document=digest[:16].hex(),
            excerpt=document.text[:_EXCERPT_CHARACTERS],
        )


def surveyor_of(corpus: Corpus) -> Surveyor:
    """Of the rules only those that drop: what is merely flagged is for the report to say."""
    dropping = RuleSet(tuple(rule for rule in corpus.rules.rules if rule.action == "drop")) if corpus.rules else None
    return Surveyor(corpus.reader, dropping, corpus.rules_off)


def _table(rows: list[tuple[bytes, int, bool]]) -> npt.NDArray[Any]:
    table = np.zeros(len(rows), dtype=SURVEY_ROW)
    if rows:
        digests, sizes, rejected = zip(*rows, strict=True)
        table["digest"] = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)
        table["text_bytes"], table["rejected"] = sizes, rejected
    return table
