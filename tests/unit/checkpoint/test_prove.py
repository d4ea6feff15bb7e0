"""A load by clean processes: what it finds, what it does not claim to know, and what its processes are given."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.checkpoint.clean import clean_environment, run_clean
from surefoot.checkpoint.prove import Proof, other_world_size, prove
from surefoot.core.errors import SurefootError
from surefoot.core.events import Event
from surefoot.core.records import Problem, Rung

LIMIT_S = 100.0
FROZEN = Path(__file__).parents[2] / "fixtures" / "checkpoint_v1" / "s4-a1"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FROZEN, tmp_path / FROZEN.name))


def test_a_clean_process_loads_it(copied: Path) -> None:
    proof = prove(copied, limit_s=LIMIT_S)
    assert (proof.ok, proof.problems, proof.rung, proof.checkpoint) == (True, (), Rung.LOADABLE, "s4-a1")
    assert (proof.world_size, proof.saved_world_size, proof.num_tensors, proof.host) == (1, 2, 46, os.uname().nodename)
    assert proof.wall_s > 0


def test_another_number_of_ranks_proves_it(copied: Path) -> None:
    proof = prove(copied, num_ranks=3, dim=1, limit_s=LIMIT_S)
    assert (proof.ok, proof.rung) == (True, Rung.PROVEN)
    event, fields = proof.event()
    assert (event, fields["world_size"], fields["dim"], fields["id"]) == (Event.CHECKPOINT_PROVEN, 3, 1, "s4-a1")


def test_a_small_budget_only_makes_more_portions(copied: Path) -> None:
    assert prove(copied, budget_bytes=2000, limit_s=LIMIT_S).ok


def test_a_flipped_bit_is_named(copied: Path) -> None:
    file = copied / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[70_000] ^= 1
    file.write_bytes(content)
    proof = prove(copied, limit_s=LIMIT_S)
    assert (proof.ok, proof.rung) == (False, None)
    assert {problem.file for problem in proof.problems} == {"__1_0.distcp"}
    event, fields = proof.event()
    assert event is Event.CHECKPOINT_DAMAGED
    assert fields["problems"] == list(proof.problems)


def test_another_checkpoint_than_the_ledger_says_is_no_proof(copied: Path) -> None:
    (problem,) = prove(copied, expected_state_digest="sf1:other", limit_s=LIMIT_S).problems
    assert "the ledger says sf1:other" in problem.detail


def test_a_checkpoint_under_another_id_is_no_proof(copied: Path) -> None:
    proof = prove(copied.rename(copied.with_name("s6-a1")), limit_s=LIMIT_S)
    assert (proof.checkpoint, [problem.detail for problem in proof.problems]) == ("s6-a1", ["it is that of s4-a1"])


def test_what_is_not_there_cannot_be_proven(tmp_path: Path) -> None:
    proof = prove(tmp_path / "s9-a1", limit_s=LIMIT_S)
    assert [(problem.kind, problem.file) for problem in proof.problems] == [("missing-file", "manifest.json")]


def test_time_that_is_up_is_no_verdict(copied: Path) -> None:
    with pytest.raises(SurefootError, match=r"not done within 0\.01 s"):
        prove(copied, limit_s=0.01)


def test_a_process_that_dies_is_no_verdict() -> None:
    with pytest.raises(SurefootError, match=r"clean process 0 of 1 ended with exit code 1: .*surefoot\.absent"):
        run_clean("surefoot.absent", {}, limit_s=LIMIT_S)


def test_clean_processes_know_nothing_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SUREFOOT_RUN_DIR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    environment: Mapping[str, str] = clean_environment()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "SUREFOOT_RUN_DIR", "TORCHELASTIC_RUN_ID"} & environment.keys()
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("", "1")


def test_proofs_take_other_numbers_of_ranks_in_turn() -> None:
    assert [other_world_size(2, turn=turn) for turn in range(4)] == [3, 4, 3, 4]
    assert [other_world_size(1000, turn=turn) for turn in range(3)] == [2, 3, 4]


def test_the_rung_of_a_proof() -> None:
    proof = Proof("s4-a1", "d", 2, 2, 0, True, (), 1, 1, 0.1, "h")
    assert proof.rung is Rung.LOADABLE
    assert replace(proof, world_size=3).rung is Rung.PROVEN
    assert replace(proof, ok=False, problems=(Problem("hole"),)).rung is None
    assert proof.event() == (Event.CHECKPOINT_LOADED, {"id": "s4-a1", "host": "h", "wall_s": 0.1, "world_size": 2})


def test_a_job_may_be_larger_than_an_argument(copied: Path) -> None:
    job = {"path": str(copied), "dim": 0, "expected": None, "budget_bytes": 1 << 20, "more": "x" * 200_000}
    assert run_clean("surefoot.checkpoint.prove_rank", job, limit_s=LIMIT_S) == []
