"""The error that ends the agent: in the worker's words where it meant to stop, else in the policy's with the last words on stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.errors import Corrupt, SurefootError, error_for_exit_code
from surefoot.core.records import Grade, Instruction
from surefoot.launch.ending import Ending
from surefoot.launch.evidence import complaints, incident_path, last_words, stop_error, where_to_look
from surefoot.launch.logs import nursery_log, open_generation, rank_paths
from surefoot.launch.wire import RankExit


def stop(code: int) -> Instruction:
    return Instruction("stop", "the policy says so", Grade.DETERMINISTIC, exit_code=code)


def failed(code: int) -> Ending:
    return Ending("failed", "a rank left", what="rank", culprit=RankExit(1, 1, 100, code, None, 0.0))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    open_generation(tmp_path, 1, keep=20)
    return tmp_path


def complain(run_dir: Path, code: str, rank: int = 1) -> None:
    text = json.dumps({"error": {"code": code, "what": "shard 3 is short", "where": "data/3", "hint": "prepare it again"}})
    rank_paths(run_dir, 1, rank)[2].write_text(text)


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 7, 93])
def test_the_workers_words(run_dir: Path, code: int) -> None:
    complain(run_dir, "x")
    error = stop_error(run_dir, 1, failed(code), stop(code))
    assert type(error) is error_for_exit_code(code)
    assert error.exit_code == code
    assert (error.what, error.where, error.hint) == ("shard 3 is short", "data/3", "prepare it again")


def test_the_finer_kind_comes_back(run_dir: Path) -> None:
    complain(run_dir, "checkpoint-corrupt")
    assert type(stop_error(run_dir, 1, failed(5), stop(5))) is Corrupt


def test_the_policys_words_with_the_last_of_the_rank(run_dir: Path) -> None:
    rank_paths(run_dir, 1, 1)[1].write_text("Traceback\n  line\nValueError: broken\n\n")
    complain(run_dir, "failed")
    error = stop_error(run_dir, 1, failed(1), stop(93))
    assert error.exit_code == 93
    assert error.what == "the policy says so; last words: ValueError: broken"
    assert error.hint == f"evidence: {run_dir}/logs/g1"  # no incident was written for this ending


def test_the_evidence_of_this_very_ending(run_dir: Path) -> None:
    incident_path(run_dir, 1).parent.mkdir()
    incident_path(run_dir, 1).write_text("of another ending")
    nursery = Ending("failed", "the nursery was not ready", what="nursery")
    assert where_to_look(run_dir, 1, nursery) == nursery_log(run_dir)
    assert where_to_look(run_dir, 1, failed(1)) == run_dir / "logs" / "g1"
    evidence = incident_path(run_dir, 1)
    assert where_to_look(run_dir, 1, replace(failed(1), evidence=evidence)) == evidence


def test_a_rank_without_any_words(run_dir: Path) -> None:
    error = stop_error(run_dir, 1, failed(4), stop(4))
    assert (error.what, error.where) == ("the policy says so", "rank 1, generation 1")


def test_a_killed_rank_had_no_last_words(run_dir: Path) -> None:
    rank_paths(run_dir, 1, 1)[1].write_text("a warning of some library\n")
    killed = Ending("failed", "a rank was killed", what="rank", culprit=RankExit(1, 1, 100, None, 9, 0.0))
    assert stop_error(run_dir, 1, killed, stop(1)).what == "the policy says so"


def test_the_nurserys_words(run_dir: Path) -> None:
    nursery_log(run_dir).write_text("MemoryError\n")
    error = stop_error(run_dir, 1, Ending("failed", "the nursery died", what="nursery", nursery_code=1), stop(1))
    assert type(error) is SurefootError
    assert "MemoryError" in error.what


@pytest.mark.parametrize("code", [-9, None])
def test_a_killed_nursery_had_no_last_words(run_dir: Path, code: int | None) -> None:
    nursery_log(run_dir).write_text("a warning of some library\n")
    ending = Ending("failed", "the nursery was killed", what="nursery", nursery_code=code)
    assert stop_error(run_dir, 1, ending, stop(1)).what == "the policy says so"


def test_a_damaged_complaint_is_still_one(run_dir: Path) -> None:
    complain(run_dir, "data", rank=0)
    rank_paths(run_dir, 1, 1)[2].write_text("{half")
    assert complaints(run_dir, 1)[0]["what"] == "shard 3 is short"
    assert complaints(run_dir, 1)[1] == {"what": "{half"}


def test_no_complaint(run_dir: Path) -> None:
    assert complaints(run_dir, 1) == {}
    assert last_words(run_dir / "none") is None
