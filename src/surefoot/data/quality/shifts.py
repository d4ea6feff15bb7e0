"""Whether a source is the same all along: rates of broken rules by shard, and rates of what was left out by file.

A crawl that went wrong, or a converter that was changed, shows as one stretch that is unlike the others long before a loss does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from surefoot.core.strict_json import loads
from surefoot.data.quality.look import Looked, standard_score
from surefoot.data.quality.stored import Shelf

REJECTS_NAME: Final = "rejects.jsonl"
FAR_OUT: Final = 4.0
"""A stretch is named from so many standard deviations on: of ten thousand healthy ones less than one."""
_NUM_PARTS: Final = 16
_MANY: Final = 8
_LEAST_DOCUMENTS: Final = 20
_MAX_RATES: Final = 100


def stretches_of(shelf: Shelf, source: str, looks: Sequence[Looked]) -> dict[str, Any]:
    """How often rules are broken by shard where there are 8 or more, else by sixteenths of the stream; what is far out, furthest first."""
    by_shard = len(shelf.manifest.split(source, shelf.split).shards) >= _MANY
    num_documents = shelf.num_documents(source)
    groups: dict[str, list[Looked]] = {}
    for one in looks:
        label = one.document.shard if by_shard else str(one.document.number * _NUM_PARTS // num_documents + 1)
        groups.setdefault(label, []).append(one)
    rates = [
        {"stretch": label, "documents": len(members), "share_broken": sum(bool(one.hits) for one in members) / len(members)}
        for label, members in groups.items()
    ]
    far = sorted(_far_out(groups, num_looked=len(looks)), key=lambda one: -abs(one["z"]))
    return {"kind": "shard" if by_shard else "sixteenth", "rates": rates, "far_out": far}


def _far_out(groups: Mapping[str, Sequence[Looked]], *, num_looked: int) -> Iterator[dict[str, Any]]:
    """Against all the others: a stretch must not hide in a share that it makes itself."""
    broken = {label: Counter(hit.rule for one in members for hit in one.hits) for label, members in groups.items()}
    in_all = sum(broken.values(), Counter[str]())
    for label, members in groups.items() if len(groups) > 1 else ():
        for rule, total in in_all.items():
            count = broken[label][rule]
            elsewhere = (total - count + 0.5) / (num_looked - len(members) + 1.0)
            score = standard_score(count, of=len(members), share=elsewhere)
            if abs(score) >= FAR_OUT:
                yield {"stretch": label, "rule": rule, "z": score, "share": count / len(members), "share_elsewhere": elsewhere}


def reject_rates(path: Path, looks: Sequence[Looked], *, num_documents: int) -> dict[str, Any]:
    """How much was left out by file, or by sixteenths of the records where a source has few files; by how much each is out.

    All rejects are counted, and held against the documents that were looked at: the share of both together that is rejects is the same in
    each file, if files are alike. Nothing is said of a file with fewer than 20 of them.
    """
    kept = [(one.document.file, one.document.record) for one in looks]
    last: dict[str, int] = {}
    num_places = 0
    for file, record in chain(kept, _rejects(path)):  # gone through twice: of a crawl there are more rejects than memory holds
        last[file] = max(record, last.get(file, 0))
        num_places += 1
    num_rejects = num_places - len(kept)
    if not num_rejects or not kept:
        return {"kind": "file", "rates": [], "far_out": []}
    if len(last) >= _MANY:
        last = {}
    left_out, stayed = (Counter(_part(place, last=last) for place in places) for places in (_rejects(path), kept))
    weight = num_documents / len(kept)
    rates: list[dict[str, Any]] = []
    far: list[tuple[float, dict[str, Any]]] = []
    labels = list(dict.fromkeys([*stayed, *left_out]))
    for label in labels if len(labels) > 1 else ():
        count, of = left_out[label], left_out[label] + stayed[label]
        if of < _LEAST_DOCUMENTS:
            continue
        elsewhere = (num_rejects - count + 0.5) / (num_rejects + len(kept) - of + 1.0)
        score = standard_score(count, of=of, share=elsewhere)
        rates.append({"part": label, "rejects": count, "rate": count / (count + stayed[label] * weight), "z": score})
        far += [(abs(score), rates[-1])] if abs(score) >= FAR_OUT else []
    worst = [rate for _, rate in sorted(far, key=lambda pair: -pair[0])[:_MAX_RATES]]
    return {"kind": "sixteenth" if last else "file", "rates": rates[:_MAX_RATES], "far_out": worst}


def _part(place: tuple[str, int], *, last: Mapping[str, int]) -> str:
    file, record = place
    return f"{file} {max(0, record - 1) * _NUM_PARTS // max(1, last[file]) + 1}/{_NUM_PARTS}" if last else file


def _rejects(path: Path) -> Iterator[tuple[str, int]]:
    """(file, record) of each; a line that cannot be read is left out."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                try:
                    reject = loads(line)
                    yield str(reject["file"]), int(reject["line"])
                except (ValueError, KeyError, TypeError):
                    continue
    except OSError:
        return
