"""Samples to come, put to the quality rules before a run takes them. What was found and how far it got are files of the run folder.

`look_ahead.jsonl` has a line per sample, document in it and rule that it breaks. `look_ahead.json` says up to which sample all are judged;
it is written after the lines. So a kill loses nothing, and what is judged again is not told twice.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block
from surefoot.core.durable import write_atomic
from surefoot.core.strict_json import canonical, dumps, loads
from surefoot.data.provenance import StoredDocument
from surefoot.data.quality.candidates import parts_of
from surefoot.data.quality.measures import Subject
from surefoot.data.quality.rules import Hit, RuleSet
from surefoot.data.quality.stored import Shelf, told
from surefoot.data.recipe import RunOrder

FINDINGS_NAME: Final = "look_ahead.jsonl"
PLACE_NAME: Final = "look_ahead.json"
PIECE_SAMPLES: Final = 16
"""Samples that are judged between two looks at where the run is."""
_MAX_KNOWN: Final = 4096
_TAIL_BYTES: Final = 1 << 18

I64Array = npt.NDArray[np.int64]
Finding = dict[str, Any]


class LookAhead:
    """Goes over the samples of a run once, piece by piece, keeping ahead of it by at most `num_samples`.

    Told are rules that drop, and those that flag but are not for natural language: the others say little of a single document.
    """

    def __init__(self, run_dir: Path, *, rules: RuleSet, off: Mapping[str, Collection[str]], num_samples: int) -> None:
        told_of = tuple(rule for rule in rules.rules if rule.action == "drop" or not rule.natural_language)
        self._rules = RuleSet(told_of)
        self._off = off
        self._num_samples = num_samples
        self._findings, self._place = run_dir / FINDINGS_NAME, run_dir / PLACE_NAME
        self._judged_until, self._missed, self._of_data = _read_place(self._place)
        self._known: OrderedDict[str, list[Hit]] = OrderedDict()
        _cut_torn_line(self._findings)
        self._told = {_key(finding) for finding in read_findings(run_dir) if finding["sample"] >= self._judged_until}

    def step(
        self, shelf: Shelf, order: RunOrder, *, next_sample: int, end_sample: int, steps_of: Callable[[I64Array], Sequence[int]]
    ) -> list[Finding] | None:
        """Judge the next piece and write down what it breaks; None when nothing is to be judged now.

        `next_sample` is where the run is, `end_sample` where it ends; `steps_of` says which step takes each of some samples. Raises
        DataError where a block on disk is not what was written.
        """
        data_hash = shelf.manifest.sha256
        if self._of_data != data_hash:
            self._judged_until, self._missed, self._of_data, self._told = 0, 0, data_hash, set()
            self._known.clear()
        first = max(next_sample, self._judged_until)
        last = min(next_sample + self._num_samples, end_sample, first + PIECE_SAMPLES)
        if first >= last:
            return None
        found = self._judge(shelf, order, _taken(order, first, last), steps_of=steps_of)
        if found:
            _append(self._findings, found)
        self._missed += first - self._judged_until
        self._judged_until = last
        place = {"judged_until": last, "missed_samples": self._missed, "data_hash": data_hash}
        write_atomic(self._place, dumps(place), durable=False)
        return found

    def _judge(self, shelf: Shelf, order: RunOrder, samples: I64Array, *, steps_of: Callable[[I64Array], Sequence[int]]) -> list[Finding]:
        found: list[Finding] = []
        for document, parts in parts_of(shelf, order.at(samples) if samples.size else ()).items():
            hits = self._hits(shelf, document)
            for sample in sorted({number for number, _ in parts}) if hits else ():
                step = steps_of(np.array([sample], dtype=np.int64))[0]
                found += [{"sample": sample, "step": step, "shard": document.shard, **asdict(hit), **told(document)} for hit in hits]
        return sorted((finding for finding in found if _key(finding) not in self._told), key=_key)

    def _hits(self, shelf: Shelf, document: StoredDocument) -> list[Hit]:
        """A long document comes in many samples: it is judged once."""
        hits = self._known.pop(document.id, None)
        if hits is None:
            hits = self._rules.judge_subject(
                Subject(shelf.read(document).text), source=document.source, off=self._off.get(document.source, ())
            )
        self._known[document.id] = hits
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return hits


def read_findings(run_dir: Path) -> list[Finding]:
    """What was found, oldest first; of a long list the end. A line that is torn or damaged is left out."""
    try:
        with (run_dir / FINDINGS_NAME).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [finding for line in lines if (finding := _parsed(line)) is not None]


def look_ahead_report(run_dir: Path, order: RunOrder, *, next_sample: int, end_sample: int, blocks: Sequence[Block]) -> dict[str, Any]:
    """Up to which sample it has judged, how many it missed because the run was there first, and what it found that is still to come.

    That is from `next_sample` on and before `end_sample`, in samples that a step takes and documents that `blocks` do not leave out there.
    """
    judged_until, missed, _ = _read_place(run_dir / PLACE_NAME)
    found = [one for one in read_findings(run_dir) if next_sample <= one["sample"] < end_sample and not _is_blocked(one, blocks)]
    taken = set(order.steps.without_skipped(np.array([one["sample"] for one in found], dtype=np.int64)).tolist())
    findings = sorted((one for one in found if one["sample"] in taken), key=_key)
    return {"judged_until": judged_until, "missed_samples": missed, "findings": findings}


def _is_blocked(finding: Finding, blocks: Sequence[Block]) -> bool:
    """By what was named: lines of before know no shard."""
    shard = f"{finding.get('source')}/{finding.get('shard')}"
    names = {("document", finding.get("hash")), ("file", finding.get("file")), ("shard", shard)}
    return any((block.kind, block.name) in names and block.effective_sample <= finding["sample"] for block in blocks)


def _taken(order: RunOrder, first: int, last: int) -> I64Array:
    """The samples of [first, last) that the run will take."""
    return order.steps.without_skipped(np.arange(first, min(last, order.ends_at) if order.ends_at is not None else last, dtype=np.int64))


def _key(finding: Finding) -> tuple[int, str, str]:
    return int(finding["sample"]), str(finding["document"]), str(finding["rule"])


def _parsed(line: bytes) -> Finding | None:
    try:
        finding = loads(line)
        return finding if isinstance(finding, dict) and {"sample", "document", "rule"} <= finding.keys() else None
    except ValueError:
        return None


def _read_place(path: Path) -> tuple[int, int, str]:
    """(sample up to which it is judged, samples that the run was too quick for, identity of the data); from the start without one."""
    try:
        place = json.loads(path.read_bytes())
        return int(place["judged_until"]), int(place.get("missed_samples", 0)), str(place["data_hash"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0, ""


def _append(path: Path, findings: Sequence[Finding]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(canonical(finding) + b"\n" for finding in findings))


def _cut_torn_line(path: Path) -> None:
    """A kill in the middle of a line leaves its beginning: the next one must not be written behind it."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            start, tail = file.tell(), file.read()
            if tail and not tail.endswith(b"\n"):
                file.truncate(start + tail.rfind(b"\n") + 1)
    except OSError:
        return
