"""Orders by the public commands to a run that trains on two ranks under its agent, one of which is killed in a pause."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.main import run
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.control import CONTROL_NAME
from surefoot.observe.ledger import manifest_positions, read_ledger, verify_ledger
from surefoot.observe.live import read_live
from tests.drills.live_job import CONFIG, LiveJob

# It saves when it is told to, and looks often whether it is.
_CONFIG = CONFIG.replace("interval_steps = 50", "interval_steps = 90000").replace("[observe]", "[observe]\nledger_look_s = 0.1")


def phases(job: LiveJob) -> set[str]:
    live = read_live(job.dir)
    return {rank.phase for rank in live.ranks} if live is not None else set()


def order(job: LiveJob, verb: str, *arguments: str, code: int = 0) -> Any:
    """From this process, which is none of the run's."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ended = run([verb, str(job.dir), "--json", *arguments])
    assert ended == code, said.getvalue()
    return json.loads(said.getvalue())


@pytest.mark.timeout(200)
def test_a_live_run_follows_its_operators_and_a_pause_outlives_its_ranks(tmp_path: Path) -> None:
    job = LiveJob(tmp_path, config=_CONFIG)
    try:
        job.until(lambda: job.step() > 5)
        saved = order(job, "save", "--reason", "a look")["checkpoint"]
        assert saved["rung"] in ("committed", "loadable")
        with (job.dir / CONTROL_NAME).open("ab") as control:
            control.write(b'{"torn')
        paused = order(job, "pause", "--reason", "coffee")
        assert paused["limit_s"] == 600
        at = job.step()
        job.until(lambda: phases(job) == {"stopped"})
        assert order(job, "save")["checkpoint"]["id"] == paused["checkpoint"]["id"]
        assert order(job, "resume", "--cause", "it was good")["released"]
        job.until(lambda: job.step() > at + 5)
        first = saved["step"] + 3
        back = order(job, "rollback", "--to", str(saved["step"] + 1), "--skip", f"{first}:{first + 2}", "--yes")
        assert (back["step"], back["checkpoint"]["id"]) == (saved["step"], saved["id"])
        (block,) = fold_blocks(read_ledger(job.dir / "ledger.jsonl")).blocks
        assert (block.samples, block.effective_sample) == ((4 * (first - 1), 4 * (first + 1)), 4 * saved["step"])
        job.until(lambda: job.entries("replay.verified"))
        order(job, "pause", "--reason", "again")
        live = read_live(job.dir)
        assert live is not None
        os.kill(live.ranks[1].pid, signal.SIGKILL)
        code, said = job.ended()
        assert code == 6, said
        assert "paused" in said
        job.process = job.start()  # who starts it again is told so
        assert job.ended()[0] == 6
        order(job, "stop", code=2)
        order(job, "resume")
        job.process = job.start()
        job.until(lambda: len(job.entries("attempt.started")) > 2 and job.step() > at)
        stopped = order(job, "stop", "--reason", "enough")
        code, said = job.ended()
        assert (code, stopped["checkpoint"]["step"]) == (6, stopped["step"])
        assert "enough" in said
    finally:
        job.kill()
    taken = [entry.fields["verb"] for entry in job.entries("order.taken")]
    assert taken == ["save", "pause", "save", "resume", "rollback", "pause", "stop"]
    assert len(job.entries("order.refused")) == 1  # the torn line
    assert {entry.by for entry in job.entries("order.taken")} == {"rank 0"}
    check = verify_ledger(job.dir / "ledger.jsonl", manifests=manifest_positions(job.dir))
    assert check.ok, check
