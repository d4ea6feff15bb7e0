"""Which documents of a step stand out: by the rules they break, by their tokens, by their length, by coming twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from surefoot.core.blocking import Block, TokenSpan
from surefoot.data.blocked import BlockedSpans, silenced
from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.look import Baseline, Looked, look, rarity
from surefoot.data.quality.rules import Hit, RuleSet
from surefoot.data.quality.stored import Shelf, excerpt, told
from surefoot.data.recipe import Sample

_COPY_RARITY: Final = 2.0
_TOLD_RARITY: Final = 1.0
_PASSAGE_TOKENS: Final = 48


@dataclass(frozen=True, slots=True)
class Candidate:
    """A document of the samples asked for. `score` adds up how rare it is in each respect, in powers of ten; `reasons` say so in words.

    `passage` is where its tokens surprise most; `samples` are the global samples that hold some of it, `num_tokens` how many of its tokens
    they hold and `num_masked` how many of these are masked. `blocked_from` is the first sample from which some of it is left out, if any.
    """

    document: StoredDocument
    score: float
    reasons: tuple[str, ...]
    looked: Looked
    passage: str
    samples: tuple[int, ...]
    num_tokens: int
    num_masked: int = 0
    blocked_from: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            **told(self.document),
            "score": self.score,
            "reasons": list(self.reasons),
            "rules": [hit.rule for hit in self.looked.hits],
            "samples": list(self.samples),
            "tokens_in_samples": self.num_tokens,
            "masked_tokens": self.num_masked,
            "blocked_from_sample": self.blocked_from,
            "excerpt": self.looked.excerpt,
            "passage": self.passage,
        }


def candidate_documents(
    shelf: Shelf,
    samples: Iterable[Sample],
    *,
    rules: RuleSet,
    off: Mapping[str, Collection[str]],
    usual: Mapping[str, Baseline],
    limit: int = 20,
    blocks: Sequence[Block] = (),
) -> list[Candidate]:
    """The documents that `samples` hold, those that stand out most first.

    A document counts by its rarest broken rule, by the surprise of its tokens and by its length, each against the documents of its source,
    and by standing in the samples a second time under the same hash. `usual` has a baseline for each source of `samples`.
    What `blocks` leave out is ranked like the rest, and told.
    """
    found: list[Candidate] = []
    entry = shelf.manifest.tokenizer
    parts = parts_of(shelf, samples)
    copies = Counter(document.hash for document in parts)
    masked = silenced(blocks)
    for document, held in parts.items():
        stored, here = shelf.read(document), usual[document.source]
        looked = look(stored, rules=rules, off=off.get(document.source, ()), vocab_size=entry.vocab_size, eos_id=entry.eos_id)
        score, reasons = _standing(looked, usual=here, copies=copies[document.hash])
        first = here.oddest(stored.tokens, width=_PASSAGE_TOKENS)
        passage = excerpt(shelf.tokenizer.decode(stored.tokens[first : first + _PASSAGE_TOKENS].tolist()))
        numbers = tuple(sorted({sample for sample, _ in held}))
        num_tokens = sum(span.end - span.start for _, span in held)
        num_masked = _num_masked(held, masked.get(document.source, BlockedSpans()))
        since = min((block.effective_sample for block in blocks if _touches(block, document)), default=None)
        found.append(Candidate(document, score, reasons, looked, passage, numbers, num_tokens, num_masked, since))
    return sorted(found, key=lambda one: (-one.score, one.document.id))[:limit]


def parts_of(shelf: Shelf, samples: Iterable[Sample]) -> dict[StoredDocument, list[tuple[int, TokenSpan]]]:
    """Which documents `samples` hold, and in which sample which tokens of each."""
    parts: dict[StoredDocument, list[tuple[int, TokenSpan]]] = {}
    for sample in samples:
        spans = [TokenSpan(sample.source, first, first + count) for first, count in sample.spans]
        for document, held in shelf.in_spans(spans).items():
            parts.setdefault(document, []).extend((sample.sample, span) for span in held)
    return parts


def _num_masked(held: Iterable[tuple[int, TokenSpan]], masked: BlockedSpans) -> int:
    """Of the tokens of `held`, each in its sample."""
    num_masked = 0
    for sample, span in held:
        is_masked = np.zeros(span.end - span.start, dtype=np.bool_)
        for first, end in masked.within(span.start, span.end - span.start, sample=sample):
            is_masked[first:end] = True
        num_masked += int(is_masked.sum())
    return num_masked


def _touches(block: Block, document: StoredDocument) -> bool:
    return any(span.source == document.source and span.start < document.end and span.end > document.start for span in block.spans)


def _standing(looked: Looked, *, usual: Baseline, copies: int) -> tuple[float, tuple[str, ...]]:
    """(score, reasons), the strongest reason first."""
    broken = [(rarity(usual.rate(hit.rule)), _reason(hit, usual=usual)) for hit in looked.hits]
    surprise = usual.surprise(looked.ids, looked.counts)
    length = looked.document.end - looked.document.start
    others = [
        (usual.rarity_of_surprise(surprise), f"its tokens surprise by {surprise:.2f} nats each"),
        (usual.rarity_of_length(length), f"it has {length} tokens"),
        (_COPY_RARITY if copies > 1 else 0.0, f"{copies} copies in these samples"),
    ]
    score = max((rare for rare, _ in broken), default=0.0) + sum(rare for rare, _ in others)
    shown = sorted([*broken, *(pair for pair in others if pair[0] >= _TOLD_RARITY)], key=lambda pair: -pair[0])
    return score, tuple(reason for _, reason in shown)


def _reason(hit: Hit, *, usual: Baseline) -> str:
    share = f"{usual.num_hits(hit.rule)} of {usual.num_documents} documents of {usual.source} do so"
    return f"{hit.rule} {hit.score:.4g}, limit {hit.threshold:g}; {share}"
