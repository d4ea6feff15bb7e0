"""Bad input through the real command: what, where, what to do; the exit code; nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.observe.ledger import read_ledger, verify_ledger

CONFIG = """
[run]
name = "run"
dir = "run"
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
num_steps = 6
global_batch_size = 4
micro_batch_size = 2
eval_num_samples = 2
[schedule]
kind = "constant"
warmup_steps = 1
[checkpoint]
prove = false
interval_steps = 2
num_slots = 8   # so many that no save is put off to a later step, however busy the machine is
[launch]
threads_per_rank = 1
"""

pytestmark = pytest.mark.timeout(300)  # several starts of Python and torch each


class Place:
    """A folder with a small corpus and a config beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG)
        (folder / "text").mkdir()
        for index in range(20):
            (folder / "text" / f"{index}.txt").write_text(f"document {index} " * 20)

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def edit(self, old: str, new: str) -> None:
        assert old in self.config.read_text()
        self.config.write_text(self.config.read_text().replace(old, new))

    def surefoot(self, *arguments: str, expect: int) -> str:
        """Run the command; everything it printed. The exit code is part of the contract."""
        result = subprocess.run(
            [sys.executable, "-m", "surefoot.cli.main", *arguments],
            capture_output=True,
            text=True,
            timeout=110,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH", ""))))},
        )
        printed = result.stdout + result.stderr
        assert result.returncode == expect, printed
        assert expect == 0 or "Traceback" not in printed, printed
        return printed

    def train(self, *arguments: str, expect: int) -> str:
        return self.surefoot("train", str(self.config), *arguments, expect=expect)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_unknown_key_names_the_nearest(place: Place) -> None:
    place.edit("num_steps", "num_stps")
    printed = place.train(expect=2)
    assert "num_stps" in printed
    assert "num_steps" in printed
    assert "run.toml:17" in printed
    assert not place.run.exists()


def test_a_wrong_type_says_what_was_wanted(place: Place) -> None:
    place.edit("num_steps = 6", 'num_steps = "six"')
    printed = place.train(expect=2)
    assert '"six"' in printed
    assert "integer" in printed
    assert not place.run.exists()


def test_a_missing_file_is_named(place: Place) -> None:
    assert "nowhere.toml" in place.surefoot("train", "nowhere.toml", expect=2)
    place.edit('files = ["text"]', 'files = ["nothing-here"]')
    assert "nothing-here" in place.train(expect=4)
    assert not (place.folder / "prepared").exists()


def test_an_empty_corpus_is_a_data_error(place: Place) -> None:
    shutil.rmtree(place.folder / "text")
    (place.folder / "text").mkdir()
    (place.folder / "text" / "empty.txt").write_text("")
    assert "text" in place.train(expect=4)
    assert not (place.folder / "prepared").exists()


