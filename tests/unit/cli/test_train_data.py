"""The data of a start: made as [data] says, and refused before a line is written where the run cannot go on with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.cli.train_data import OnDataChange, is_other_data, prepare_missing_data, refuse_other_data
from surefoot.core.errors import ConfigError, DataError
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.sections import DataSection, RunConfig, SourceSection, TrainSection
from surefoot.core.stages import stages_of
from surefoot.data.course import Course
from surefoot.data.manifest import load_manifest

RULES = """
format_version = 1
[[rule]]
id = "short-one"
measure = "num-words"
fires = "below"
threshold = 2
action = "drop"
accepted = true
"""
TEXTS = [f"document {number} of a few words" for number in range(30)]


def corpus(file: Path, texts: list[str]) -> str:
    file.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return str(file)


def config_of(folder: Path, *texts: str, path: str = "out", weights: tuple[float, ...] = (1.0, 1.0)) -> RunConfig:
    """Two sources of the same texts, one of them with `texts` besides."""
    files = {"plain": corpus(folder / f"{path}-plain.jsonl", TEXTS), "more": corpus(folder / f"{path}-more.jsonl", [*TEXTS, *texts])}
    sources = tuple(SourceSection(name=name, files=(files[name],), weight=weight) for name, weight in zip(files, weights, strict=True))
    data = DataSection(path=str(folder / path), sources=sources, tokenizer="bytes", heldout_fraction=0.0, seq_len=16, text_field="body")
    return RunConfig(data=data, train=TrainSection(num_steps=50, global_batch_size=4, micro_batch_size=2))


def cursor_at(config: RunConfig, *, step: int) -> Mapping[str, Any]:
    course = Course(config.data.path, data=config.data, train=config.train, stages=stages_of(config), seed=config.run.seed)
    for _ in range(step):
        course.advance(course.next_samples())
    try:
        return course.cursor()
    finally:
        course.close()


def test_train_prepares_what_the_verb_would(tmp_path: Path) -> None:
    config = config_of(tmp_path, "brief")
    with (tmp_path / "out-more.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match="broken JSON"):
        prepare_missing_data(config, has_begun=False)
    (tmp_path / "rules.toml").write_text(RULES)
    data = replace(config.data, on_bad_record="skip", rules=str(tmp_path / "rules.toml"))
    assert prepare_missing_data(replace(config, data=data), has_begun=False) == 257
    made = load_manifest(data.path)
    assert (made.sources["more"].bad_records, made.sources["more"].rejected) == (1, {"short-one": 1})
    inputs = [option for name in ("plain", "more") for option in ("--source", f"{name}={tmp_path}/out-{name}.jsonl")]
    more = ["--text-field", "body", "--on-bad-record", "skip", "--rules", data.rules, "--tokenizer", "bytes", "--heldout-fraction", "0"]
    assert run(["data", "prepare", *inputs, "--out", str(tmp_path / "by-verb"), *more]) == 0
    assert load_manifest(tmp_path / "by-verb").sha256 == made.sha256
    off = replace(data, path=str(tmp_path / "off"), sources=tuple(replace(source, rules_off=("nonsense",)) for source in data.sources))
    with pytest.raises(ConfigError, match="no rule 'nonsense'"):
        prepare_missing_data(replace(config, data=off), has_begun=False)


def test_the_command_that_prepares_anew_says_all_of_it(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    prepare_missing_data(config, has_begun=False)
    (tmp_path / "rules.toml").write_text(RULES)
    sources = tuple(replace(source, rules_off=("short-one",)) for source in config.data.sources)
    data = replace(config.data, tokenizer="bpe:300", on_bad_record="skip", rules=str(tmp_path / "rules.toml"), sources=sources)
    with pytest.raises(DataError) as refused:
        prepare_missing_data(replace(config, data=data), has_begun=False)
    for option in ("--text-field body", "--on-bad-record skip", f"--rules {data.rules}", "--rules-off plain=short-one", "--force"):
        assert option in refused.value.hint


@pytest.fixture
def begun(tmp_path: Path) -> tuple[RunConfig, RunConfig, Mapping[str, Any]]:
    """A run after 9 steps: its config, the same over other data, its cursor."""
    config, other = config_of(tmp_path), config_of(tmp_path, "one more document", path="other")
    for one in (config, other):
        prepare_missing_data(one, has_begun=False)
    return config, other, cursor_at(config, step=9)


def test_other_data_is_refused_with_the_three_choices_and_taken_by_two(begun: tuple[RunConfig, RunConfig, Mapping[str, Any]]) -> None:
    config, other, cursor = begun
    refuse_other_data(config, cursor=cursor, entries=(), on_data_change="refuse")
    assert not is_other_data(config, cursor=cursor)
    assert is_other_data(other, cursor=cursor)
    with pytest.raises(DataError, match="the data changed") as refused:
        refuse_other_data(other, cursor=cursor, entries=(), on_data_change="refuse")
    assert all(choice in refused.value.hint for choice in ("refuse", "map", "restart-source"))
    taken: tuple[OnDataChange, ...] = ("map", "restart-source")
    for choice in taken:
        refuse_other_data(other, cursor=cursor, entries=(), on_data_change=choice)


def with_reserve(data: DataSection) -> DataSection:
    return replace(data, reserve_fraction=0.05)


def with_other_weights(data: DataSection) -> DataSection:
    return replace(data, sources=tuple(replace(source, weight=weight) for source, weight in zip(data.sources, (3.0, 1.0), strict=True)))


@pytest.mark.parametrize(("change", "words"), [(with_reserve, "reserve_fraction"), (with_other_weights, "stages")])
def test_what_the_data_cannot_go_on_with_is_refused_too(
    begun: tuple[RunConfig, RunConfig, Mapping[str, Any]], change: Callable[[DataSection], DataSection], words: str
) -> None:
    config, _, cursor = begun
    with pytest.raises(DataError, match=words):
        refuse_other_data(replace(config, data=change(config.data)), cursor=cursor, entries=(), on_data_change="refuse")


def test_without_a_cursor_of_ours_or_its_blocklist_the_ranks_have_the_word(begun: tuple[RunConfig, RunConfig, Mapping[str, Any]]) -> None:
    _, other, cursor = begun
    elsewhere = {**cursor, "blocklist": {"count": 2, "head": ZERO_HASH}}
    for unknown in ({}, {"batches": 9}, elsewhere):
        refuse_other_data(other, cursor=unknown, entries=(), on_data_change="refuse")
