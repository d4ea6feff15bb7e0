from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.core.errors import PeerLost
from surefoot.tensors.flight import Evidence, evidence_path, keep_evidence_at, last_collectives, leave_evidence, states_of
from surefoot.tensors.world import told_apart

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture(autouse=True)
def _no_place() -> Iterator[None]:
    Evidence.path = None
    yield
    Evidence.path = None


def test_without_a_place_nothing_is_written() -> None:
    assert leave_evidence("a sum", LOST) is None
    error = told_apart("a sum", LOST)
    assert isinstance(error, PeerLost)
    assert error.hint == "another rank went away; the agent names it and restarts"


def test_the_loss_of_a_peer_is_written_down_and_the_error_names_the_file(tmp_path: Path) -> None:
    path = evidence_path(tmp_path, generation=2, rank=1)
    keep_evidence_at(path)
    error = told_apart("a sum", LOST)
    assert isinstance(error, PeerLost)
    assert error.hint.endswith(str(path))
    told = json.loads(path.read_text())
    assert told["what"] == "a sum"
    assert "Connection closed by peer" in told["error"]
    assert told["collectives"] == last_collectives()


def test_our_own_errors_are_no_evidence(tmp_path: Path) -> None:
    keep_evidence_at(tmp_path / "evidence.json")
    own = RuntimeError("shapes differ")
    assert told_apart("a sum", own) is own
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_it_is_a_warning_and_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("no folder")
    keep_evidence_at(evidence_path(tmp_path, generation=1, rank=0))
    assert isinstance(told_apart("a sum", LOST), PeerLost)
    assert "could not be written" in caplog.text


def entry(seq: int, *, is_p2p: bool = False, retired: bool = True, group: str = "surefoot:loop") -> dict[str, object]:
    """As torch 2.13 writes one; the number of the other series stands beside it."""
    return {
        "process_group": ["1", group],
        "is_p2p": is_p2p,
        "collective_seq_id": 90 if is_p2p else seq,
        "p2p_seq_id": seq if is_p2p else 90,
        "profiling_name": f"nccl:{'send' if is_p2p else 'all_reduce'} {seq}",
        "input_sizes": [[seq]],
        "output_sizes": [[seq]],
        "input_dtypes": ["Float"],
        "time_created_ns": seq,
        "timeout_ms": 1000,
        "retired": retired,
        "state": "scheduled",
    }


def test_collectives_and_sends_of_a_group_count_apart() -> None:
    told = states_of([entry(7), entry(1, is_p2p=True), entry(8, retired=False), entry(2, is_p2p=True), entry(3, group="surefoot:save")])
    assert [(state["name"], state["is_p2p"], state["last_enqueued"], state["last_completed"]) for state in told] == [
        ("surefoot:loop", False, 8, 7),
        ("surefoot:loop", True, 2, 2),
        ("surefoot:save", False, 3, 3),
    ]
    assert (told[0]["operation"], told[0]["shapes"]) == ("nccl:all_reduce 8", [[8]])
