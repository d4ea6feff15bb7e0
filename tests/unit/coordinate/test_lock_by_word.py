"""The lock passes to another node on the coordinator's word, without two leases of waiting; never backwards, never across jobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import SystemClock
from surefoot.core.errors import PeerLost
from surefoot.core.holder import this_process

CLOCK = SystemClock()
WORD = "node a is dead and has fenced itself"


def elsewhere(folder: Path, *, generation: int = 3) -> RunLock:
    holder = replace(this_process(), host="elsewhere", boot_id="another")
    return RunLock.acquire(folder, job="j", clock=CLOCK, lease_s=600.0, generation=generation, holder=holder)


def take(folder: Path, *, generation: int, job: str = "j") -> RunLock:
    return RunLock.take_over(folder, job=job, generation=generation, reason=WORD, clock=CLOCK, lease_s=30.0)


def test_the_lock_of_a_dead_node_is_taken_at_once_and_its_holder_finds_it_gone(tmp_path: Path) -> None:
    former = elsewhere(tmp_path)
    lock = take(tmp_path, generation=4)
    assert lock.taken_over is not None
    assert (lock.taken_over.reason, lock.taken_over.former["generation"]) == (WORD, 3)
    with pytest.raises(PeerLost, match="no longer ours"):
        former.renew(generation=5)
    lock.renew(generation=5)


def test_a_node_of_the_past_takes_nothing(tmp_path: Path) -> None:
    elsewhere(tmp_path, generation=4)
    with pytest.raises(PeerLost, match="generation 4"):
        take(tmp_path, generation=4)


def test_the_lock_of_another_job_is_not_for_this_coordinator_to_give(tmp_path: Path) -> None:
    elsewhere(tmp_path)
    with pytest.raises(PeerLost, match="job j"):
        take(tmp_path, generation=9, job="other")


def test_a_lock_that_was_given_back_is_nobody_s(tmp_path: Path) -> None:
    elsewhere(tmp_path).release()
    assert take(tmp_path, generation=4).taken_over is None
