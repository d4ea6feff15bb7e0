"""One look at a stored document, and what many looks say of a source: the rules it breaks, the tokens it uses, its lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import TokenSpan
from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.measures import Subject
from surefoot.data.quality.rules import Hit, RuleSet
from surefoot.data.quality.stored import Shelf, StoredText, excerpt, spread

I64Array = npt.NDArray[np.int64]
F64Array = npt.NDArray[np.float64]

DOCUMENTS_LOOKED_AT: Final = 2000
_TOKENS_LOOKED_AT: Final = 4_000_000
_FEWEST: Final = 64
_MOST_RARE: Final = 6.0
_SEEN_OFTEN: Final = 20
_PLAIN_VOCABULARY: Final = 512
"""Of so few ids every byte is a token: tokens per byte say nothing."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What is kept of one document. `ids` and `counts` are its tokens, each id once; those outside the vocabulary only counted."""

    document: StoredDocument
    num_bytes: int
    num_tokens: int
    zlib_ratio: float
    entropy: float
    num_replaced: int
    num_outside: int
    ends_in_eos: bool
    hits: tuple[Hit, ...]
    ids: I64Array
    counts: I64Array
    excerpt: str


def look(stored: StoredText, *, rules: RuleSet, off: Collection[str], vocab_size: int, eos_id: int) -> Looked:
    subject = Subject(stored.text, num_tokens=len(stored.tokens) if vocab_size > _PLAIN_VOCABULARY else 0)
    ids, counts = bag_of(stored.tokens, vocab_size=vocab_size)
    return Looked(
        document=stored.document,
        num_bytes=subject.num_bytes,
        num_tokens=len(stored.tokens),
        zlib_ratio=subject.measured("zlib-ratio"),
        entropy=subject.measured("byte-entropy"),
        num_replaced=stored.text.count("\ufffd"),
        num_outside=len(stored.tokens) - int(counts.sum()),
        ends_in_eos=stored.is_cut or (len(stored.tokens) > 0 and int(stored.tokens[-1]) == eos_id),
        hits=tuple(rules.judge_subject(subject, source=stored.document.source, off=off)),
        ids=ids,
        counts=counts,
        excerpt=excerpt(stored.text),
    )


def bag_of(tokens: npt.NDArray[Any], *, vocab_size: int) -> tuple[I64Array, I64Array]:
    """(ids, counts) of the tokens inside the vocabulary."""
    ids, counts = np.unique(tokens, return_counts=True)
    inside = ids < vocab_size
    return ids[inside].astype(np.int64), counts[inside].astype(np.int64)


def look_at_source(
    shelf: Shelf, source: str, *, rules: RuleSet, off: Collection[str], limit: int = DOCUMENTS_LOOKED_AT, purpose: str = "report"
) -> list[Looked]:
    """At most `limit` documents of `source` spread over its stream, fewer where they are long: about 4 million tokens in all."""
    split = shelf.manifest.split(source, shelf.split)
    by_tokens = _TOKENS_LOOKED_AT * split.docs // max(1, split.tokens)
    entry = shelf.manifest.tokenizer
    return [
        look(stored, rules=rules, off=off, vocab_size=entry.vocab_size, eos_id=entry.eos_id)
        for stored in shelf.sample(source, limit=min(limit, max(_FEWEST, by_tokens)), purpose=purpose)
    ]


