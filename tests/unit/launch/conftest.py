"""A real nursery, and the ranks that it forks, seen from the agent's side."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.launch.nursery_link import NurseryLink
from surefoot.launch.wire import RankExit, RankSpec, Ready, Start, Started

_LIMIT_S = 60.0


class NurseryUnderTest:
    def __init__(self, folder: Path, *, warm: tuple[str, ...]) -> None:
        self.folder = folder
        self.log_path = folder / "nursery.log"
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))
        self.link = NurseryLink.spawn(entry="nursery_entries:main", warm=warm, log_path=self.log_path, env={"PYTHONPATH": path})

    def close(self) -> int | None:
        return self.link.close(limit_s=_LIMIT_S, look=lambda: None)

    def hear(self) -> Any:
        """The next message; None when the nursery is gone."""
        return self.hear_with_fds()[0]

    def hear_with_fds(self) -> tuple[Any, list[int]]:
        poller = select.poll()
        poller.register(self.link, select.POLLIN)
        assert poller.poll(_LIMIT_S * 1000), "the nursery says nothing"
        return self.link.receive()

    def start(self, *kinds: str, fds: tuple[int, ...] = (), names: dict[int, dict[str, int]] | None = None) -> Started:
        """Fork one rank per kind; the exits are heard after it."""
        specs = tuple(
            RankSpec(rank, {"KIND": kind}, str(self.out(rank)), str(self.err(rank)), (names or {}).get(rank, {}))
            for rank, kind in enumerate(kinds)
        )
        self.link.start_ranks(Start(generation=7, ranks=specs), fds=fds)
        started, pidfds = self.hear_with_fds()
        for pidfd in pidfds:
            os.close(pidfd)
        assert isinstance(started, Started), self.log_path.read_text()
        assert len(pidfds) == len(kinds)
        return started

    def exits(self, num_ranks: int) -> dict[int, RankExit]:
        found = {}
        for _ in range(num_ranks):
            ended = self.hear()
            assert isinstance(ended, RankExit), self.log_path.read_text()
            found[ended.rank] = ended
        return found

    def out(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.log"

    def err(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.err"


@pytest.fixture
def open_nursery(tmp_path: Path) -> Iterator[Callable[..., NurseryUnderTest]]:
    """open_nursery(*warm): a nursery that was just started."""
    opened: list[NurseryUnderTest] = []

    def start(*warm: str) -> NurseryUnderTest:
        opened.append(NurseryUnderTest(tmp_path, warm=warm))
        return opened[-1]

    yield start
    for nursery in opened:
        nursery.close()


@pytest.fixture
def nursery(open_nursery: Callable[..., NurseryUnderTest]) -> NurseryUnderTest:
    """A nursery that is ready."""
    found = open_nursery()
    assert isinstance(found.hear(), Ready)
    return found
