"""The report on prepared data: what it holds, what is odd in it, what rules would drop, and whether that shifts along the stream.

Totals are exact. What needs tokens or text is asked of a bounded number of documents spread over each source, and says of how many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from surefoot.data.manifest import SourceEntry
from surefoot.data.quality.look import DOCUMENTS_LOOKED_AT, Looked, look_at_source
from surefoot.data.quality.repeats import near_copies, shared_passages
from surefoot.data.quality.rules import Rule, RuleSet, by_id
from surefoot.data.quality.shifts import REJECTS_NAME, reject_rates, stretches_of
from surefoot.data.quality.stored import Shelf, told

SCHEMA_VERSION: Final = 1
PERCENTILES: Final = (0, 1, 5, 25, 50, 75, 95, 99, 100)
NUM_LONGEST: Final = 20
_MAX_LENGTHS: Final = 1 << 22  # 32 MiB
_NUM_EXAMPLES: Final = 3
_RATIO_EDGES: Final = (*np.arange(0.0, 10.01, 0.5).tolist(), float("inf"))
_ENTROPY_EDGES: Final = tuple(np.arange(0.0, 8.01, 0.25).tolist())


def report(
    shelf: Shelf, *, rules: RuleSet, off: Mapping[str, Collection[str]], limit: int = DOCUMENTS_LOOKED_AT, rules_file: str = ""
) -> dict[str, Any]:
    """Everything by name. `off` are the rules that each source switches off; at most `limit` documents of a source are looked at."""
    manifest = shelf.manifest
    sources = {
        name: source_report(shelf, name, entry, rules=rules, off=off.get(name, ()), limit=limit) for name, entry in manifest.sources.items()
    }
    splits = [split for entry in manifest.sources.values() for split in entry.splits.values()]
    num_padded = sum(len(shelf.padded_tokens(name)) for name in manifest.sources)
    return {
        "schema_version": SCHEMA_VERSION,
        "path": str(shelf.path),
        "manifest_sha256": manifest.sha256,
        "split": shelf.split,
        "tokenizer": {
            "recipe": manifest.tokenizer.recipe,
            "vocab_size": manifest.tokenizer.vocab_size,
            "eos_id": manifest.tokenizer.eos_id,
        },
        "totals": {
            "sources": len(manifest.sources),
            "documents": sum(split.docs for split in splits) - num_padded,
            "tokens": sum(split.tokens for split in splits),
            "text_bytes": sum(split.text_bytes for split in splits),
            "duplicates": sum(entry.duplicates for entry in manifest.sources.values()),
            "bad_records": sum(entry.bad_records for entry in manifest.sources.values()),
        },
        "looked_at": sum(source["looked_at"]["documents"] for source in sources.values()),
        "rules": [_told_rule(rule) for rule in rules.rules],
        "rules_file": rules_file,
        "sources": sources,
    }


def source_report(shelf: Shelf, name: str, entry: SourceEntry, *, rules: RuleSet, off: Collection[str], limit: int) -> dict[str, Any]:
    """One source: see `report`."""
    split, padded = entry.splits[shelf.split], shelf.padded_tokens(name)
    looks = look_at_source(shelf, name, rules=rules, off=off, limit=limit)
    return {
        "documents": split.docs - len(padded),
        "tokens": split.tokens,
        "padded_tokens": sum(padded.values()),
        "text_bytes": split.text_bytes,
        "heldout_documents": entry.splits["heldout"].docs,
        "duplicates": entry.duplicates,
        "empty": entry.empty,
        "bad_records": entry.bad_records,
        "rejected": dict(entry.rejected),
        "looked_at": {"documents": len(looks), "tokens": sum(one.num_tokens for one in looks), "rules_off": sorted(off)},
        "lengths": _lengths(shelf, name),
        "checks": _checks(looks),
        "histograms": {
            "zlib_ratio": _histogram([one.zlib_ratio for one in looks], edges=_RATIO_EDGES),
            "byte_entropy": _histogram([one.entropy for one in looks], edges=_ENTROPY_EDGES),
        },
        "rules": _hits(looks, rules=rules),
        "would_drop": _would_drop(looks),
        "stretches": stretches_of(shelf, name, looks),
        "reject_rates": reject_rates(shelf.path / name / REJECTS_NAME, looks, num_documents=split.docs - len(padded)),
        "near_copies": near_copies(shelf, name).as_json(shelf, name),
        "shared_passages": shared_passages(shelf, [one.document for one in looks]),
    }


def _lengths(shelf: Shelf, name: str) -> dict[str, Any]:
    """In tokens, EOS included."""
    numbers, lengths = shelf.lengths(name, limit=_MAX_LENGTHS)
    if not lengths.size:
        return {"documents": 0, "percentiles": {}, "mean": None, "longest": []}
    longest = np.argsort(-lengths, kind="stable")[:NUM_LONGEST]
    values = np.percentile(lengths, PERCENTILES, method="lower").tolist()
    return {
        "documents": int(lengths.size),
        "percentiles": {str(percent): int(value) for percent, value in zip(PERCENTILES, values, strict=True)},
        "mean": float(lengths.mean()),
        "longest": [told(shelf.document(name, int(numbers[index]))) for index in longest],
    }


def _checks(looks: Sequence[Looked]) -> dict[str, Any]:
    replaced = [one for one in looks if one.num_replaced]
    return {
        "tokens_outside_vocabulary": sum(one.num_outside for one in looks),
        "documents_without_eos": sum(not one.ends_in_eos for one in looks),
        "documents_with_replacement_characters": len(replaced),
        "replacement_characters": sum(one.num_replaced for one in replaced),
        "examples": [told(one.document) for one in looks if one.num_outside or not one.ends_in_eos][:_NUM_EXAMPLES],
    }


def _histogram(values: Sequence[float], *, edges: Sequence[float]) -> dict[str, Any]:
    """Counts between neighbouring `edges`; an infinite last edge is told as null."""
    counts, _ = np.histogram(np.array(values), bins=np.array(edges))
    return {"edges": [edge if np.isfinite(edge) else None for edge in edges], "counts": counts.tolist()}


def _hits(looks: Sequence[Looked], *, rules: RuleSet) -> dict[str, Any]:
    """Per broken rule, those that drop first: how many documents break it, and the few that break it most."""
    found: dict[str, list[tuple[float, Looked]]] = defaultdict(list)
    for one in looks:
        for hit in one.hits:
            found[hit.rule].append((hit.score, one))
    known = by_id(rules.rules)
    answer = {}
    for rule, hits in sorted(found.items(), key=lambda pair: (known[pair[0]].action != "drop", -len(pair[1]))):
        worst = sorted(hits, key=lambda hit: hit[0], reverse=known[rule].fires == "above")[:_NUM_EXAMPLES]
        answer[rule] = {
            "documents": len(hits),
            "share": len(hits) / len(looks),
            "action": known[rule].action,
            "threshold": known[rule].threshold,
            "examples": [{**told(one.document), "score": score, "excerpt": one.excerpt} for score, one in worst],
        }
    return answer


def _would_drop(looks: Sequence[Looked]) -> dict[str, Any]:
    """What a filter with these rules would leave out."""
    dropped = [one for one in looks if any(hit.action == "drop" for hit in one.hits)]
    tokens = sum(one.num_tokens for one in looks)
    return {
        "documents": len(dropped),
        "share_of_documents": len(dropped) / max(1, len(looks)),
        "share_of_tokens": sum(one.num_tokens for one in dropped) / max(1, tokens),
    }


def _told_rule(rule: Rule) -> dict[str, Any]:
    words = {"id": rule.id, "measure": rule.measure, "fires": rule.fires, "threshold": rule.threshold, "action": rule.action}
    return {**words, "natural_language": rule.natural_language, "sources": list(rule.sources), "anchor": rule.anchor}
