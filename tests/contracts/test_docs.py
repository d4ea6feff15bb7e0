"""The pages do what they say: blocks marked ```` ```bash run ```` and ```` ```python run ```` are executed, page by page, in order.

Each page gets an empty folder with a copy of `examples/`, and `surefoot` and `python` of this environment first on the PATH. All bash
blocks of a page are one shell, so a later block finds what an earlier one made. A block may state what it prints: the lines of a following
```` ```text output ```` block must all appear, in order, where `...` stands for anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from surefoot.config.reference import reference
from surefoot.config.schema import sections, settings_of
from surefoot.core.events import Event

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    page for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if re.search(r"^```\w+ run$", page.read_text(), re.MULTILINE)
)
PAGE_LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    body: str
    expected: str


def runnable_blocks(text: str) -> list[Block]:
    """The marked blocks of a page, each with the output that the page promises (empty when it promises none)."""
    blocks: list[Block] = []
    for match in FENCE.finditer(text):
        words = match["info"].split()
        if words[1:] == ["run"]:
            blocks.append(Block(words[0], match["body"], ""))
        elif words == ["text", "output"] and blocks:
            blocks[-1] = Block(blocks[-1].language, blocks[-1].body, match["body"])
    return blocks


def appears(expected: str, *, printed: str) -> bool:
    """Whether the lines of `expected` are among those of `printed`, in order; `...` inside a line stands for anything."""
    lines = iter(printed.splitlines())
    patterns = [".*".join(re.escape(part.strip()) for part in line.split("...")) for line in expected.splitlines() if line.strip(" .")]
    return all(any(re.fullmatch(rf"\s*{pattern}\s*", line) for line in lines) for pattern in patterns)


@pytest.mark.timeout(PAGE_LIMIT_S)
@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    script = ["set -euo pipefail"]
    blocks = runnable_blocks(page.read_text())
    for index, block in enumerate(blocks):
        body = block.body if block.language == "bash" else f"python - <<'END_OF_PYTHON'\n{block.body}END_OF_PYTHON"
        script.append(f"exec >block-{index}.txt 2>&1\n{body}")
    child = subprocess.run(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, check=False, timeout=PAGE_LIMIT_S - 10)
    printed = {index: path.read_text() for index in range(len(blocks)) if (path := tmp_path / f"block-{index}.txt").exists()}
    assert child.returncode == 0, (
        f"exit {child.returncode} in block {len(printed)}:\n{blocks[len(printed) - 1].body}\n{printed[len(printed) - 1]}"
    )
    for index, block in enumerate(blocks):
        assert appears(block.expected, printed=printed[index]), f"promised:\n{block.expected}\nprinted:\n{printed[index]}"
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    for entry in (tmp_path / "runs").glob("*/[!.]*"):
        assert re.search(rf"`{re.escape(entry.name)}[/`]", architecture), f"a run folder holds {entry.name}, and no page says so"


def test_every_command_of_the_quick_start_is_executed() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert not re.findall(r"^```(?:bash|python)$", page, re.MULTILINE), "mark the block: bash run, python run"
    executed = "\n".join(block.body for block in runnable_blocks(page))
    for verb in ("doctor", "config show", "train", "status", "ledger", "checkpoint list", "checkpoint verify", "init", "data prepare"):
        assert f"surefoot {verb} " in executed or f"surefoot {verb}\n" in executed, verb


def test_settings_that_pages_name_exist() -> None:
    known = {f"{name}.{key}" for name, section in sections().items() for key in settings_of(section)} | {str(event) for event in Event}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        named = re.findall(rf"`((?:{'|'.join(sections())})\.\w+)`", page.read_text())
        assert set(named) <= known, page.name


def test_every_room_is_told_and_those_that_are_empty_too() -> None:
    """What is announced for later has no code yet, and what has code is not announced for later."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE))
    rooms = {path.parent.name: path.parent for path in (ROOT / "src" / "surefoot").glob("*/__init__.py")}
    assert set(rows) == set(rooms)
    empty = {name for name, folder in rooms.items() if {path.name for path in folder.glob("*.py")} == {"__init__.py"}}
    assert empty == {name for name, text in rows.items() if re.fullmatch(r"[^()]*\(not in this release\)", text)}


def test_blocks_are_found_with_their_outputs() -> None:
    page = "```bash run\none\n```\ntext\n```text output\n1\n```\n```bash\nnot this\n```\n```python run\ntwo\n```\n"
    assert runnable_blocks(page) == [Block("bash", "one\n", "1\n"), Block("python", "two\n", "")]


def test_promised_lines_must_appear_in_order() -> None:
    assert appears("a ... c\n...\nd\n", printed="x\na b c\ny\nd\n")
    assert not appears("d\na ... c\n", printed="a b c\nd\n")
    assert not appears("a\n", printed="a b\n")


def test_the_config_reference_is_current() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run: make docs"
