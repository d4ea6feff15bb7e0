"""`train --resume-from` through the real command: by step, id, folder and URL; verified, ledgered, for one start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.ledger import Ledger, manifest_positions, read_ledger, verify_ledger
from surefoot.observe.live import read_live

CONFIG = """
[run]
name = "{name}"
dir = "{name}"
[data]
path = "prepared"
tokenizer = "bytes"
seq_len = 32
[[data.sources]]
name = "text"
files = ["text"]
[model]
num_layers = 1
d_model = 32
num_heads = 2
[train]
num_steps = {num_steps}
global_batch_size = 4
micro_batch_size = 2
eval_interval_steps = 4
eval_num_samples = 2
[schedule]
kind = "constant"
warmup_steps = 1
[checkpoint]
interval_steps = 4
num_slots = 8   # so many that no save is put off to a later step, however busy the machine is
keep_last = 9
prove = false
{more}
[observe]
status_interval_s = 0.1
[launch]
threads_per_rank = 1
restart_wait_s = 0.1
"""

pytestmark = pytest.mark.timeout(300)  # several starts of Python and torch each


class Run:
    """A run in a folder, with its config beside it."""

    def __init__(self, folder: Path, name: str, *, num_steps: int = 16, more: str = "") -> None:
        self.folder = folder
        self.dir = folder / name
        self.config = folder / f"{name}.toml"
        self.config.write_text(CONFIG.format(name=name, num_steps=num_steps, more=more))
        if not (folder / "text").exists():
            (folder / "text").mkdir()
            for index in range(20):
                (folder / "text" / f"{index:02d}.txt").write_text(f"document {index}: " + "how vexingly quick daft zebras jump. " * 5)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "surefoot.cli.main", *arguments]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def surefoot(self, *arguments: str, expect: int = 0) -> str:
        process = self.start(*arguments)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == expect, printed
        return printed

    def train(self, *arguments: str, expect: int = 0) -> str:
        return self.surefoot("train", str(self.config), *arguments, expect=expect)

    def entries(self, event: str) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.dir / "ledger.jsonl") if entry.event == event]

    def bases(self) -> list[object]:
        return [entry.fields["checkpoint"] for entry in self.entries("attempt.started")]

    def digest(self) -> str:
        return str(self.entries("run.finished")[-1].fields["state_digest"])

    def check(self) -> None:
        check = verify_ledger(self.dir / "ledger.jsonl", manifests=manifest_positions(self.dir))
        assert check.ok, check


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path, "run")
    made.train()
    return made


def test_by_step_the_line_branches_off_there_verified_and_only_once(run: Run) -> None:
    before = run.digest()
    printed = run.train("--resume-from", "4", "--cause", "to see")
    assert "resumed from step 4, checkpoint s4-a1, config " in printed
    assert "verified 8 steps: the same bits" in printed
    (asked,) = run.entries("resume.asked")
    assert (asked.fields["id"], asked.reason, bool(asked.by)) == ("s4-a1", "to see", True)
    assert run.digest() == before
    listed = run.surefoot("checkpoint", "list", str(run.dir))
    assert next(line for line in listed.splitlines() if "s8-a1" in line).count("abandoned") == 1
    assert "finished" in run.train()  # the wish was met
    assert run.bases() == [None, "s4-a1"]
    wish = {"id": "s8-a1"}  # as a start leaves it that is killed before its ranks are there
    ledger = Ledger(run.dir / "ledger.jsonl", clock=SystemClock(), by="somebody")
    ledger.append(Event.RESUME_ASKED, generation=2, attempt=2, step=16, fields=wish)
    run.train()
    assert run.bases() == [None, "s4-a1", "s8-a1"]
    run.check()


def test_what_is_older_than_the_newest_loadable_or_given_up_needs_a_second_word(run: Run) -> None:
    run.train("--resume-from", "s12-a1")  # from here on it is loadable
    printed = run.train("--resume-from", "8", expect=2)
    said = "s8-a1 is older than s12-a1, the newest loadable one, and the run stands at s16-a2: 8 steps would be given up"
    assert said in " ".join(printed.split())
    assert "s16-a1 was given up" in run.train("--resume-from", "s16-a1", expect=2)
    assert len(run.entries("resume.asked")) == 1
    run.train("--resume-from", "8", "--yes")
    assert run.bases() == [None, "s12-a1", "s8-a1"]
    run.train("train.num_steps=18", "--accept-changes", "train", "--resume-from", "s16-a1", "--yes")
    assert run.bases()[-1] == "s16-a1"


def test_what_is_not_there_is_named_with_what_is(run: Run) -> None:
    assert "there are s4-a1, s8-a1, s12-a1, s16-a1" in run.train("--resume-from", "5", expect=2)
    assert "s7-a1 is none of this run" in run.train("--resume-from", "s7-a1", expect=2)
    assert "neither a step, an id, a checkpoint folder nor a URL" in run.train("--resume-from", "nowhere", expect=2)
    assert "as in 500, s500-a1, ../backup/s500-a1, s3://" in run.train("--resume-from", "", expect=2)
    assert not run.entries("resume.asked")


def test_one_that_does_not_load_is_no_reason_to_take_another(run: Run) -> None:
    file = run.dir / "checkpoints" / "s8-a1" / "extras.json"
    file.write_bytes(file.read_bytes()[:-1])
    printed = run.train("--resume-from", "8", expect=5)
    assert "s8-a1, which" in printed
    assert "asked for, does not load" in printed
    assert "finished" in run.train()  # and the wish is over
    assert run.bases() == [None]


def test_a_crash_after_the_start_does_not_go_back_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", num_steps=300)
    run.train("train.num_steps=16")
    process = run.start("train", str(run.config), "--accept-changes", "train", "--resume-from", "4")
    deadline_s = time.monotonic() + 100
    while len([entry for entry in run.entries("checkpoint.committed") if entry.attempt == 2]) < 3:
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.01)
    live = read_live(run.dir)
    assert live is not None
    os.kill(live.ranks[0].pid, signal.SIGKILL)
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0, printed
    assert run.bases()[:2] == [None, "s4-a1"]
    assert len(run.bases()) == 3
    assert str(run.bases()[2]).endswith("-a2")


def test_from_a_folder_and_from_a_store_of_another_run(tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = Run(tmp_path, "source", more=f'tiers = ["memory", "disk", "file://{store}"]')
    source.train()
    for wanted in (str(source.dir / "checkpoints" / "s8-a1"), f"file://{store}/s8-a1"):
        taker = Run(tmp_path, "taker")
        printed = taker.train("--resume-from", wanted)
        assert "going on from s8-a0, step 8" in printed
        assert "verified 0 steps: nothing was recorded after it" in printed
        (imported,) = taker.entries("checkpoint.imported")
        assert imported.fields["from_checkpoint"] == "s8-a1"
        assert taker.digest() == source.digest()
        assert not (taker.dir / ".fetched").exists()
        taker.check()
        shutil.rmtree(taker.dir)
    assert "s9-a1 is not published there" in Run(tmp_path, "taker").train("--resume-from", f"file://{store}/s9-a1", expect=5)


def test_one_of_another_config_is_refused_before_anything_comes_in_and_comes_in_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    source = Run(tmp_path, "source", more=f'tiers = ["memory", "disk", "file://{store}"]')
    source.train()
    taker = Run(tmp_path, "taker")
    folder, url = str(source.dir / "checkpoints" / "s8-a1"), f"file://{store}/s8-a1"
    changed = "schedule.warmup_steps=2"
    for wanted in (folder, url):
        assert "checkpoint s8-a1 was made with another [schedule]" in taker.train(changed, "--resume-from", wanted, expect=2)
        assert not (taker.dir / "checkpoints").exists()
        assert not taker.entries("checkpoint.imported")
    for wanted in (folder, url):
        taker.train(changed, "--resume-from", wanted, "--accept-changes", "schedule", "--yes")
    assert len(taker.entries("checkpoint.imported")) == 1
    assert taker.bases() == ["s8-a0", "s8-a0"]
    taker.check()


def test_a_folder_that_was_changed_is_refused_before_anything_is_taken_in(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "backup" / "s8-a1"
    shutil.copytree(run.dir / "checkpoints" / "s8-a1", bad)
    file = next(bad.glob("*.distcp"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert file.name in run.train("--resume-from", str(bad), expect=5)
    assert not run.entries("checkpoint.imported")


def test_a_copied_run_goes_on_elsewhere_and_names_no_place(run: Run, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(run.dir, elsewhere / "moved")
    shutil.copytree(tmp_path / "prepared", elsewhere / "prepared")
    shutil.rmtree(run.dir)
    (tmp_path / "prepared").rename(tmp_path / "hidden")
    printed = run.surefoot("train", str(elsewhere / "moved"), "train.num_steps=20", "--accept-changes", "train")
    assert "resumed from step 16, checkpoint s16-a1" in printed
    named = [path.name for path in (elsewhere / "moved").rglob("*") if path.is_file() and str(tmp_path).encode() in path.read_bytes()]
    assert named == []
