"""A plan's file trains, says what was planned, and the run that was killed on the way is planned again from what it measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.observe.live import read_live
from surefoot.plan.promise import NOT_VALIDATED
from tests.texts import prepare_documents

LIMIT_S = 90.0  # against a hang
SHORT = (
    "train.num_steps=200",
    "observe.status_interval_s=0.1",
    "checkpoint.interval_steps=20",
    "checkpoint.replay_steps=0",
    "train.eval_interval_steps=0",
)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "surefoot.cli.main", *map(str, arguments)]


def surefoot(*arguments: str | Path) -> str:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def kill_a_rank(run_dir: Path) -> None:
    """Once it has saved."""
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        live = read_live(run_dir)
        if live is not None and live.ranks and min(rank.step for rank in live.ranks) >= 8:
            os.kill(live.ranks[0].pid, signal.SIGKILL)
            return
        time.sleep(0.01)
    pytest.fail("no step was seen")


@pytest.mark.campaign
def test_the_plan_of_a_small_budget_trains_and_is_planned_again(tmp_path: Path) -> None:
    prepared = prepare_documents(tmp_path)
    file = tmp_path / "small.toml"
    asked = ("--gpus", "2", "--accelerator", "cpu", "--flops", "1e12", "--seq-len", "64", "--data", prepared)
    planned = json.loads(surefoot("plan", *asked, "--out", file, "--json"))
    training = subprocess.Popen(command("train", file, *SHORT), stdout=subprocess.PIPE, text=True)
    run_dir = tmp_path / "runs" / "small"
    kill_a_rank(run_dir)
    told, _ = training.communicate(timeout=LIMIT_S)
    assert training.returncode == 0, told
    assert NOT_VALIDATED in told
    assert f"{planned['layout']['step_s']:.3g} s a step" in told

    again = json.loads(surefoot("plan", "--from", run_dir, "--json"))
    measured = again["measured"]
    assert measured["step"] == 200
    assert measured["num_failures"] == 1
    assert measured["restart_s"] > 0
    assert 0 <= measured["lost_steps"] <= 40
    assert measured["planned"]["law"] == "epoch"
    assert again["choice"]["num_parameters"] == planned["choice"]["num_parameters"]
    assert measured["failures_per_node_day"] > planned["reliability"]["failures"]["per_node_day"]
    assert again["remaining"]["steps"] == 0
