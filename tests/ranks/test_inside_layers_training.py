"""Our own loop with layers and sequences cut over ranks: losses, held-out losses, samples, a crash, a resume under other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.sections import (
    CheckpointSection,
    DataSection,
    ModelSection,
    MonitorSection,
    ParallelSection,
    RunConfig,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from surefoot.observe.ledger import read_ledger
from tests.ranks.training import PROBE_STEPS, all_reports, compare_reports, compare_signals, ledgered_digest, stop_after

RunRanks = Callable[..., list[Any]]

ONE, TP2, CP2 = ParallelSection(), ParallelSection(tp=2), ParallelSection(cp=2)
TP2_FSDP2 = replace(TP2, dp_shard=2)
SAVE_STEPS = 2


def config_of(data_dir: Path, run_dir: Path, parallel: ParallelSection, *, num_steps: int = 6) -> RunConfig:
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data_dir), seq_len=32),
        model=ModelSection(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, qk_norm=True, window=20, z_loss=1e-4),
        train=TrainSection(num_steps=num_steps, global_batch_size=9, micro_batch_size=3, eval_interval_steps=3, eval_num_samples=8),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        parallel=parallel,
        monitor=MonitorSection(probe_interval_steps=PROBE_STEPS),
        checkpoint=CheckpointSection(interval_steps=SAVE_STEPS, keep_last=2),
    )


@pytest.mark.parametrize("parallel", [TP2, CP2], ids=["tp", "cp"])
def test_it_trains_as_one_process_does(run_ranks: RunRanks, data_dir: Path, tmp_path: Path, parallel: ParallelSection) -> None:
    ((alone, sample),) = run_ranks(all_reports, 1, init=False, config=config_of(data_dir, tmp_path / "one", ONE))
    for reports, text in run_ranks(all_reports, 2, init=False, config=config_of(data_dir, tmp_path / "two", parallel)):
        assert text == sample
        compare_reports(reports, alone)
        compare_signals(reports, alone)


@pytest.mark.parametrize("parallel", [TP2, CP2], ids=["tp", "cp"])
def test_after_a_crash_it_ends_with_the_bits_of_an_undisturbed_run(
    run_ranks: RunRanks, data_dir: Path, tmp_path: Path, parallel: ParallelSection
) -> None:
    run_ranks(all_reports, 2, init=False, config=config_of(data_dir, tmp_path / "undisturbed", parallel))
    disturbed = config_of(data_dir, tmp_path / "disturbed", parallel)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(stop_after, 2, init=False, config=disturbed, stop_step=5)
    ((reports, _), *_) = run_ranks(all_reports, 2, init=False, config=disturbed)
    assert reports[-1].step == 6
    assert ledgered_digest(tmp_path / "disturbed") == ledgered_digest(tmp_path / "undisturbed")


def test_a_run_goes_on_from_one_cut_to_the_next(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    """What was recorded after each checkpoint is repeated within the tolerance, which is what another arithmetic can be asked for."""
    ((alone, _),) = run_ranks(all_reports, 1, init=False, config=config_of(data_dir, tmp_path / "one", ONE, num_steps=9))
    for parallel, stop_step in [(TP2, 3), (CP2, 5), (TP2_FSDP2, 7)]:
        config = config_of(data_dir, tmp_path / "run", parallel, num_steps=9)
        with pytest.raises(AssertionError, match="died"):
            run_ranks(stop_after, parallel.num_ranks, init=False, config=config, stop_step=stop_step)
    ((reports, _),) = run_ranks(all_reports, 1, init=False, config=config_of(data_dir, tmp_path / "run", ONE, num_steps=9))
    assert reports[-1].step == 9
    for report, expected in zip(reports, alone[-len(reports) :], strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)
    entries = read_ledger(tmp_path / "run" / "ledger.jsonl")
    replays = [entry.fields["mode"] for entry in entries if entry.event == "replay.verified"]
    assert replays == ["tolerance"] * 3
    assert not [entry for entry in entries if entry.event == "replay.differed"]
