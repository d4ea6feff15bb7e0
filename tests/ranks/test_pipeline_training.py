"""Our own loop over the stages of a pipeline: losses, held-out losses, a crash, a resume under other layouts, timeouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
from surefoot.train.loop import open_run
from tests.ranks.training import PROBE_STEPS, all_reports, compare_reports, compare_signals, ledgered_digest, stop_after

RunRanks = Callable[..., list[Any]]

ONE = ParallelSection()
PP2 = ParallelSection(pp=2)
FSDP2 = ParallelSection(dp_shard=2)
INTERLEAVED_2X2 = ParallelSection(pp=2, dp_shard=2, pp_schedule="interleaved")


def config_of(data_dir: Path, run_dir: Path, parallel: ParallelSection, *, num_steps: int = 6, tied: bool = True) -> RunConfig:
    """A ramp: 4 atoms in each of the first steps, then 6; the held-out samples are 3 atoms."""
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data_dir), seq_len=32),
        model=ModelSection(num_layers=4, d_model=32, num_heads=2, tie_embeddings=tied),
        train=TrainSection(
            num_steps=num_steps,
            global_batch_size=18,
            micro_batch_size=3,
            batch_ramp=((0, 12), (30, 18)),
            eval_interval_steps=3,
            eval_num_samples=8,
        ),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        parallel=parallel,
        monitor=MonitorSection(probe_interval_steps=PROBE_STEPS),
        checkpoint=CheckpointSection(interval_steps=2, keep_last=2),
    )


@pytest.mark.parametrize(("parallel", "tied"), [(PP2, True), (INTERLEAVED_2X2, False)], ids=["1f1b-tied", "interleaved-sharded-untied"])
def test_a_pipeline_trains_as_one_process_does(
    run_ranks: RunRanks, data_dir: Path, tmp_path: Path, parallel: ParallelSection, tied: bool
) -> None:
    ((alone, sample),) = run_ranks(all_reports, 1, init=False, config=config_of(data_dir, tmp_path / "one", ONE, tied=tied))
    config = config_of(data_dir, tmp_path / "many", parallel, tied=tied)
    for reports, text in run_ranks(all_reports, parallel.num_ranks, init=False, config=config):
        assert text == sample
        compare_reports(reports, alone)
        compare_signals(reports, alone)


def test_a_crashed_pipeline_ends_with_the_bits_of_an_undisturbed_one(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    undisturbed = config_of(data_dir, tmp_path / "undisturbed", PP2)
    run_ranks(all_reports, 2, init=False, config=undisturbed)
    disturbed = config_of(data_dir, tmp_path / "disturbed", PP2)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(stop_after, 2, init=False, config=disturbed, stop_step=5)
    ((reports, _), *_) = run_ranks(all_reports, 2, init=False, config=disturbed)
    assert [report.step for report in reports] == [5, 6]
    assert ledgered_digest(tmp_path / "disturbed") == ledgered_digest(tmp_path / "undisturbed")


def test_a_run_goes_on_in_and_out_of_a_pipeline(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    ((alone, _),) = run_ranks(all_reports, 1, init=False, config=config_of(data_dir, tmp_path / "one", ONE, num_steps=9))
    for parallel, stop_step in [(PP2, 3), (ONE, 5), (PP2, 7)]:
        config = config_of(data_dir, tmp_path / "run", parallel, num_steps=9)
        with pytest.raises(AssertionError, match="died"):
            run_ranks(stop_after, parallel.num_ranks, init=False, config=config, stop_step=stop_step)
    ((reports, _), *_) = run_ranks(all_reports, 2, init=False, config=config_of(data_dir, tmp_path / "run", FSDP2, num_steps=9))
    assert [(report.step, report.attempt) for report in reports] == [(7, 4), (8, 4), (9, 4)]
    for report, expected in zip(reports, alone[6:], strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)


def groups_of(*, rank: int, world_size: int, config: RunConfig) -> list[float]:
    with open_run(config):
        groups = torch.distributed.distributed_c10d._world.pg_map
        return [float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds()) for group in groups]


def test_every_group_has_the_configured_timeout(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, tmp_path / "run", PP2)
    for timeouts in run_ranks(groups_of, 2, init=False, config=config):
        assert len(timeouts) >= 4  # the default one, the loop's, the saves', the stages'
        assert set(timeouts) == {config.launch.collective_limit_s}
