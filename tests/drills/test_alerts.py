"""Alerts of a real run: a killed rank is told once with what was done about it, and a receiver that is down stops nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from surefoot.observe.ledger import verify_ledger
from surefoot.observe.live import read_live
from tests.drills.live_job import CONFIG, LIMIT_S, LiveJob
from tests.receivers import HttpReceiver

_ALERTS = """
[alerts]
webhook = "env:DRILL_HOOK"
group_s = 0.5
repeat_s = 0.5
timeout_s = 1.0
"""


def kill_rank(job: LiveJob, rank: int, *, generation: int) -> None:
    """SIGKILL, once that generation has trained."""

    def is_training() -> bool:
        live = read_live(job.dir)
        return live is not None and live.generation == generation and len(live.ranks) == 2 and live.step > 0

    job.until(is_training)
    live = read_live(job.dir)
    assert live is not None
    os.kill(live.ranks[rank].pid, signal.SIGKILL)


@pytest.mark.timeout(120)
def test_a_killed_rank_is_told_once_and_a_receiver_that_is_down_stops_nothing(tmp_path: Path) -> None:
    receiver = HttpReceiver()
    job = LiveJob(
        tmp_path,
        config=CONFIG.replace('name = "run"', 'name = "alerted"') + _ALERTS,
        environment={"DRILL_HOOK": receiver.address, "no_proxy": "127.0.0.1"},
    )
    try:
        kill_rank(job, 1, generation=1)
        job.until(lambda: job.entries("alert.sent"))
        (alert,) = receiver.messages
        assert (alert["kind"], alert["severity"], alert["run"], alert["ranks"], alert["count"]) == ("rank-lost", "warn", "alerted", [1], 1)
        assert "SIGKILL" in alert["what"]
        assert alert["where"].startswith("rank 1, step ")
        assert alert["action"].startswith("restart: ")
        assert alert["command"] == f"surefoot status {job.dir}"
        assert alert["runbook"] == "runbook entry: rank-lost"

        receiver.close()
        kill_rank(job, 0, generation=2)
        job.until(lambda: job.entries("alert.failed"))
        job.until(lambda: len(job.entries("generation.started")) == 3)  # nobody was told, and the run goes on
        receiver = HttpReceiver(receiver.port)
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(LIMIT_S)
        assert [message["kind"] for message in receiver.messages] == ["rank-lost", "run-left"]
        assert receiver.messages[0]["ranks"] == [0]
        assert len(job.entries("alert.failed")) == 1
        assert "hook-with-a-secret" not in (job.dir / "ledger.jsonl").read_text() + (job.dir / "logs" / "alerter.log").read_text()
        assert verify_ledger(job.dir / "ledger.jsonl").ok
    finally:
        job.kill()
        receiver.close()
