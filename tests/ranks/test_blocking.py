"""The blocklist under our own loop: the same bits on every layout, whoever is killed; and batches of which nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.cli.main import run
from surefoot.core.blocking import Block, TokenSpan
from surefoot.core.records import StepReport
from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    LaunchSection,
    ModelSection,
    NumericsSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from surefoot.data.manifest import load_manifest
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.ledger import read_ledger
from surefoot.train.loop import training_steps
from tests.steerable import ask, began_with, final_digest, skip, taken, until_committed
from tests.texts import prepare_documents

RunRanks = Callable[..., list[Any]]
BATCH = 6
LAYOUTS = {"alone": ParallelSection(), "ddp-2": ParallelSection(dp_replicate=2), "fsdp-2": ParallelSection(dp_shard=2)}


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_documents(tmp_path_factory.mktemp("text"), sentence="pack my box with five dozen liquor jugs. ")


def config_of(data: Path, run_dir: Path, *, layout: str, sums: Any = "exact", num_steps: int = 16) -> RunConfig:
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data), seq_len=32),
        model=ModelSection(num_layers=1, d_model=32, num_heads=2),
        train=TrainSection(num_steps=num_steps, global_batch_size=BATCH, micro_batch_size=2, eval_interval_steps=0, eval_num_samples=2),
        schedule=ScheduleSection(kind="constant", warmup_steps=1),
        parallel=LAYOUTS[layout],
        numerics=NumericsSection(sums=sums),
        checkpoint=CheckpointSection(interval_steps=4, keep_last=9),
        launch=LaunchSection(threads_per_rank=1),
    )


def train(*, rank: int, world_size: int, config: RunConfig, wishes: tuple[Block, ...] = (), kill_at: int = 0) -> list[StepReport]:
    """Rank 0 asks after step 4, and gives the look at the ledger its second; the last rank kills itself after step `kill_at`."""
    reports = []
    run_dir = Path(config.run.dir)
    for report in training_steps(config):
        reports.append(report)
        if rank == 0 and wishes and report.step == 4:
            until_committed(run_dir)
            ask(run_dir, *wishes)
        if rank == 0 and wishes and report.step == 5:
            time.sleep(1.0)  # so long may a wish take until it is seen
        if rank == world_size - 1 and report.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    return reports


def run_on(*, rank: int, world_size: int, config: RunConfig) -> None:
    for _ in training_steps(config):
        pass


def masked(data: Path, first: int, end: int, *, effective_sample: int = 0) -> Block:
    manifest = load_manifest(data)
    spans = (TokenSpan("text", first, end),)
    return Block("document", "ab" * 16, "mask", spans=spans, effective_sample=effective_sample, manifest_sha256=manifest.sha256)


def test_a_wish_in_a_live_run_that_is_killed_gives_the_bits_of_one_that_knew_it_on_another_layout(
    run_ranks: RunRanks, text_data: Path, tmp_path: Path
) -> None:
    run_dir, knew = tmp_path / "run", tmp_path / "knew"
    config = config_of(text_data, run_dir, layout="ddp-2")
    wishes = (masked(text_data, 0, 900), skip(64, 71))
    with pytest.raises(AssertionError, match="died"):
        run_ranks(train, 2, init=False, config=config, wishes=wishes, kill_at=9)
    told = run_ranks(train, 2, init=False, config=config)
    since = taken(run_dir)[0][1]
    assert 30 <= since <= 42
    assert [report.loss for report in told[0]] == [report.loss for report in told[1]]
    jumps = np.diff([report.next_sample for report in told[0]])
    assert sorted({*jumps.tolist()}) == [BATCH, BATCH + 7]
    (verified,) = [entry for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event == "replay.verified"]
    assert verified.reason == "the same bits"
    began_with(knew, fold_blocks(read_ledger(run_dir / "ledger.jsonl")).blocks)
    (alone,) = run_ranks(train, 1, init=False, config=config_of(text_data, knew, layout="alone"))
    assert final_digest(knew) == final_digest(run_dir)
    before, after = ([report.num_live_tokens for report in alone if (report.next_sample <= since) is early] for early in (True, False))
    assert min(after) < 0.9 * min(before)


@pytest.mark.parametrize(("layout", "sums"), [("ddp-2", "float"), ("fsdp-2", "exact")])
def test_batches_without_a_live_token_change_no_bit(layout: str, sums: str, run_ranks: RunRanks, text_data: Path, tmp_path: Path) -> None:
    """Everything is masked after the third step: six further ones end with its bits."""
    short, long = (config_of(text_data, tmp_path / name, layout=layout, sums=sums, num_steps=steps) for name, steps in (("3", 3), ("9", 9)))
    run_ranks(train, 2, init=False, config=short)
    num_tokens = load_manifest(text_data).sources["text"].splits["train"].tokens
    began_with(tmp_path / "9", (masked(text_data, 0, num_tokens, effective_sample=3 * BATCH),))
    reports = run_ranks(train, 2, init=False, config=long)[0]
    assert [report.action for report in reports] == [*["proceed"] * 3, *["skip"] * 6]
    assert [(report.loss, report.grad_norm, report.num_live_tokens) for report in reports[3:]] == [(0.0, 0.0, 0)] * 6
    assert final_digest(tmp_path / "9") == final_digest(tmp_path / "3")
    rules = [entry.rule for entry in read_ledger(tmp_path / "9" / "ledger.jsonl") if entry.event == "update.skipped"]
    assert rules == ["no_live_tokens"] * 6


@pytest.mark.parametrize("at_step", [0, 9])
def test_a_run_whose_shard_is_gone_names_it_and_goes_on_without_it(at_step: int, run_ranks: RunRanks, tmp_path: Path) -> None:
    """From the start, or behind a checkpoint whose probe reads it."""
    data = prepare_documents(tmp_path, sentence="pack my box with five dozen liquor jugs. ", shard_bytes=1000)
    config = config_of(data, tmp_path / "run", layout="alone", sums="float", num_steps=20)
    if at_step:
        with pytest.raises(AssertionError, match="died"):
            run_ranks(train, 1, init=False, config=config, kill_at=at_step)
    (data / "text" / "train" / "00003.tok").unlink()
    for _ in range(2):
        with pytest.raises(AssertionError, match="data block RUN --shard text/00003"):
            run_ranks(run_on, 1, init=False, config=config)
    assert run(["data", "block", str(tmp_path / "run"), "--shard", "text/00003", "--reason", "it is gone"]) == 0
    run_ranks(run_on, 1, init=False, config=config)
    entries = read_ledger(tmp_path / "run" / "ledger.jsonl")
    (lost,) = [entry for entry in entries if entry.event == "shard.quarantined"]
    assert (lost.fields["shard"], lost.fields["kind"]) == ("text/00003", "missing")
    asked = next(entry.seq for entry in entries if entry.event == "block.asked")
    saved = [entry.step for entry in entries if entry.seq < asked and entry.event in ("checkpoint.committed", "checkpoint.adopted")]
    assert taken(tmp_path / "run")[0][:2] == ("text/00003", BATCH * max(saved, default=0))
    assert entries[-1].event == "run.finished"
