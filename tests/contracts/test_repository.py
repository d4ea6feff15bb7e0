"""The house itself: pages that must exist, and what must never be committed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGES = (
    "README.md",
    "LICENSE",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CITATION.cff",
    "docs/index.md",
    "docs/quickstart.md",
    "docs/architecture.md",
    "docs/config.md",
    "docs/opinions.md",
    "docs/gpu-checks.md",
)
# Put together here so that this file does not find itself. Homes, temporary folders and mounts of one machine help nobody else.
MACHINE_PATHS = re.compile("|".join(rf"(?<![\w.]){re.escape('/' + name + '/')}\w" for name in ("work", "root", "home", "opt", "tmp")))


def tracked(root: Path) -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [root / name for name in result.stdout.split("\0") if name and (root / name).is_file()]


@pytest.mark.parametrize("page", PAGES)
def test_page_exists(page: str, root: Path) -> None:
    assert (root / page).stat().st_size > 100


def test_decisions_are_numbered_without_gaps_and_say_context_choice_price(root: Path) -> None:
    pages = sorted((root / "docs" / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        assert all(f"## {part}" in text for part in ("Context", "Choice", "Price")), page.name


def test_links_between_pages_lead_somewhere(root: Path) -> None:
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_path_of_one_machine_is_committed(root: Path) -> None:
    found = []
    for path in tracked(root):
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(root)}: {match.group()}" for match in MACHINE_PATHS.finditer(text)]
    assert found == []


def test_the_lock_has_every_dependency_and_no_build_of_torch(root: Path) -> None:
    lines = [line for line in (root / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    locked = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=\[ ]", name)[0].lower() for name in project["dependencies"] + project["optional-dependencies"]["dev"]}
    assert wanted <= locked
    (torch,) = (line for line in lines if line.startswith("torch=="))
    assert "+" not in torch


def test_the_version_is_asked_in_one_place(root: Path) -> None:
    """What pip wrote down at the last install may be older than the code that runs."""
    asking = [path.name for path in (root / "src").rglob("*.py") if re.search(r"version\([\"']surefoot[\"']\)", path.read_text())]
    assert asking == []


def test_every_timed_area_has_a_budget(root: Path) -> None:
    budget = tomllib.loads((root / ".ci" / "minutes.toml").read_text())["minutes"]
    assert sum(minutes for area, minutes in budget.items() if area != "total") <= budget["total"] <= 25
    assert set(budget) >= {"install", "quickstart", "static", "contracts", "unit", "ranks", "drills"}
    timed = set(re.findall(r"(?:scripts/timed|\$\(TIMED\)) (\w+)", (root / ".ci" / "run").read_text() + (root / "Makefile").read_text()))
    assert timed
    assert timed <= set(budget)


def test_gpu_checks_without_a_gpu_say_so_and_fail(root: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([root / "scripts" / "gpu-checks"], capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert result.returncode == 1
    assert "torch " in result.stdout
    assert "NOTHING was checked" in result.stderr


def test_every_file_of_gpu_checks_is_told(root: Path) -> None:
    page = (root / "docs" / "gpu-checks.md").read_text()
    assert {path.name for path in (root / "tests" / "gpu").glob("test_*.py")} == set(re.findall(r"test_\w+\.py", page))


def test_minutes_are_added_up_per_area_and_held_against_the_budget(root: Path) -> None:
    table = runpy.run_path(str(root / "scripts" / "minutes.py"))["table"]
    lines = table("unit\t60.0\nunit\t60.0\nranks\t30.0\n", budget={"unit": 1.0, "ranks": 1.0, "total": 9.0}).splitlines()
    assert lines[1].split() == ["unit", "2.0", "1.0", "over", "budget"]
    assert lines[2].split() == ["ranks", "0.5", "1.0"]
    assert lines[3].split() == ["total", "2.5", "9.0"]
