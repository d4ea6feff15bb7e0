"""The agent's pulse: live.json and the lock when they are due, never a reason to stop unless the run is somebody else's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.coordinate.beats import BeatBoard
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import ManualClock
from surefoot.core.errors import PeerLost
from surefoot.core.records import Phase
from surefoot.launch.crew import Crew
from surefoot.launch.status import Pulse
from surefoot.observe.live import read_live, read_lock

COUNTS = {"generation": 4, "attempt": 2, "step": 30, "num_restarts": 3}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(now_s=100.0)


@pytest.fixture
def lock(tmp_path: Path, clock: ManualClock) -> RunLock:
    return RunLock.acquire(tmp_path, job="j", clock=clock, lease_s=30.0)


@pytest.fixture
def pulse(tmp_path: Path, lock: RunLock, clock: ManualClock) -> Pulse:
    return Pulse(tmp_path, lock=lock, status_interval_s=1.0, lease_s=30.0, clock=clock)


@pytest.fixture
def crew(clock: ManualClock) -> Iterator[Crew]:
    life_fd, ranks_life_fd = os.pipe()
    crew = Crew(BeatBoard.create(2, generation=4, clock=clock), life_fd=life_fd, clock=clock)
    yield crew
    crew.close()
    os.close(ranks_life_fd)


def test_status_when_due(tmp_path: Path, pulse: Pulse, crew: Crew, clock: ManualClock) -> None:
    crew.board.slot(1).beat(phase=Phase.SAVE, step=31)
    clock.sleep(0.5)
    pulse.beat(crew, **COUNTS)
    live = read_live(tmp_path)
    assert live is not None
    assert (live.generation, live.attempt, live.step, live.num_restarts) == (4, 2, 31, 3)
    assert [(rank.rank, rank.phase, rank.age_s) for rank in live.ranks] == [(1, "save", 0.5)]
    crew.board.slot(1).beat(phase=Phase.STEP, step=32)
    pulse.beat(crew, **COUNTS)
    assert read_live(tmp_path) == live
    clock.sleep(1.0)
    pulse.beat(crew, **COUNTS)
    assert read_live(tmp_path) != live


def test_without_ranks_the_last_known_step_stands(tmp_path: Path, pulse: Pulse) -> None:
    pulse.beat(None, **COUNTS)
    live = read_live(tmp_path)
    assert live is not None
    assert (live.phase, live.step, live.ranks) == ("start", 30, ())


def test_lock_is_renewed_three_times_per_lease(tmp_path: Path, pulse: Pulse, clock: ManualClock) -> None:
    pulse.beat(None, **COUNTS)
    first = read_lock(tmp_path)
    assert first is not None
    assert first.generation == 4
    clock.sleep(9.9)
    pulse.beat(None, **COUNTS)
    assert read_lock(tmp_path) == first
    clock.sleep(0.1)
    pulse.beat(None, **COUNTS)
    assert read_lock(tmp_path) != first


def test_a_lock_of_somebody_else_ends_it(tmp_path: Path, pulse: Pulse, clock: ManualClock) -> None:
    (tmp_path / "lock").unlink()
    RunLock.acquire(tmp_path, job="other", clock=clock, lease_s=30.0)
    with pytest.raises(PeerLost, match="no longer ours"):
        pulse.beat(None, **COUNTS)


def test_a_full_disk_is_said_once_and_stops_nothing(
    tmp_path: Path, pulse: Pulse, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "live.json").mkdir()  # as good as a full disk: it cannot be replaced
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            pulse.beat(None, **COUNTS)
            clock.sleep(0.5)
    assert caplog.text.count("cannot renew live.json") == 1
