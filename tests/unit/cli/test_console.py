"""Whoever stops reading changes neither what a command does nor its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MAIN = "import surefoot.cli.main as main\nmain.main()\n"
# A verb that acts, says so and ends with a code of its own, as `train` does.
ACTING = """
import sys, typer, surefoot.cli.init as init
from surefoot.cli.console import say

def act(folder: str) -> None:
    for number in range(3):
        say(f"line {number}")
    open(folder, "w").write("done")
    if 'CODE' != '0':
        raise typer.Exit(CODE)

init.init = act
"""


def run_unread(
    arguments: Sequence[str], *, cwd: Path, before: str = "", stderr_too: bool = False, redirect: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a verb whose stdout (and stderr) is a pipe that nobody reads any more, or is redirected as a shell does it."""
    reading, writing = os.pipe()
    os.close(reading)
    command = ["sh", "-c", f'exec "$0" -c "$@" {redirect}', sys.executable, before + MAIN, *arguments]
    error = writing if stderr_too else subprocess.PIPE
    child = subprocess.run(command, cwd=cwd, stdout=writing, stderr=error, text=True, timeout=60, check=False)
    os.close(writing)
    return child


@pytest.mark.parametrize("code", [0, 75, 6])
@pytest.mark.parametrize("stderr_too", [False, True])
def test_a_verb_that_acts_goes_on_and_keeps_its_code(tmp_path: Path, code: int, stderr_too: bool) -> None:
    child = run_unread(["init", "made"], cwd=tmp_path, before=ACTING.replace("CODE", str(code)), stderr_too=stderr_too)
    assert child.returncode == code
    assert (tmp_path / "made").read_text() == "done"
    assert not child.stderr


@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&-", ">/dev/full"])
def test_a_closed_or_full_stdout_does_not_either(tmp_path: Path, redirect: str) -> None:
    child = run_unread(["init", "made"], cwd=tmp_path, before=ACTING.replace("CODE", "75"), redirect=redirect)
    assert child.returncode == 75
    assert (tmp_path / "made").read_text() == "done"
    assert "Traceback" not in child.stderr


def test_init_without_a_reader_writes_its_config(tmp_path: Path) -> None:
    child = run_unread(["init", "my-run"], cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    assert (tmp_path / "my-run" / "run.toml").exists()


@pytest.mark.parametrize("stderr_too", [False, True])
def test_prepare_without_a_reader_prepares(tmp_path: Path, stderr_too: bool) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(50)))
    arguments = ["data", "prepare", "a.jsonl", "--out", "out", "--tokenizer", "bytes"]
    assert run_unread(arguments, cwd=tmp_path, stderr_too=stderr_too).returncode == 0
    assert (tmp_path / "out" / "manifest.json").exists()


def test_an_error_that_nobody_reads_keeps_its_code(tmp_path: Path) -> None:
    assert run_unread(["config", "show", "absent.toml"], cwd=tmp_path, stderr_too=True).returncode == 2
    assert run_unread(["config", "show", "absent.toml", "--json"], cwd=tmp_path, stderr_too=True).returncode == 2
    assert run_unread(["config", "shwo"], cwd=tmp_path, stderr_too=True).returncode == 2


def test_a_broken_pipe_that_is_not_stdout_is_a_defect_and_said(tmp_path: Path) -> None:
    broken = "import surefoot.cli.init as init\ndef broken() -> None:\n    raise BrokenPipeError(32, 'Broken pipe')\ninit.init = broken\n"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", broken + MAIN, "init"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert child.returncode == 1
    assert "unexpected BrokenPipeError" in child.stderr


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", MAIN, "init", "größe"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    assert "wrote gr\\xf6\\xdfe/run.toml" in child.stdout
