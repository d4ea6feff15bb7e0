"""A sweep that is killed and goes on: nothing finished is trained again, what fails is named, branches begin where they should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from surefoot.core.events import Event
from surefoot.observe.ledger import read_ledger
from surefoot.observe.metrics import read_steps
from tests.texts import prepare_documents

BASE = """
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 32
[model]
num_layers = 1
d_model = 16
num_heads = 2
[train]
global_batch_size = 8
micro_batch_size = 8
[schedule]
warmup_steps = 5
"""
LIMIT_S = 60.0  # against a hang


def surefoot(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "surefoot.cli.main", *map(str, arguments)]


def num_starts(run_dir: Path) -> int:
    return sum(entry.event == Event.ATTEMPT_STARTED for entry in read_ledger(run_dir / "ledger.jsonl"))


def test_a_sweep_that_is_killed_goes_on_and_leaves_out_what_fails(tmp_path: Path) -> None:
    prepare_documents(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    out = tmp_path / "sweep"
    wanted = ("--budgets", "2e9,3e9", "--law", "ratio:20", "--sizes", "2", "--span", "3", "--max-flops", "1e10", "--json")
    planned = json.loads(surefoot("sweep", "plan", tmp_path / "base.toml", *wanted, "--out", out).stdout)["runs"]
    branch = next(one for one in planned if one["parent"])
    parent = next(one for one in planned if one["name"] == branch["parent"])
    broken = next(one for one in planned if not one["parent"] and one is not parent)
    (out / "configs" / f"{broken['name']}.toml").write_text("[train]\nnum_steps = 0\n")

    killed = subprocess.Popen(command("sweep", "run", out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ledger = out / "runs" / parent["name"] / "ledger.jsonl"
    give_up_s = time.monotonic() + LIMIT_S
    while not (ledger.exists() and num_starts(ledger.parent)) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()

    resumed = surefoot("sweep", "run", out)
    assert resumed.returncode == 1, resumed.stdout + resumed.stderr  # one run is left out
    assert f"left out: {broken['name']}: exit 2" in resumed.stdout
    branched = read_steps(out / "runs" / branch["name"]).to_pylist()
    assert [row["step"] for row in branched] == list(range(branch["branch_step"] + 1, branch["num_steps"] + 1))
    assert branched[-1]["next_sample"] == 8 * branch["num_steps"]
    assert branched[-1]["lr"] < 0.2 * branched[0]["lr"]
    assert branched[-1]["val_loss"] is not None
    starts = num_starts(ledger.parent)
    again = surefoot("sweep", "run", out)
    assert again.returncode == 1
    assert num_starts(ledger.parent) == starts

    gathered = json.loads(surefoot("sweep", "gather", out, "--json").stdout)
    assert {parent["name"], branch["name"]} <= {row["run"] for row in gathered["rows"]}
    assert broken["name"] in gathered["left_out"]
    row = next(row for row in gathered["rows"] if row["run"] == branch["name"])
    assert (row["tokens"], row["flops"], row["n"]) == (branch["tokens"], branch["flops"], branch["n"])
