"""Work in other processes: in order, failing aloud, ending with their parent. What they do is importable from the library."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from surefoot.core.errors import DataError
from surefoot.data.crew import Crew, WorkerLost
from surefoot.data.manifest import load_manifest

# Prints the pids of its workers, then waits to be killed while one of them works.
PARENT = """
import os, time
from surefoot.data.crew import Crew

with Crew(2) as crew:
    pids = [pid for _, pid in crew.map(eval, ["__import__('time').sleep(0.2) or __import__('os').getpid()"] * 2)]
    print(*pids, flush=True)
    list(crew.map(time.sleep, [60] * 2))
"""


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as crew:
        yield crew


@pytest.mark.parametrize("size", [1, 2])
def test_results_come_in_the_order_of_the_items(size: int, crew: Crew) -> None:
    items = [bytes([number % 251]) * (1 + number * 40_503 % 200_000) for number in range(60)]
    with Crew(1) as alone:
        found = list((crew if size == 2 else alone).map(len, items))
    assert found == [(item, len(item)) for item in items]


def test_one_crew_does_several_things(crew: Crew) -> None:
    assert [result for _, result in crew.map(itemgetter(1), [(1, 2), (3, 4)])] == [2, 4]
    assert [result for _, result in crew.map(str.upper, ["a", "b", "c"])] == ["A", "B", "C"]
    assert list(crew.map(len, [])) == []


def test_items_are_drawn_only_a_little_ahead() -> None:
    drawn = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield number

    with Crew(2) as crew:
        results = crew.map(str, items())
        assert next(results) == (0, "0")
        assert drawn <= 6


def test_an_error_of_the_library_comes_back_as_itself_and_a_defect_with_its_trace(tmp_path: Path) -> None:
    with Crew(2) as crew, pytest.raises(DataError, match="no prepared data here") as caught:
        list(crew.map(load_manifest, [str(tmp_path)] * 2))
    assert caught.value.where == str(tmp_path)
    with Crew(2) as crew, pytest.raises(RuntimeError, match="ValueError"):
        list(crew.map(int, ["3", "x", "5"]))


def test_a_worker_that_is_killed_is_named() -> None:
    with Crew(2) as crew, pytest.raises(WorkerLost, match="ended by SIGKILL") as caught:
        list(crew.map(eval, ["1", f"__import__('os').kill(__import__('os').getpid(), {signal.SIGKILL:d})"]))
    assert "goes on from what is finished" in caught.value.hint


def test_workers_end_with_the_process_that_started_them() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(set(pids)) == 2
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.kill()
    deadline_s = time.monotonic() + 10
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "a worker outlived its parent"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_workers_use_one_thread_each(crew: Crew) -> None:
    assert [value for _, value in crew.map(os.getenv, ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"])] == ["false", "1"]


def test_items_larger_than_a_pipe_go_both_ways_at_once(crew: Crew) -> None:
    items = [bytes([number]) * 3_000_000 for number in range(8)]
    assert all(item == back for item, back in crew.map(bytes, items))
