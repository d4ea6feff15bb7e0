"""The golden hashes are a promise: a run started by this version resumes under every later one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from surefoot.core.identity import diff_sections, hashed_values, other_sections, section_hashes, values_of
from surefoot.core.sections import RunConfig, SourceSection, StageSection, setting

GOLDEN = {
    "run": "bd0488843468e63c62bb6d1df790f0a83de90616c0906e9dbd3275d3b4100d97",
    "model": "f912dc22fdbd195cf2fd69600f2959ddb81cabd087361c4a170623ed32be7a4a",
    "data": "04f41ce967da88e0aed7e185d1e3518558be741967cdec1352a378980dffeb49",
    "train": "98d0b741c8d2b36a30f720b9665001627044e3f8e872633543dac4b2fa6573fc",
    "optimizer": "8584f01537e85593b1df4122fc9a501cee7c5843d300d3d8676252843852d072",
    "schedule": "6b035c8e04a538ddd2617f99f71d6c57d963a644ab824058af7821c84c21163c",
    "numerics": "31fa425264ac78e50a2d29cf5bd1461525e5369da691c241a1e2ffcf796c9e86",
}


def test_hashes_of_the_defaults_never_change() -> None:
    assert section_hashes(RunConfig()) == GOLDEN


@pytest.mark.parametrize(
    "changed",
    [
        replace(RunConfig(), run=replace(RunConfig().run, name="other", dir="/elsewhere")),
        replace(RunConfig(), data=replace(RunConfig().data, path="/elsewhere", tokenizer="/elsewhere/tokenizer.json")),
        replace(RunConfig(), model=replace(RunConfig().model, preset="quickstart")),
        replace(RunConfig(), parallel=replace(RunConfig().parallel, dp_replicate=8)),
        replace(RunConfig(), checkpoint=replace(RunConfig().checkpoint, interval_steps=1)),
    ],
)
def test_names_folders_and_world_size_are_no_identity(changed: RunConfig) -> None:
    assert section_hashes(changed) == GOLDEN
    assert diff_sections(RunConfig(), changed) == []


def test_the_seed_is_identity() -> None:
    changed = replace(RunConfig(), run=replace(RunConfig().run, seed=7))
    assert section_hashes(changed)["run"] != GOLDEN["run"]
    assert diff_sections(RunConfig(), changed) == [("run", "seed", 0, 7)]


def test_a_difference_names_section_key_and_both_values() -> None:
    old = RunConfig()
    new = replace(
        old,
        train=replace(old.train, num_steps=5, batch_ramp=((0, 4),)),
        optimizer=replace(old.optimizer, lr=1.0),
        data=replace(old.data, sources=(SourceSection(name="a", files=("/x",), weight=2.0),)),
    )
    assert diff_sections(old, new) == [
        ("data", "sources[0].name", None, "a"),
        ("data", "sources[0].weight", None, 2.0),
        ("train", "num_steps", 1000, 5),
        ("train", "batch_ramp", (), ((0, 4),)),
        ("optimizer", "lr", 3e-4, 1.0),
    ]
    moved = replace(new, data=replace(new.data, sources=(SourceSection(name="a", files=("/y",), weight=2.0),)))
    assert section_hashes(moved) == section_hashes(new)


@dataclass(frozen=True, slots=True)
class GrownSection:
    old: int = setting(1, "there from the start")
    new: int = setting(5, "came later", since=2)
    folder: str = setting("", "a path", is_path=True)


def test_a_later_setting_counts_only_away_from_its_default() -> None:
    assert values_of(GrownSection()) == {"old": 1}
    assert values_of(GrownSection(new=6, folder="x")) == {"old": 1, "new": 6}


def staged(*stages: StageSection) -> RunConfig:
    return replace(RunConfig(), stage=stages)


def test_stages_have_a_hash_where_there_are_any_and_leave_the_others_alone() -> None:
    web_first = staged(StageSection(first_sample=5, weights=(("web", 7.0), ("code", 3.0))))
    code_first = staged(StageSection(first_sample=5, weights=(("code", 3.0), ("web", 7.0))))
    other = staged(StageSection(first_sample=5, weights=(("code", 7.0), ("web", 3.0))))
    assert section_hashes(web_first) == section_hashes(code_first)
    assert {**section_hashes(web_first), "stage": ""} == {**GOLDEN, "stage": ""}
    assert section_hashes(web_first)["stage"] != section_hashes(other)["stage"]


def test_other_stages_refuse_no_resume_and_another_section_does() -> None:
    old, new = staged(), staged(StageSection(first_sample=5, lr=1.0))
    assert other_sections(section_hashes(old), now=section_hashes(new)) == []
    assert other_sections(section_hashes(new), now=section_hashes(old)) == []
    faster = replace(new, optimizer=replace(new.optimizer, lr=1.0))
    assert other_sections(section_hashes(old), now=section_hashes(faster)) == ["optimizer"]


def test_a_difference_between_stages_names_stage_and_key() -> None:
    old, new = staged(StageSection(first_sample=5, lr=1.0)), staged(StageSection(first_sample=5, lr=2.0), StageSection(first_sample=9))
    assert diff_sections(old, new) == [("stage", "stage[0].lr", 1.0, 2.0), ("stage", "stage[1].first_sample", None, 9)]
    assert diff_sections(old, staged()) == [("stage", "stage[0].first_sample", 5, None), ("stage", "stage[0].lr", 1.0, None)]


def test_what_is_kept_open_for_longer_sequences_is_no_identity() -> None:
    """The cursor holds what a run began with."""
    data = RunConfig().data
    assert section_hashes(replace(RunConfig(), data=replace(data, max_seq_len=4096))) == GOLDEN


def test_every_hashed_section_is_there() -> None:
    assert list(hashed_values(RunConfig())) == ["run", "model", "data", "train", "optimizer", "schedule", "numerics"]
