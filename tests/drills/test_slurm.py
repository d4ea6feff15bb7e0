"""A real Slurm on this host: the printed script is really submitted, and nodes are really drained.

Where Slurm is not installed every test is skipped with what is missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.coordinate.isolation.records import reason_of
from surefoot.coordinate.isolation.slurm import SlurmIsolator
from surefoot.core.strict_json import loads
from surefoot.launch.slurm import SlurmOptions, sbatch_script
from surefoot.launch.submission import Submission
from surefoot.observe.ledger import read_ledger
from tests.drills.live_job import CONFIG, write_texts
from tests.drills.slurm_site import Site, slurm_site

__all__ = ["slurm_site"]  # a fixture that lives elsewhere
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(110)]
SUREFOOT = str(Path(sys.executable).parent / "surefoot")
MARK = "SUREFOOT_SLURM_DRILL"


@pytest.fixture
def site(slurm_site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Every test leaves the nodes as it found them, and no node has failed to kill a task."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_site.home / "slurm.conf"))
    yield slurm_site
    subprocess.run(["scancel", "--user=root"], env=slurm_site.env, capture_output=True, timeout=20, check=False)
    slurm_site.until(lambda: not slurm_site.call("squeue", "--noheader"), what="an empty queue")
    for node in slurm_site.nodes:
        assert "Kill task failed" not in slurm_site.node(node)
        if "DRAIN" in slurm_site.node(node):
            slurm_site.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
    slurm_site.until(lambda: all("State=IDLE " in slurm_site.node(node) for node in slurm_site.nodes), what="idle nodes")


def submission(folder: Path, program: str, **more: Any) -> Submission:
    return replace(
        Submission("drill", str(folder / "run.toml"), str(folder / "run"), 1, "0", "surefoot submit slurm", program=program),
        **more,
    )


def submit(site: Site, folder: Path, asked: Submission) -> str:
    """The id of the job; what it calls in the place of `surefoot` is the program of `asked`."""
    script = sbatch_script(asked, SlurmOptions("10:00", str(folder / "job.out")))
    (folder / "job.sh").write_text(script)
    return site.call("sbatch", "--parsable", str(folder / "job.sh")).strip()


def program_that_ends(folder: Path, code: int) -> str:
    """It notes each start of `train`, ends with `code` at the first and with 0 at the next; asked for denied nodes it names none."""
    path = folder / "program"
    path.write_text(
        f'#!/bin/bash\n[ "$1" = train ] || exit 0\necho start >> {folder}/starts\n[ "$(wc -l < {folder}/starts)" -gt 1 ] || exit {code}\n'
    )
    path.chmod(0o755)
    return str(path)


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text().splitlines()) if (folder / "starts").exists() else 0


def ended(site: Site, job: str) -> bool:
    return site.job(job).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", None)


def test_a_run_that_is_told_to_leave_is_requeued_and_goes_on(site: Site, tmp_path: Path) -> None:
    """The verb hands in a real run; USR2 reaches the agent, which saves and ends with 75; the same job starts again at once."""
    write_texts(tmp_path / "text")
    (tmp_path / "run.toml").write_text(CONFIG.replace("dp_replicate = 2", "dp_replicate = 1"))
    told = subprocess.run(
        [SUREFOOT, "submit", "slurm", str(tmp_path / "run.toml"), "--time", "10:00", "--program", SUREFOOT, "--yes", "--json"],
        env={**site.env, MARK: str(os.getpid())}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    answer = loads(told.stdout)
    assert answer["submitted"] is True
    job, ledger = answer["job"], tmp_path / "run" / "ledger.jsonl"

    def steps(attempt: int) -> bool:
        return ledger.exists() and any(e.event == "checkpoint.committed" and e.attempt >= attempt for e in read_ledger(ledger))

    site.until(lambda: steps(1), what="a first checkpoint")
    site.call("scancel", "--signal=USR2", job)
    site.until(lambda: steps(2), what="a checkpoint of the next attempt")
    assert site.job(job)["Restarts"] == "1"
    entries = read_ledger(ledger)
    left = next(entry for entry in entries if entry.event == "run.left")
    resumed = [entry for entry in entries if entry.event == "run.resumed" and entry.seq > left.seq]
    assert all(entry.step >= left.step for entry in resumed)
    assert "start 2, on n" in Path(answer["output"]).read_text()
    # A job that somebody cancels ends with 75 as well, and does not come back.
    site.call("scancel", job)
    site.until(lambda: ended(site, job), what="the end of a cancelled job")
    assert site.job(job)["JobState"] == "CANCELLED"
    assert site.job(job)["Restarts"] == "1"


@pytest.mark.campaign
@pytest.mark.parametrize(("code", "num_starts"), [(75, 2), (93, 1), (7, 1), (6, 1), (2, 1), (1, 1)])
def test_75_comes_back_and_nothing_else_does(code: int, num_starts: int, site: Site, tmp_path: Path) -> None:
    job = submit(site, tmp_path, submission(tmp_path, program_that_ends(tmp_path, code)))
    site.until(lambda: ended(site, job), what=f"the end of a job of code {code}")
    assert starts(tmp_path) == num_starts
    assert site.job(job)["Restarts"] == str(num_starts - 1)
    assert site.job(job)["ExitCode"] == f"{0 if num_starts > 1 else code}:0"


@pytest.mark.campaign
def test_a_chain_has_an_end(site: Site, tmp_path: Path) -> None:
    job = submit(site, tmp_path, submission(tmp_path, program_that_ends(tmp_path, 75), max_requeues=0))
    site.until(lambda: ended(site, job), what="the end of a job that may not be requeued")
    assert starts(tmp_path) == 1
    assert "requeued 0 times, which is the limit" in (tmp_path / "job.out").read_text()


@pytest.mark.campaign
def test_a_denied_node_is_left_out_when_the_job_comes_back(site: Site, tmp_path: Path) -> None:
    program = program_that_ends(tmp_path, 75)
    script = Path(program).read_text().replace('[ "$1" = train ] || exit 0', '[ "$1" = train ] || { echo n1; exit; }')
    Path(program).write_text(script)
    job = submit(site, tmp_path, submission(tmp_path, program))
    site.until(lambda: ended(site, job), what="the end of the job")
    assert starts(tmp_path) == 2
    assert site.job(job)["NodeList"] == "n2"


def test_a_node_is_drained_once_and_let_back(site: Site) -> None:
    isolator = SlurmIsolator(limit_s=10.0)
    reason = reason_of("g3", 'rank 2 "lost" its device')
    done = isolator.isolate("n1", reason=reason, ttl_s=60.0, evidence={})
    assert (done.action, done.reason) == ("isolated", reason)
    assert "State=IDLE+DRAIN " in site.node("n1")
    assert "surefoot:g3: rank 2 lost its device" in site.node("n1")
    assert isolator.isolate("n1", reason="surefoot:g4: again", ttl_s=60.0, evidence={}).action == "already"
    assert "g4" not in site.node("n1")
    assert isolator.release("n1").action == "released"
    assert "DRAIN" not in site.node("n1")
    assert isolator.release("n1").action == "already"


def test_what_somebody_else_drained_is_left_alone(site: Site) -> None:
    site.call("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=maintenance of the fans")
    isolator = SlurmIsolator(limit_s=10.0)
    before = site.node("n2")
    assert isolator.isolate("n2", reason="surefoot:g1: lost", ttl_s=60.0, evidence={}).action == "left_alone"
    assert isolator.release("n2").action == "left_alone"
    assert site.node("n2") == before
    assert isolator.status("n2").state == "others"


def test_a_node_that_is_none_is_said(site: Site) -> None:
    isolator = SlurmIsolator(limit_s=10.0)
    assert isolator.status("n9").state == "absent"
    done = isolator.isolate("n9", reason="surefoot:g1: lost", ttl_s=60.0, evidence={})
    assert done.action == "failed"
    assert "not found" in done.reason
    assert isolator.isolate("n[1-2]", reason="surefoot:g1: lost", ttl_s=60.0, evidence={}).action == "failed"
    assert isolator.isolate("ALL", reason="surefoot:g1: lost", ttl_s=60.0, evidence={}).action == "failed"
    assert not any("DRAIN" in site.node(node) for node in site.nodes)
