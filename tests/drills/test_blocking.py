"""`data block` by the public commands: on a run that trains on two ranks under its agent, one of which is killed right after; and as the
way out for a run that has lost a shard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.cli.main import run
from surefoot.config import load_config
from surefoot.core.sections import SourceSection
from surefoot.data.manifest import load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.recipe import run_order
from surefoot.data.shards import HEADER_BYTES
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.ledger import manifest_positions, read_ledger, verify_ledger
from surefoot.observe.live import read_live
from surefoot.observe.metrics import read_steps
from tests.drills.live_job import CONFIG, LIMIT_S, LiveJob, write_texts

ONE_RANK = (
    ("num_steps = 100000", "num_steps = 24"),
    ("dp_replicate = 2", "dp_replicate = 1"),
    ("interval_steps = 50", "interval_steps = 4"),
)


def block(job: LiveJob, *arguments: str) -> None:
    command = [sys.executable, "-m", "surefoot.cli.main", "data", "block", str(job.dir), *arguments, "--reason", "a drill"]
    subprocess.run(command, cwd=job.folder, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)


@pytest.mark.timeout(200)
def test_a_live_run_leaves_out_what_it_is_asked_to_and_so_does_its_next_generation(tmp_path: Path) -> None:
    job = LiveJob(tmp_path)
    try:
        job.until(lambda: job.entries("checkpoint.committed"))
        block(job, "--document", "text/3")
        job.until(lambda: job.entries("block.taken"))
        end = 4 * job.step() + 40_000  # so far off that the run cannot have passed it before it is asked
        block(job, "--samples", f"{end - 40_000}:{end}")
        job.until(lambda: len(job.entries("block.taken")) == 2)
        live = read_live(job.dir)
        assert live is not None
        os.kill(live.ranks[1].pid, signal.SIGKILL)
        job.until(lambda: job.entries("replay.verified"))
        since = fold_blocks(read_ledger(job.dir / "ledger.jsonl")).blocks[1].effective_sample
        job.until(lambda: job.step() > since // 4 + 2)  # the verified steps may end before the place where the range begins
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(LIMIT_S) == 75
    finally:
        job.kill()
    (verified,) = job.entries("replay.verified")
    assert verified.reason == "the same bits"
    assert [entry.attempt for entry in job.entries("block.taken")] == [1, 1]
    assert not job.entries("block.refused")
    check = verify_ledger(job.dir / "ledger.jsonl", manifests=manifest_positions(job.dir))
    assert check.ok, check
    rows = {row["step"]: row for row in read_steps(job.dir).to_pylist()}
    steps = sorted(rows)
    assert steps == list(range(1, len(steps) + 1))
    (jump,) = [step for step in steps[1:] if rows[step]["next_sample"] - rows[step - 1]["next_sample"] != 4]
    assert (rows[jump - 1]["next_sample"], rows[jump]["next_sample"]) == (since, end + 4)


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surefoot.cli.main", "train", "run.toml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def shards_by_first_sample(folder: Path) -> list[str]:
    """Names of the shards, in the order in which the run comes to them."""
    config = load_config(folder / "run.toml").config
    manifest = load_manifest(config.data.path)
    order, start, firsts = run_order(manifest, config), 0, {}
    for shard in manifest.split("text", "train").shards:
        firsts[shard.name] = int(order.holding("text", start, start + shard.tokens, first=0, until=10_000)[0])
        start += shard.tokens
    return sorted(firsts, key=lambda name: firsts[name])


@pytest.mark.timeout(200)
def test_a_run_that_has_lost_a_shard_names_it_once_and_goes_on_without_it(tmp_path: Path) -> None:
    """In the shard that comes last a bit is wrong: checkpoints lie before it."""
    config = CONFIG
    for old, new in ONE_RANK:
        config = config.replace(old, new)
    (tmp_path / "run.toml").write_text(config)
    write_texts(tmp_path / "text")
    source = SourceSection(name="text", files=(str(tmp_path / "text"),))
    prepare([source], out=tmp_path / "prepared", tokenizer="bytes", heldout_fraction=0.01, workers=1, shard_bytes=200)
    *_, damaged = shards_by_first_sample(tmp_path)
    with (tmp_path / "prepared" / "text" / "train" / f"{damaged}.tok").open("r+b") as file:
        file.seek(HEADER_BYTES + 6)
        (byte,) = file.read(1)
        file.seek(HEADER_BYTES + 6)
        file.write(bytes([byte ^ 1]))
    ended = train(tmp_path)
    assert ended.returncode == 4, ended.stderr
    assert f"surefoot data block RUN --shard text/{damaged}" in ended.stderr
    assert run(["data", "block", str(tmp_path / "run"), "--shard", f"text/{damaged}", "--reason", "lost"]) == 0
    assert any(entry.event == "checkpoint.committed" for entry in read_ledger(tmp_path / "run" / "ledger.jsonl"))
    ended = train(tmp_path)
    assert ended.returncode == 0, ended.stderr
    entries = read_ledger(tmp_path / "run" / "ledger.jsonl")
    lost = [(entry.fields["shard"], entry.fields["kind"]) for entry in entries if entry.event == "shard.quarantined"]
    assert lost == [(f"text/{damaged}", "damaged-block")]
    assert [block.name for block in fold_blocks(entries).blocks] == [f"text/{damaged}"]
    assert any(entry.event == "run.finished" for entry in entries)
    assert not any(entry.event in ("block.refused", "replay.differed") for entry in entries)