def test_a_broken_line_is_named_by_file_and_line(place: Place) -> None:
    (place.folder / "text" / "records.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    printed = place.train(expect=4)
    assert "records.jsonl" in printed
    assert "2" in printed
    assert not (place.folder / "prepared").exists()


def test_a_vocabulary_that_does_not_fit_is_refused(place: Place) -> None:
    printed = place.train("model.vocab_size=64", expect=2)
    assert "vocab_size" in printed
    assert "64" in printed


def test_data_of_another_tokenizer_is_refused_on_resume(place: Place) -> None:
    place.train(expect=0)
    shutil.rmtree(place.folder / "prepared")
    place.edit('tokenizer = "bytes"', 'tokenizer = "bpe:300"')
    printed = place.train("train.num_steps=8", "--accept-changes", "train", expect=4)
    assert "tokenizer" in printed


def test_changed_data_is_refused_with_the_three_choices_and_each_works(place: Place) -> None:
    place.train(expect=0)
    shutil.rmtree(place.folder / "prepared")
    (place.folder / "text" / "one-more.txt").write_text("a new document " * 30)
    more = ("train.num_steps=8", "--accept-changes", "train")
    as_it_was = {name: (place.run / name).read_bytes() for name in ("config.toml", "ledger.jsonl")}
    printed = place.train(*more, "data.path=new", expect=4)
    for choice in ("refuse", "map", "restart-source"):
        assert choice in printed
    assert {name: (place.run / name).read_bytes() for name in as_it_was} == as_it_was
    (place.folder / "new").rename(place.folder / "prepared")
    saved = place.folder / "saved"
    shutil.copytree(place.run, saved)
    for choice in ("map", "restart-source"):
        printed = place.train(*more, "--on-data-change", choice, expect=0)
        accepted = [entry for entry in read_ledger(place.run / "ledger.jsonl") if entry.event == "data.accepted"]
        assert choice in accepted[-1].reason
        assert f"note: the data changed; {accepted[-1].reason}" in printed
        shutil.rmtree(place.run)
        shutil.copytree(saved, place.run)


def test_a_run_of_another_config_is_refused_and_can_be_accepted(place: Place) -> None:
    place.train(expect=0)
    config_before = (place.run / "config.toml").read_text()
    printed = place.train("optimizer.lr=1e-2", "train.num_steps=8", expect=2)
    assert "lr was 0.0003, is 0.01" in printed
    assert "--accept-changes optimizer" in printed
    assert (place.run / "config.toml").read_text() == config_before
    place.train("optimizer.lr=1e-2", "train.num_steps=8", "--accept-changes", "optimizer", "--accept-changes", "train", expect=0)
    accepted = [entry.fields["section"] for entry in read_ledger(place.run / "ledger.jsonl") if entry.event == "config.accepted"]
    assert accepted == ["optimizer", "train"]
    # from then on the run's own folder is the config
    assert "finished" in place.surefoot("train", str(place.run), expect=0)


def test_a_truncated_checkpoint_falls_back_one_generation_and_the_last_one_ends_the_run(place: Place) -> None:
    place.train(expect=0)
    truncate(place.run / "checkpoints" / "s6-a1")
    printed = place.train("train.num_steps=8", "--accept-changes", "train", expect=0)
    assert "checkpoint s6-a1 is rejected" in printed
    assert "restored step 4, checkpoint s4-a1, attempt 2" in printed
    assert "wrong-size" in place.surefoot("checkpoint", "verify", str(place.run / "checkpoints" / "s6-a1"), expect=1)
    for checkpoint in (place.run / "checkpoints").iterdir():
        truncate(checkpoint)
    printed = place.train("train.num_steps=10", "--accept-changes", "train", expect=5)
    assert "loads" in printed
    assert verify_ledger(place.run / "ledger.jsonl").ok


def truncate(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.distcp"):
        os.truncate(file, file.stat().st_size // 2)


def test_a_second_train_on_a_live_run_names_host_and_pid(place: Place) -> None:
    place.edit("num_steps = 6", "num_steps = 100000")
    first = subprocess.Popen([sys.executable, "-m", "surefoot.cli.main", "train", str(place.config)], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 100
        while not any(entry.event == "checkpoint.committed" for entry in read_ledger(place.run / "ledger.jsonl")):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        printed = place.train(expect=2)
        assert str(first.pid) in printed
        assert os.uname().nodename in printed
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 75
    finally:
        first.kill()
        first.wait(timeout=30)
    status = json.loads(place.surefoot("status", str(place.run), "--json", expect=0))
    assert status["phase"] == "stopped"
    assert not status["finished"]
    assert status["last_checkpoint"]["step"] == status["step"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no permission to mount a small disk here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_said_and_leaves_nothing_half_written(place: Place, small_disk: Path) -> None:
    printed = place.train(f"run.dir={small_disk / 'run'}", "model.d_model=64", "model.num_layers=4", expect=5)
    assert "room" in printed or "space" in printed
    assert "free" in printed
    assert list((small_disk / "run" / "checkpoints").glob("*")) == []
    assert verify_ledger(small_disk / "run" / "ledger.jsonl").ok


def test_a_halted_run_stays_halted_until_a_person_releases_it(place: Place) -> None:
    place.edit("[checkpoint]", "[heal]\nbreaker_in_a_row = 2\n[optimizer]\nlr = 1e30\nmax_grad_norm = 0.0\n[checkpoint]")
    printed = place.train("train.num_steps=50", expect=6)
    assert "not finite" in printed
    assert "surefoot resume" in place.surefoot("train", str(place.run), expect=6)
    assert "goes on" in place.surefoot("resume", str(place.run), "--cause", "tried a silly rate", expect=0)
    place.surefoot("train", str(place.run), expect=6)  # the cause is still there
    released = [entry for entry in read_ledger(place.run / "ledger.jsonl") if entry.event == "run.released"]
    assert released[0].reason == "tried a silly rate"


def torchrun(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [str(Path(sys.executable).parent / "surefoot"), "train", str(place.config), "parallel.dp_replicate=2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=place.folder)


@pytest.mark.timeout(300)
def test_the_same_file_runs_under_torchrun_and_says_what_is_missing(place: Place) -> None:
    result = torchrun(place)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no warm restart" in result.stdout
    assert [entry.event for entry in read_ledger(place.run / "ledger.jsonl")][-1] == "run.finished"
    ledgered = (place.run / "ledger.jsonl").read_bytes()
    refused = torchrun(place, "optimizer.lr=1e-2")
    assert refused.returncode != 0
    assert "lr was 0.0003, is 0.01" in refused.stderr
    assert (place.run / "ledger.jsonl").read_bytes() == ledgered


def test_a_live_run_is_left_alone_by_a_start_with_other_values(place: Place) -> None:
    place.edit("num_steps = 6", "num_steps = 100000")
    first = subprocess.Popen([sys.executable, "-m", "surefoot.cli.main", "train", str(place.config)], stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 100
        while not any(entry.event == "attempt.started" for entry in read_ledger(place.run / "ledger.jsonl")):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        config = (place.run / "config.toml").read_text()
        refused = torchrun(place, "train.num_steps=77", "--accept-changes", "train")
        assert refused.returncode != 0
        assert "live" in refused.stderr
        assert (place.run / "config.toml").read_text() == config
    finally:
        first.send_signal(signal.SIGTERM)
        first.wait(timeout=60)


def test_overrides_on_a_run_folder_count(place: Place) -> None:
    place.train(expect=0)
    run = str(place.run)
    place.surefoot("train", run, "train.num_steps=8", "--accept-changes", "train", expect=0)
    status = json.loads(place.surefoot("status", run, "--json", expect=0))
    assert (status["step"], status["finished"]) == (8, True)
    shown = (place.run / "config.toml").read_text()
    assert "# override" in next(line for line in shown.splitlines() if line.startswith("num_steps"))
    assert "# run.toml:" in next(line for line in shown.splitlines() if line.startswith("global_batch_size"))


def test_a_config_that_was_refused_can_be_corrected(place: Place) -> None:
    place.train("model.vocab_size=64", expect=2)
    assert not place.run.exists()
    place.train(expect=0)


def test_a_lost_or_cut_ledger_ends_a_start_with_5(place: Place) -> None:
    place.train(expect=0)
    ledger = place.run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:2]))
    assert "tail is cut" in place.surefoot("train", str(place.run), expect=5)
    ledger.unlink()
    assert "ledger" in place.surefoot("train", str(place.run), expect=5)
    ledger.write_bytes(b"".join(lines))
    place.surefoot("train", str(place.run), expect=0)


def test_data_made_in_another_way_than_the_config_says_is_refused(place: Place) -> None:
    place.train(expect=0)
    printed = place.train('data.tokenizer="bpe:300"', f"run.dir={place.folder / 'other'}", expect=4)
    assert "bpe:300" in printed
    assert "bytes" in printed
    assert not (place.folder / "other").exists()


def test_other_files_than_the_data_was_prepared_from_are_refused_before_a_run_and_told_in_one(place: Place) -> None:
    place.train(expect=0)
    (place.folder / "text" / "mine.txt").write_text("my own text " * 40)
    printed = place.train(f"run.dir={place.folder / 'other'}", expect=4)
    assert "20 files" in printed
    assert "now names 21" in printed
    assert "--force" in printed
    assert "goes on with what was prepared" in place.train("train.num_steps=8", "--accept-changes", "train", expect=0)


def test_another_shape_of_the_model_cannot_be_accepted(place: Place) -> None:
    place.train(expect=0)
    assert "changes nothing: the run is finished, on prepared" in place.train("data.path=another", expect=0)
    config = (place.run / "config.toml").read_text()
    assert "in units of 32" in place.train("data.max_seq_len=64", "train.num_steps=8", "--accept-changes", "train", expect=2)
    assert "another shape" in place.train("model.num_layers=2", "--accept-changes", "model", expect=2)
    assert (place.run / "config.toml").read_text() == config


def test_what_the_order_of_samples_hangs_on_can_be_changed_by_nobody(place: Place) -> None:
    place.train(expect=0)
    config = (place.run / "config.toml").read_text()
    printed = place.train("run.seed=9", "--accept-changes", "run", expect=2)
    assert "another order of samples" in printed
    assert "--accept-changes" not in printed
    assert (place.run / "config.toml").read_text() == config


def test_an_edited_factory_is_refused_and_can_be_accepted(place: Place) -> None:
    body = "    return Transformer(section, vocab_size)\n"
    source = f"from surefoot.model.transformer import Transformer\n\n\ndef make(section, vocab_size):\n{body}"
    (place.folder / "mine.py").write_text(source)
    place.edit("[model]", '[model]\nfactory = "mine:make"')
    place.train(expect=0)
    (place.folder / "mine.py").write_text(source + "# edited\n")
    more = ("train.num_steps=8", "--accept-changes", "train")
    config = (place.run / "config.toml").read_text()
    printed = place.train(*more, expect=2)
    assert "[code]" in printed
    assert (place.run / "config.toml").read_text() == config
    place.train(*more, "--accept-changes", "code", expect=0)


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(place: Place) -> None:
    place.train(expect=0)
    place.surefoot("data", "prepare", "text", "--out", "other", "--tokenizer", "bpe:300", "--name", "text", expect=0)
    shutil.copy(place.folder / "other" / "tokenizer.json", place.folder / "prepared" / "tokenizer.json")
    assert "tokenizer" in place.train("train.num_steps=8", "--accept-changes", "train", expect=4)


def test_a_checkpoint_under_another_name_is_rejected(place: Place) -> None:
    place.train(expect=0)
    checkpoints = place.run / "checkpoints"
    shutil.rmtree(checkpoints / "s6-a1")
    shutil.copytree(checkpoints / "s4-a1", checkpoints / "s6-a1")
    printed = place.train("train.num_steps=8", "--accept-changes", "train", expect=0)
    assert "s6-a1 is rejected" in printed
    assert "resumed from step 4, checkpoint s4-a1" in printed
