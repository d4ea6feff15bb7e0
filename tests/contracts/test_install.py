"""`make install` without a network: a stand-in for the interpreter notes what it is asked to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Answers version and import probes as FAKE_* say, makes .venv out of itself, and writes every pip call down.
STAND_IN = """#!/bin/bash
case "$*" in
  *version_info*) exit "${FAKE_TOO_OLD:-0}" ;;
  *ensurepip*) exit "${FAKE_NO_VENV:-0}" ;;
  --version) echo "Python 3.12.0" ;;
  "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >>"$CALLS" ;;
  "-m pip --version") ;;
  *) echo "$*" >>"$CALLS" ;;
esac
"""
NEW = ["venv", "pip install --requirement REST"]
END = "pip install --no-deps --no-build-isolation --editable ."


class Checkout:
    """A folder with just what the install script reads."""

    def __init__(self, folder: Path, *, source: Path) -> None:
        self.folder = folder
        self.calls = folder.parent / "calls"
        (folder / "scripts").mkdir(parents=True)
        shutil.copy(source / "scripts" / "install.sh", folder / "scripts")
        for name in ("requirements.lock", "pyproject.toml"):
            shutil.copy(source / name, folder)
        python = folder.parent / "python3"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        given = {**os.environ, "CALLS": str(self.calls), "PYTHON": str(self.folder.parent / "python3"), "TORCH_INDEX": "", **environment}
        command = ["bash", str(self.folder / "scripts" / "install.sh")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=given)

    def called(self) -> list[str]:
        """What pip was asked for, the temporary file of requirements by name."""
        lines = self.calls.read_text().replace("-m pip --disable-pip-version-check --no-input", "pip").splitlines()
        return [re.sub(r"--requirement .*", "--requirement REST", line) for line in lines]


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Checkout:
    return Checkout(tmp_path / "checkout", source=root)


def test_says_what_it_downloads_and_installs_the_lock_then_torch(checkout: Checkout, root: Path) -> None:
    result = checkout.install()
    assert (result.returncode, result.stderr) == (0, "")
    torch = next(line for line in (root / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))
    assert checkout.called() == [*NEW, f"pip install {torch}", END]
    assert torch.replace("==", " ") in result.stdout
    assert "GB" in result.stdout


def test_a_second_install_does_nothing(checkout: Checkout) -> None:
    checkout.install()
    result = checkout.install()
    assert (result.returncode, result.stdout, checkout.called()) == (0, "", [])


def test_another_index_is_for_torch_alone_and_stays_until_changed(checkout: Checkout) -> None:
    checkout.install()
    assert checkout.install(TORCH_INDEX="https://example.org/cpu").returncode == 0
    rest, forced, torch, end = checkout.called()
    assert "index" not in rest + end
    assert forced.startswith("pip install --index-url https://example.org/cpu --force-reinstall --no-deps torch==")
    assert torch.startswith("pip install --index-url https://example.org/cpu torch==")
    assert (checkout.install().stdout, checkout.called()) == ("", [])


def test_a_new_lock_is_installed_over_the_old_one(checkout: Checkout) -> None:
    checkout.install()
    with (checkout.folder / "requirements.lock").open("a") as file:
        file.write("more==1.0\n")
    checkout.install()
    assert checkout.called()[0] == NEW[1]


def test_a_moved_checkout_gets_a_new_venv(checkout: Checkout) -> None:
    checkout.install()
    checkout.folder = checkout.folder.rename(checkout.folder.parent / "moved")
    checkout.install()
    assert checkout.called()[:2] == NEW


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAKE_TOO_OLD": "1"}, "Python 3.11 or newer is needed and there is Python 3.12.0: install one"),
        ({"PYTHON": "no-such-python"}, "Python 3.11 or newer is needed and there is no Python: install one"),
        ({"FAKE_NO_VENV": "1"}, "lacks venv or ensurepip: install them"),
    ],
)
def test_what_is_missing_is_one_line_with_the_cure(checkout: Checkout, environment: dict[str, str], words: str) -> None:
    result = checkout.install(**environment)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("make install: ")
    assert words in line
    assert not (checkout.folder / ".venv").exists()


def test_another_system_is_one_line(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "bin" / "uname").chmod(0o755)
    result = checkout.install(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "this is Darwin" in result.stderr
