"""The dead-man's timer by its public command, beside a real run: what it pages when agent and ranks are killed, stopped or not needed."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.deadman import main as deadman
from surefoot.cli.ledgering import tell
from surefoot.cli.main import run
from surefoot.core.events import Event
from surefoot.observe.live import read_live
from tests.drills.live_job import CONFIG, LIMIT_S, LiveJob
from tests.receivers import HttpReceiver, http_receiver

SILENT_S = 1.5
_ALERTS = """
[alerts]
webhook = "env:DRILL_HOOK"
timeout_s = 1.0
"""
_CONFIG = CONFIG.replace('name = "run"', 'name = "watched"').replace("[observe]", "[observe]\nledger_look_s = 0.1") + _ALERTS
_KINDS = ("run-silent", "telemetry-silent", "run-back")


class Watch:
    """Looks from outside, as cron would."""

    def __init__(self, job: LiveJob, receiver: HttpReceiver) -> None:
        self.job, self._receiver = job, receiver

    def look(self, *, silent_s: float = SILENT_S) -> int:
        """What the command does, without the start of its interpreter."""
        return deadman([str(self.job.dir), "--silent-s", str(silent_s)])

    def command(self) -> int:
        line = [sys.executable, "-m", "surefoot.cli.deadman", str(self.job.dir), "--silent-s", str(SILENT_S)]
        return subprocess.run(line, capture_output=True, timeout=LIMIT_S, check=False).returncode

    def until_code(self, code: int) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while self.look() != code:
            assert time.monotonic() < give_up_s, self.pages
            time.sleep(0.05)

    @property
    def pages(self) -> list[str]:
        """Kinds of its own: the alerter of the run tells others to the same receiver."""
        return [message["kind"] for message in self.received if message["kind"] in _KINDS]

    @property
    def received(self) -> list[dict[str, Any]]:
        return self._receiver.messages


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    with http_receiver() as receiver:
        monkeypatch.setenv("DRILL_HOOK", receiver.address)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        job = LiveJob(tmp_path, config=_CONFIG)
        try:
            job.until(lambda: job.step() > 5)
            yield Watch(job, receiver)
        finally:
            job.process.send_signal(signal.SIGCONT)
            job.kill()


def kill_all(job: LiveJob) -> None:
    """SIGKILL to the agent, then to whichever ranks its death has not ended yet."""
    live = read_live(job.dir)
    assert live is not None
    job.kill()
    for rank in live.ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)


def order(job: LiveJob, verb: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert run([verb, str(job.dir), "--json", "--cause" if verb == "resume" else "--reason", "a drill"]) == 0


@pytest.mark.timeout(120)
def test_silence_is_paged_once_its_end_is_told_and_a_person_s_turn_is_no_silence(watch: Watch) -> None:
    job = watch.job
    job.process.send_signal(signal.SIGSTOP)  # its ranks go on, and nobody renews live.json
    watch.until_code(1)
    assert (watch.look(), watch.pages) == (1, ["telemetry-silent"])
    job.process.send_signal(signal.SIGCONT)
    watch.until_code(0)
    assert watch.pages == ["telemetry-silent", "run-back"]

    kill_all(job)
    assert (watch.look(silent_s=60.0), len(watch.pages)) == (0, 2)  # not before its time
    time.sleep(SILENT_S)
    assert (watch.command(), watch.pages[2:]) == (1, ["run-silent"])
    assert (watch.command(), watch.pages[2:]) == (1, ["run-silent"])
    (page,) = [message for message in watch.received if message["kind"] == "run-silent"]
    assert (page["severity"], page["run"], page["command"]) == ("page", "watched", f"surefoot status {job.dir}")
    assert "not held by a live process" in page["what"]
    job.process = job.start()
    watch.until_code(0)
    assert watch.pages[2:] == ["run-silent", "run-back"]

    job.until(lambda: len(job.entries("attempt.started")) > 1)
    order(job, "pause")
    assert watch.look(silent_s=0.0) == 0
    order(job, "resume")
    order(job, "stop")
    assert job.ended()[0] == 6
    assert watch.look(silent_s=0.0) == 0
    tell(job.dir, Event.ORDER_TAKEN, by="drill", fields={"verb": "save"})  # the stop is no longer the last word
    assert watch.look(silent_s=0.0) == 1
    assert watch.pages[4:] == ["run-silent"]
    for event, fields in ((Event.RESTART_DECIDED, {"kind": "stop", "exit_code": 7}), (Event.RUN_FINISHED, {})):
        tell(job.dir, event, by="drill", fields=fields)
        assert watch.look(silent_s=0.0) == 0
    assert watch.pages[4:] == ["run-silent", "run-back"]
