"""The samples of a few steps beside what is usual: copies, tokens, reserved ids, broken rules, lengths, shares, and who stands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block, TokenSpan
from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.candidates import Candidate, candidate_documents, parts_of
from surefoot.data.quality.look import Baseline, standard_score
from surefoot.data.quality.rules import RuleSet
from surefoot.data.quality.stored import Shelf, excerpt, spread, told
from surefoot.data.recipe import RunOrder

I64Array = npt.NDArray[np.int64]

MAX_SAMPLES: Final = 2048
"""Of larger windows so many samples are looked at: enough for a share of 1% to show at 4 standard deviations."""
MAX_CANDIDATES: Final = 20
FAR_OUT: Final = 6.0
"""Standard deviations from which on a token is told: among 100,000 ids with heavy tails, few healthy ones are so far out."""
_MAX_TOKENS_TOLD: Final = 20
_LEAST_COUNT: Final = 5
_RULE_FAR_OUT: Final = 3.0


def window_report(
    shelf: Shelf,
    order: RunOrder,
    samples: I64Array,
    *,
    rules: RuleSet,
    off: Mapping[str, Collection[str]],
    usual: Mapping[str, Baseline],
    blocks: Sequence[Block] = (),
) -> dict[str, Any]:
    """`samples` are the global samples of the window. `usual` has a baseline for each of their sources; `blocks` is what is left out."""
    chosen = samples[spread(len(samples), limit=MAX_SAMPLES, key="window")]
    looked_at = order.at(chosen)
    counts = {source: np.zeros(shelf.manifest.tokenizer.vocab_size, dtype=np.int64) for source in order.names}
    num_outside = _count(shelf, parts_of(shelf, looked_at).values(), counts=counts)
    candidates = candidate_documents(shelf, looked_at, rules=rules, off=off, usual=usual, limit=len(chosen) * 4096, blocks=blocks)
    shares = Counter(sample.source for sample in looked_at)
    planned = order.planned_shares(int(samples[-1]))
    return {
        "first_sample": int(samples[0]),
        "last_sample": int(samples[-1]),
        "num_samples": len(samples),
        "looked_at": {"samples": len(chosen), "documents": len(candidates)},
        "sources": {
            source: {
                "samples": shares[source],
                "share": shares[source] / len(chosen),
                "usual": planned[source],
                "z": standard_score(shares[source], of=len(chosen), share=planned[source]),
            }
            for source in order.names
        },
        "copies": _copies(candidates),
        "tokens": _unusual_tokens(shelf, counts, usual=usual),
        "reserved_ids": _reserved(shelf, counts) | {"outside_vocabulary": num_outside},
        "rules": _rules(candidates, usual=usual),
        "lengths": _lengths(candidates, usual=usual),
        "documents": [candidate.as_json() for candidate in candidates[:MAX_CANDIDATES]],
    }


def _count(shelf: Shelf, parts: Iterable[Sequence[tuple[int, TokenSpan]]], *, counts: Mapping[str, I64Array]) -> int:
    """Add the tokens of the `parts` of documents to `counts`, by source; how many lie outside the vocabulary."""
    num_outside = 0
    for _, span in chain.from_iterable(parts):
        tokens = shelf.tokens(span)
        inside = tokens[tokens < len(counts[span.source])]
        num_outside += len(tokens) - len(inside)
        counts[span.source][:] += np.bincount(inside, minlength=len(counts[span.source]))
    return num_outside


def _copies(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Documents that stand in the window more than once under one hash, at another place of the data or in another sample of it again."""
    by_hash: dict[str, list[StoredDocument]] = {}
    for candidate in candidates:
        by_hash.setdefault(candidate.document.hash, []).append(candidate.document)
    twice = {digest: documents for digest, documents in by_hash.items() if len(documents) > 1}
    examples = [{"copies": len(documents), **told(documents[0])} for documents in list(twice.values())[:5]]
    return {"documents": sum(len(documents) - 1 for documents in twice.values()), "examples": examples}


def _unusual_tokens(shelf: Shelf, counts: Mapping[str, I64Array], *, usual: Mapping[str, Baseline]) -> list[dict[str, Any]]:
    """Ids that come far more often, or far less, than in the sources as they are mixed here."""
    found = sum((window for window in counts.values()), np.zeros(shelf.manifest.tokenizer.vocab_size, dtype=np.int64))
    expected, variance = np.zeros(len(found)), np.zeros(len(found))
    for source, window in counts.items():
        if total := int(window.sum()):
            here = usual[source].probability * total
            expected += here
            # The baseline is counted too, not known: its own error comes on top.
            variance += here * usual[source].dispersion * (1.0 + total / max(1, usual[source].num_tokens))
    scores = (found - expected) / np.sqrt(np.maximum(variance, 1e-12))
    far = np.flatnonzero((np.abs(scores) >= FAR_OUT) & (np.maximum(found, expected) >= _LEAST_COUNT))
    return [
        {
            "id": token,
            "text": excerpt(shelf.tokenizer.decode([token])),
            "count": int(found[token]),
            "expected": float(expected[token]),
            "z": float(scores[token]),
        }
        for token in sorted(far.tolist(), key=lambda token: -abs(scores[token]))[:_MAX_TOKENS_TOLD]
    ]


def _reserved(shelf: Shelf, counts: Mapping[str, I64Array]) -> dict[str, Any]:
    """Ids that stand for no text: special ones but for EOS, and those that no token of the tokenizer has."""
    silent = shelf.tokenizer.token_num_bytes == 0
    silent[shelf.manifest.tokenizer.eos_id] = False
    found = sum((window for window in counts.values()), np.zeros(len(silent), dtype=np.int64))
    return {"tokens": int(found[silent].sum()), "ids": np.flatnonzero(silent & (found > 0)).tolist()[:_MAX_TOKENS_TOLD]}


def _rules(candidates: Sequence[Candidate], *, usual: Mapping[str, Baseline]) -> dict[str, Any]:
    """Every rule that the window breaks, with how often its sources do; `z` is large where the window does more often."""
    of_source = Counter(candidate.document.source for candidate in candidates)
    found = Counter(hit.rule for candidate in candidates for hit in candidate.looked.hits)
    answer = {}
    for rule, count in found.most_common():
        share = sum(usual[source].rate(rule) * number for source, number in of_source.items()) / len(candidates)
        score = standard_score(count, of=len(candidates), share=share)
        answer[rule] = {"documents": count, "share": count / len(candidates), "usual": share, "z": score, "far_out": score >= _RULE_FAR_OUT}
    return answer


def _lengths(candidates: Sequence[Candidate], *, usual: Mapping[str, Baseline]) -> dict[str, Any]:
    """Median tokens of the documents that the samples reach into, here and usually."""
    answer = {}
    for source, baseline in usual.items():
        here = [one.document.end - one.document.start for one in candidates if one.document.source == source]
        if here and baseline.lengths.size:
            answer[source] = {"median": int(np.median(here)), "longest": max(here), "usual": int(np.median(baseline.lengths))}
    return answer