class Baseline:
    """What is usual in one source, by documents that rows of its stream reach into (`looked`), and the tokens of these rows (`bags`).

    A token's dispersion is sum of squares over sum of its counts per document: tokens come in documents that have many of them, and the
    variance of a count is so much larger than that of a Poisson number (a compound Poisson process).
    """

    def __init__(self, source: str, looked: Sequence[Looked], *, bags: Iterable[tuple[I64Array, I64Array]], vocab_size: int) -> None:
        self.source = source
        self.num_documents = len(looked)
        counts, squares = np.zeros(vocab_size), np.zeros(vocab_size)
        for ids, numbers in bags:
            counts[ids] += numbers
            squares[ids] += numbers.astype(np.float64) ** 2
        self.num_tokens = int(counts.sum())
        # Half a token more for each id: one that was never seen is rare, not impossible.
        self.probability: F64Array = (counts + 0.5) / (counts.sum() + 0.5 * vocab_size)
        self.dispersion: F64Array = _dispersion(counts, squares)
        self._log_p = np.log(self.probability)
        self._hits = Counter(hit.rule for one in looked for hit in one.hits)
        self._surprises = np.array([self.surprise(one.ids, one.counts) for one in looked])
        self.lengths = np.array([one.document.end - one.document.start for one in looked], dtype=np.int64)

    def surprise(self, ids: I64Array, counts: I64Array) -> float:
        """Nats per token of a bag of tokens, if each were drawn as the source has them."""
        return float(-(self._log_p[ids] * counts).sum() / max(1, counts.sum()))

    def oddest(self, tokens: npt.NDArray[Any], *, width: int) -> int:
        """Where the `width` tokens begin that surprise most together; ids outside the vocabulary count as the rarest one."""
        inside = np.minimum(tokens, len(self._log_p) - 1).astype(np.int64)
        surprises = np.where(tokens < len(self._log_p), -self._log_p[inside], -self._log_p.min())
        sums = np.cumsum(np.concatenate([[0.0], surprises]))
        return int(np.argmax(sums[width:] - sums[:-width])) if len(tokens) > width else 0

    def rate(self, rule: str) -> float:
        """Share of the documents that break `rule`, never quite 0: half a document of one more."""
        return (self._hits[rule] + 0.5) / (self.num_documents + 1.0)

    def num_hits(self, rule: str) -> int:
        return self._hits[rule]

    def rarity_of_surprise(self, value: float) -> float:
        return _rarity_in(self._surprises, value)

    def rarity_of_length(self, num_tokens: int) -> float:
        return _rarity_in(np.log(self.lengths), math.log(num_tokens))


def _dispersion(counts: F64Array, squares: F64Array) -> F64Array:
    """Of each id; of one that was seen seldom mostly that of the others, nine tenths of which are below what is assumed."""
    common = counts >= _SEEN_OFTEN
    usual = float(np.quantile(squares[common] / counts[common], 0.9)) if common.any() else 1.0
    return np.asarray((squares + _SEEN_OFTEN * usual) / (counts + _SEEN_OFTEN))


def _rarity_in(usual: F64Array, value: float) -> float:
    """In powers of ten, by a Laplace distribution through `usual`: what is far out counts by how far, not only as the last of so many."""
    if not usual.size:
        return 0.0
    middle = float(np.median(usual))
    scale = max(float(np.abs(usual - middle).mean()), 0.01 * abs(middle), 1e-9)
    return min(_MOST_RARE, abs(value - middle) / scale / math.log(10.0))


def rarity(share: float) -> float:
    """How rare a share above 0 is, in powers of ten."""
    return min(_MOST_RARE, -math.log10(share))


def standard_score(found: float, *, of: float, share: float) -> float:
    """How many standard deviations `found` of `of` draws lie from what `share` of them would be, positive above.

    On the scale of the arcsine of the root, where the spread is the same for all shares: one hit of a dozen is no news.
    """
    return 2.0 * math.sqrt(of) * (_angle(found / of) - _angle(share)) if of else 0.0


def _angle(share: float) -> float:
    return math.asin(math.sqrt(min(1.0, max(0.0, share))))


def baselines(
    shelf: Shelf, *, seq_len: int, rules: RuleSet, off: Mapping[str, Collection[str]], limit: int = DOCUMENTS_LOOKED_AT
) -> dict[str, Baseline]:
    """What is usual in each source, from rows of `seq_len` tokens spread over its stream, until they reach into `limit` documents.

    Samples are such rows: so long documents weigh here as they do in a step.
    """
    return {
        source: _baseline(shelf, source, seq_len=seq_len, rules=rules, off=off.get(source, ()), limit=limit)
        for source in shelf.manifest.sources
    }


def _baseline(shelf: Shelf, source: str, *, seq_len: int, rules: RuleSet, off: Collection[str], limit: int) -> Baseline:
    entry = shelf.manifest.tokenizer
    split = shelf.manifest.split(source, shelf.split)
    documents_per_row = 1.0 + seq_len * split.docs / max(1, split.tokens)
    rows = spread(split.tokens // seq_len, limit=max(1, int(limit / documents_per_row)), key=f"usual/{source}")
    looked: dict[StoredDocument, Looked] = {}
    bags: list[tuple[I64Array, I64Array]] = []
    for row in rows.tolist():
        for document, spans in shelf.in_spans([TokenSpan(source, row * seq_len, (row + 1) * seq_len)]).items():
            if document not in looked:
                looked[document] = look(shelf.read(document), rules=rules, off=off, vocab_size=entry.vocab_size, eos_id=entry.eos_id)
            bags += [bag_of(shelf.tokens(span), vocab_size=entry.vocab_size) for span in spans]
    return Baseline(source, list(looked.values()), bags=bags, vocab_size=entry.vocab_size)
