"""Clean processes: they get their job, leave their result, and are gone as soon as their parent is."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.checkpoint.clean import run_clean

_ECHO = """
from surefoot.checkpoint.clean import begin_clean, end_clean, leave_result
if __name__ == "__main__":
    job = begin_clean()
    leave_result(job, job["word"])
    end_clean()
"""
_SLOW_TO_IMPORT = """
import os, time
from pathlib import Path
Path("pid").write_text(str(os.getpid()))
time.sleep(600)
"""
_PARENT = """
from surefoot.checkpoint.clean import run_clean
run_clean("slow_to_import", {}, limit_s=600)
"""


def test_a_job_goes_in_and_its_result_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_job.py").write_text(_ECHO)
    monkeypatch.chdir(tmp_path)
    assert run_clean("echo_job", {"word": "here"}, limit_s=60) == "here"


def test_one_that_still_imports_does_not_outlive_its_parent(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(_SLOW_TO_IMPORT)
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], cwd=tmp_path)
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    pidfd = os.pidfd_open(int((tmp_path / "pid").read_text()))
    parent.kill()
    parent.wait()
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(1000), "it is still there"
    os.close(pidfd)
