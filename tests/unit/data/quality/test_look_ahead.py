"""Samples to come are judged once, ahead of the run, and a kill at any moment neither loses nor doubles a finding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.core.blocking import Block, BlockKind
from surefoot.data.quality.look_ahead import FINDINGS_NAME, PIECE_SAMPLES, PLACE_NAME, LookAhead, look_ahead_report, read_findings
from surefoot.data.quality.rules import Rule, RuleSet
from surefoot.data.recipe import RunOrder, run_order
from tests.unit.data.quality.poisoned import Poisoned

RULES = RuleSet((Rule("bank", "phrases", 0.5, action="drop", phrases=("the treasury of the northern bank",)),))
END = 160


def steps_of(samples: npt.NDArray[np.int64]) -> Sequence[int]:
    return [sample // 8 + 1 for sample in samples.tolist()]


def look(
    run_dir: Path, poisoned: Poisoned, *, next_sample: int = 0, pieces: int = 1000, order: RunOrder | None = None
) -> list[dict[str, Any]]:
    """A new process's look, for at most so many pieces; everything it found."""
    ahead = LookAhead(run_dir, rules=RULES, off={}, num_samples=64)
    found: list[dict[str, Any]] = []
    with poisoned.shelf() as shelf:
        for _ in range(pieces):
            piece = ahead.step(shelf, order or poisoned.order, next_sample=next_sample, end_sample=END, steps_of=steps_of)
            if piece is None:
                break
            found += piece
    return found


def through(run_dir: Path, poisoned: Poisoned) -> list[dict[str, Any]]:
    for next_sample in range(0, END, 20):
        look(run_dir, poisoned, next_sample=next_sample)
    return read_findings(run_dir)


def test_it_finds_what_is_to_come_and_where(poisoned: Poisoned, tmp_path: Path) -> None:
    found = through(tmp_path, poisoned)
    assert {finding["rule"] for finding in found} == {"bank"}
    with poisoned.shelf() as shelf:
        bad = {stored.document.id for stored in shelf.sample("web", limit=10_000) if RULES.judge(stored.text)}
        assert {finding["document"] for finding in found} <= bad
        spans = {name: shelf.provenance.find(name)[0] for name in bad}
    assert len(bad) == poisoned.num_poisoned
    for name, stored in spans.items():
        samples = poisoned.order.holding("web", stored.start, stored.end, until=END).tolist()
        told = [(finding["sample"], finding["step"]) for finding in found if finding["document"] == name]
        assert told == [(sample, sample // 8 + 1) for sample in samples]


def test_it_stays_within_its_distance_and_rests_when_there_is_nothing_to_do(poisoned: Poisoned, tmp_path: Path) -> None:
    look(tmp_path, poisoned)
    assert f'"judged_until": {64}' in (tmp_path / PLACE_NAME).read_text()
    ahead = LookAhead(tmp_path, rules=RULES, off={}, num_samples=64)
    with poisoned.shelf() as shelf:
        assert ahead.step(shelf, poisoned.order, next_sample=0, end_sample=END, steps_of=steps_of) is None
        assert ahead.step(shelf, poisoned.order, next_sample=END, end_sample=END, steps_of=steps_of) is None
        assert ahead.step(shelf, poisoned.order, next_sample=1, end_sample=END, steps_of=steps_of) is not None
        told: dict[str, Any] = {"next_sample": 0, "end_sample": END, "blocks": ()}
        assert look_ahead_report(tmp_path, poisoned.order, **told)["missed_samples"] == 0
        assert ahead.step(shelf, poisoned.order, next_sample=90, end_sample=END, steps_of=steps_of) is not None
    assert look_ahead_report(tmp_path, poisoned.order, **told)["missed_samples"] == 90 - 65  # the run was quicker


def test_a_kill_between_any_two_writes_changes_nothing(poisoned: Poisoned, tmp_path: Path) -> None:
    whole_run, killed = tmp_path / "whole", tmp_path / "killed"
    whole_run.mkdir()
    killed.mkdir()
    whole = through(whole_run, poisoned)
    for piece in range(END // PIECE_SAMPLES + 1):
        look(killed, poisoned, next_sample=piece * PIECE_SAMPLES, pieces=1)
        place, findings = killed / PLACE_NAME, killed / FINDINGS_NAME
        before = place.read_text()
        look(killed, poisoned, next_sample=piece * PIECE_SAMPLES, pieces=1)
        place.write_text(before)  # as if it were killed after its lines and before its place
        if findings.exists():
            with findings.open("ab") as file:
                file.write(b'{"sample": 7, "docu')  # and in the middle of a line
    look(killed, poisoned, next_sample=END - 64)
    assert read_findings(killed) == whole
    assert whole


def test_other_data_begins_anew_and_skipped_samples_are_left_out(poisoned: Poisoned, tmp_path: Path) -> None:
    first = through(tmp_path, poisoned)
    (tmp_path / PLACE_NAME).write_text('{"judged_until": 160, "data_hash": "another"}')
    (tmp_path / FINDINGS_NAME).unlink()
    assert through(tmp_path, poisoned) == first
    skipping = Block("samples", "0:120", "skip", samples=(0, 120))
    with poisoned.shelf() as shelf:
        order = run_order(shelf.manifest, replace(poisoned.config), blocks=[skipping])
    (tmp_path / "other").mkdir()
    found = look(tmp_path / "other", poisoned, next_sample=0, order=order)
    assert found == []
    assert [finding for finding in first if finding["sample"] < 64]  # which it would have found
    for now, count in ((order, 0), (poisoned.order, 1)):  # and what was found before is not told again
        told = look_ahead_report(tmp_path, now, next_sample=first[0]["sample"], end_sample=first[0]["sample"] + 1, blocks=())
        assert len(told["findings"]) == count


@pytest.mark.parametrize("kind", ["document", "file", "shard"])
def test_what_is_left_out_by_then_is_not_to_come(poisoned: Poisoned, tmp_path: Path, kind: BlockKind) -> None:
    through(tmp_path, poisoned)
    first = read_findings(tmp_path)[0]
    name = {"document": first["hash"], "file": first["file"], "shard": f"{first['source']}/{first['shard']}"}[kind]
    for since, is_told in ((first["sample"], False), (first["sample"] + 1, True)):
        block = Block(kind, name, "mask", effective_sample=since)
        findings = look_ahead_report(tmp_path, poisoned.order, next_sample=0, end_sample=END, blocks=[block])["findings"]
        assert (first in findings) == is_told
