"""Faults through the public command, a live run looked into, and a run checked before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import rmtree
from typing import Any

from surefoot.observe.ledger import read_ledger
from surefoot.observe.live import read_live
from tests.drills.live_job import CONFIG, LiveJob, write_texts

_MARK = "SF_DRILL_COMMAND_TEST"
_LIMIT_S = 120.0  # against a hang


def surefoot(*arguments: str, mark: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot.cli.main", *arguments]
    environment = {**os.environ, **({_MARK: mark} if mark else {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=environment, cwd=cwd)


def marked(mark: str) -> list[str]:
    """Processes whose environment has the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["schema_version"] == 1
    return answer


def test_a_killed_rank_is_named_and_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    mark = str(tmp_path)
    done = surefoot("drill", "run", "kill-a-rank", "--seed", "3", "--json", "--keep", mark=mark)
    answer = answer_of(done)
    (result,) = answer["results"]
    assert [problem for problem in result["problems"] if "the bound is" not in problem] == []  # a machine may be busy
    assert done.returncode == (0 if result["ok"] else 1)
    assert (result["id"], result["grade"], result["action"], result["same_bits"]) == ("kill-a-rank", "process", "restart", True)
    assert result["culprit"]["ranks"] == [result["struck_rank"]]
    assert 0 < result["detected_s"] < 30
    assert result["samples_lost"] == 0
    assert result["recovery"]["training_again_s"] > 0
    folder = Path(answer["folder"])
    (ledger,) = folder.glob("2-ranks/0-kill-a-rank-0/ledger.jsonl")
    events = [entry.event for entry in read_ledger(ledger)]
    assert events.index("drill.injected") < events.index("rank.lost") < events.index("drill.ended")
    status = answer_of(surefoot("status", str(ledger.parent), "--json"))
    assert list(status["last_exercised"] or []) == ["kill-a-rank"] * result["ok"]
    rmtree(folder)
    assert marked(mark) == []


def test_a_live_run_shows_its_stacks_and_memory_and_one_that_is_gone_refuses(tmp_path: Path) -> None:
    job = LiveJob(tmp_path)
    try:
        job.until(lambda: job.step() > 3)
        live = read_live(job.dir)
        assert live is not None
        shown = answer_of(surefoot("inspect", str(job.dir), "--stacks", "--json"))
        assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
        assert shown["silent"] == []
        for rank in shown["ranks"]:
            assert "train_here" in [frame["function"] for frame in rank["threads"][-1]["frames"]]
        held = answer_of(surefoot("inspect", str(job.dir), "--memory", "--json"))
        assert {process["role"] for process in held["processes"]} == {"rank", "agent", "aide"}
        assert all(process["rss_bytes"] > 0 for process in held["processes"] if process["role"] == "rank")
        refused = surefoot("inspect", str(job.dir), "--stacks", "--rank", "7")
        assert refused.returncode == 2
        assert "there is no rank 7" in refused.stderr
    finally:
        job.kill()
    gone = surefoot("inspect", str(job.dir), "--stacks", "--json")
    assert gone.returncode == 2
    assert "not live" in json.loads(gone.stdout)["error"]["what"]


def test_a_check_says_go_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    nothing = surefoot("train", "run.toml", "--check", "--json", cwd=tmp_path)
    assert nothing.returncode == 1
    assert answer_of(nothing)["go"] is False
    write_texts(tmp_path / "text")
    before = sorted(path.name for path in tmp_path.iterdir())
    done = surefoot("train", "run.toml", "--check", "--json", cwd=tmp_path)
    answer = answer_of(done)
    assert answer["reasons"] == []
    assert (done.returncode, answer["go"]) == (0, True)
    assert set(answer["peak_host_bytes"]) == {"0", "1"}
    assert answer["step_s"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
