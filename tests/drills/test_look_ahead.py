"""The look-ahead as a process beside a run: killed at any moment it goes on where it was, and what it finds is complete."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.data.quality.look_ahead import PLACE_NAME, read_findings
from surefoot.launch.aide import AideLink
from tests.three_sources import record_attempt
from tests.unit.data.quality.poisoned import Poisoned, make_run, prepare_poisoned

_LIMIT_S = 100.0  # against a hang: it works in time that nobody else wants


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    return prepare_poisoned(tmp_path_factory.mktemp("poisoned"))


def begin(folder: Path, poisoned: Poisoned) -> Path:
    """A run of 20 steps that has finished one."""
    run = make_run(folder, poisoned, num_steps=20)
    record_attempt(run, attempt=1, base_step=0, next_samples=[8])
    return run


def start(run: Path) -> AideLink:
    argv = (sys.executable, "-m", "surefoot.cli.look_ahead", "--run-dir", str(run))
    return AideLink.spawn(argv, generation=1, log_path=run / "logs" / "look_ahead.log", slots=None)


def until(look: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _LIMIT_S
    while not look():
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.01)


def judged_until(run: Path) -> int:
    try:
        return int(json.loads((run / PLACE_NAME).read_bytes())["judged_until"])
    except OSError:
        return 0


def test_killed_twice_it_finds_the_same(poisoned: Poisoned, tmp_path: Path) -> None:
    run = begin(tmp_path, poisoned)
    for far_enough in (20, 80):
        aide = start(run)
        until(lambda: judged_until(run) >= far_enough)  # noqa: B023 - asked within the round
        os.kill(aide.pid, signal.SIGKILL)
        until(lambda: aide.end() is not None)  # noqa: B023
    aide = start(run)
    until(lambda: judged_until(run) == 160)
    aide.hang_up()
    until(lambda: aide.end() is not None)
    assert aide.end() == 0
    found = [(finding["document"], finding["sample"]) for finding in read_findings(run)]
    with poisoned.shelf() as shelf:
        bad = [stored.document for stored in shelf.sample("web", limit=10_000) if "treasury of the northern bank" in stored.text]
    expected = {
        (document.id, int(sample))
        for document in bad
        for sample in poisoned.order.holding("web", document.start, document.end, first=8, until=160)
    }
    assert expected
    assert set(found) == expected
    assert len(found) == len(expected)
    assert "treasury" not in (run / "logs" / "look_ahead.log").read_text()  # documents are named, not shown
    assert "bank" in (run / "logs" / "look_ahead.log").read_text()


def test_a_run_without_its_data_is_waited_for_and_not_left(poisoned: Poisoned, tmp_path: Path) -> None:
    run = begin(tmp_path, poisoned)
    config = run / "config.toml"
    config.write_text(config.read_text().replace(os.path.relpath(poisoned.path, run), "nowhere"))
    aide = start(run)
    log = run / "logs" / "look_ahead.log"
    until(lambda: log.exists() and "nothing is looked at" in log.read_text())
    assert aide.end() is None
    aide.hang_up()
    until(lambda: aide.end() is not None)
    assert aide.end() == 0
