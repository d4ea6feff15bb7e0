from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.core.errors import PeerLost
from surefoot.tensors.flight import Evidence, evidence_path, keep_evidence_at, last_collectives, leave_evidence
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
