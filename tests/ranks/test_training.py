"""Our own loop on real ranks: layouts, sample order, resume, leaving, skipping."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.manifest import parse_id
from surefoot.checkpoint.state import collect
from surefoot.core.records import StepReport
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
from surefoot.tensors.digest import tensor_digest
from surefoot.train.loop import open_run, training_steps
from surefoot.train.step import Parts, train_step
from tests.ranks.training import PROBE_STEPS, compare_signals

RunRanks = Callable[..., list[Any]]


def config_of(data_dir: Path, run_dir: Path, **parts: Any) -> RunConfig:
    return RunConfig(
        run=RunSection(name="test", dir=str(run_dir), seed=11),
        data=DataSection(path=str(data_dir), seq_len=32),
        model=ModelSection(num_layers=2, d_model=32, num_heads=2),
        train=parts.get(
            "train", TrainSection(num_steps=6, global_batch_size=12, micro_batch_size=3, eval_interval_steps=3, eval_num_samples=8)
        ),
        schedule=ScheduleSection(kind="constant", warmup_steps=2),
        parallel=parts.get("parallel", ParallelSection()),
        monitor=MonitorSection(probe_interval_steps=PROBE_STEPS),
        checkpoint=parts.get("checkpoint", CheckpointSection(interval_steps=2, keep_last=2)),
    )


def all_reports(*, rank: int, world_size: int, config: RunConfig) -> list[StepReport]:
    return list(training_steps(config))


def ledgered_digest(run_dir: Path) -> str:
    return str(read_ledger(run_dir / "ledger.jsonl")[-1].fields["state_digest"])


LAYOUTS = {
    "ddp-2": ParallelSection(dp_replicate=2),
    "ddp-3": ParallelSection(dp_replicate=3),
    "fsdp-2": ParallelSection(dp_shard=2),
    "hsdp-2x2": ParallelSection(dp_replicate=2, dp_shard=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_losses_of_one_process(layout: str, run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    parallel = LAYOUTS[layout]
    (alone,) = run_ranks(all_reports, 1, init=False, config=config_of(data_dir, tmp_path / "one"))
    together = run_ranks(all_reports, parallel.num_ranks, init=False, config=config_of(data_dir, tmp_path / "many", parallel=parallel))
    for reports in together:
        assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6]
        for one, many in zip(alone, reports, strict=True):
            # float32 sums in another order: 6 steps of a 2-layer model stay within 1e-5 of each other
            assert many.loss == pytest.approx(one.loss, abs=1e-5)
            assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
            assert many.num_live_tokens == one.num_live_tokens
            assert many.next_sample == one.next_sample
        assert reports[-1].val_loss == pytest.approx(alone[-1].val_loss, abs=1e-4)
        compare_signals(reports, alone, probes=False)
        assert len(set(reports[0].rank_norms)) == parallel.num_ranks  # after the reduction all would have the same


Consumed = list[list[list[str]]]


def consumed_by(*, rank: int, world_size: int, config: RunConfig) -> Consumed:
    """Per step and per forward of this rank: a hash of each row of tokens, taken from the tensor inside the forward."""
    steps: Consumed = []
    with open_run(config) as (parts, guard):
        guard.restore()
        parts.cut.module.register_forward_pre_hook(lambda _, given: _note(steps, given[0]))
        while guard.begin():
            steps.append([])
            train_step(parts, guard)
    return steps


def _note(steps: Consumed, tokens_BS: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # the held-out samples go through the same forward
        steps[-1].append([hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in tokens_BS])


def in_order_of_samples(by_rank: list[Consumed]) -> list[list[str]]:
    """Rank r computes atom m * R + r in its micro-step m; phantom rows (all zeros) are left out."""
    phantom = hashlib.sha256(torch.zeros(32, dtype=torch.int64).numpy().tobytes()).hexdigest()[:16]
    return [
        [row for atoms in zip(*ranks, strict=True) for atom in atoms for row in atom if row != phantom]
        for ranks in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), [(1, 1), (1, 5), (2, 3), (2, 5), (3, 2), (3, 5), (4, 1), (4, 4)])
def test_the_samples_are_the_same_for_every_number_of_ranks_and_split(
    num_ranks: int, micro_batch_size: int, run_ranks: RunRanks, data_dir: Path, tmp_path: Path
) -> None:
    ramped = TrainSection(num_steps=4, global_batch_size=11, micro_batch_size=micro_batch_size, batch_ramp=((0, 5), (8, 7), (17, 11)))
    config = config_of(data_dir, tmp_path / "run", train=ramped, parallel=ParallelSection(dp_replicate=num_ranks))
    consumed = in_order_of_samples(run_ranks(consumed_by, num_ranks, init=False, config=config))
    assert [len(rows) for rows in consumed] == [5, 5, 7, 11]  # an entry counts from the first step at or after its sample
    reference = config_of(data_dir, tmp_path / "reference", train=replace(ramped, micro_batch_size=11))
    assert consumed == in_order_of_samples(run_ranks(consumed_by, 1, init=False, config=reference))


def stop_after(*, rank: int, world_size: int, config: RunConfig, stop_step: int) -> None:
    for report in training_steps(config):
        if report.step == stop_step:
            _await_published(Path(config.run.dir), step=stop_step - 1)
            os._exit(0)  # as a crash: nothing is closed, nothing said


def _await_published(run_dir: Path, *, step: int) -> None:
    """The save of that step goes on beside the loop: a crash before its commit would lose it."""
    deadline_s = time.monotonic() + 30
    while not any(parsed and parsed[0] == step for parsed in map(parse_id, published(run_dir / "checkpoints"))):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize("layout", ["ddp-2", "ddp-3", "fsdp-2", "hsdp-2x2"])
def test_a_crashed_run_ends_with_the_bits_of_an_undisturbed_one(layout: str, run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    parallel = LAYOUTS[layout]
    undisturbed = config_of(data_dir, tmp_path / "undisturbed", parallel=parallel)
    run_ranks(all_reports, parallel.num_ranks, init=False, config=undisturbed)
    disturbed = config_of(data_dir, tmp_path / "disturbed", parallel=parallel)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(stop_after, parallel.num_ranks, init=False, config=disturbed, stop_step=5)
    (reports, *_) = run_ranks(all_reports, parallel.num_ranks, init=False, config=disturbed)
    assert [report.step for report in reports] == [5, 6]
    assert ledgered_digest(tmp_path / "disturbed") == ledgered_digest(tmp_path / "undisturbed")
    other_seed = replace(disturbed, run=replace(disturbed.run, dir=str(tmp_path / "other"), seed=12))
    run_ranks(all_reports, parallel.num_ranks, init=False, config=other_seed)
    assert ledgered_digest(tmp_path / "other") != ledgered_digest(tmp_path / "undisturbed")  # the control


def test_a_run_goes_on_under_another_layout(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    def config(parallel: ParallelSection, num_steps: int) -> RunConfig:
        train = TrainSection(num_steps=num_steps, global_batch_size=12, micro_batch_size=3)
        return config_of(data_dir, tmp_path / "run", parallel=parallel, train=train, checkpoint=CheckpointSection(interval_steps=2))

    with pytest.raises(AssertionError, match="died"):
        run_ranks(stop_after, 2, init=False, config=config(LAYOUTS["ddp-2"], 8), stop_step=3)
    with pytest.raises(AssertionError, match="died"):
        run_ranks(stop_after, 4, init=False, config=config(LAYOUTS["hsdp-2x2"], 8), stop_step=5)
    (reports,) = run_ranks(all_reports, 1, init=False, config=config(ParallelSection(), 8))
    assert [report.step for report in reports] == [5, 6, 7, 8]
    assert reports[0].attempt == 3
    undisturbed = replace(config(ParallelSection(), 8), run=RunSection(name="test", dir=str(tmp_path / "undisturbed"), seed=11))
    (alone,) = run_ranks(all_reports, 1, init=False, config=undisturbed)
    for report, expected in zip(reports, alone[4:], strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)  # other sums in steps 1 to 4


def leave_when_one_is_told(*, rank: int, world_size: int, config: RunConfig) -> list[int]:
    steps = []
    try:
        for report in training_steps(config):
            steps.append(report.step)
            if rank == 1 and report.step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
    except SystemExit as leave:
        return [*steps, int(str(leave.code))]
    return steps


def test_a_signal_to_one_rank_lets_all_save_and_leave_with_75(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, tmp_path / "run", parallel=LAYOUTS["ddp-2"], checkpoint=CheckpointSection(interval_steps=100))
    told = run_ranks(leave_when_one_is_told, 2, init=False, config=config)
    assert told == [[1, 2, 3, 4, 75], [1, 2, 3, 4, 75]]
    events = [(entry.event, entry.step) for entry in read_ledger(tmp_path / "run" / "ledger.jsonl")]
    events = [event for event in events if event != ("checkpoint.verified", 4)]  # nobody waits for it on the way out
    assert events == [("run.created", 0), ("attempt.started", 0), ("checkpoint.committed", 4), ("run.left", 4)]


def skip_one(*, rank: int, world_size: int, config: RunConfig, sick_steps: tuple[int, ...]) -> tuple[list[str], bool, int]:
    """Actions per step, whether the sick steps left every bit of model and optimizer alone, and the exit code."""
    actions: list[str] = []
    unchanged = True
    try:
        with open_run(config) as (parts, guard):
            guard.restore()
            parts.parameters[0].register_hook(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                lambda gradient: gradient * torch.nan if rank == 1 and guard.step + 1 in sick_steps else gradient
            )
            while guard.begin():
                before = _bits(parts)
                report = train_step(parts, guard)
                actions.append(report.action)
                if report.action != "proceed":
                    unchanged = unchanged and _bits(parts) == before
    except SystemExit as leave:
        return actions, unchanged, int(str(leave.code))
    return actions, unchanged, 0


def _bits(parts: Parts) -> dict[str, int]:
    return {key: tensor_digest(tensor) for key, tensor in collect(parts.cut.module, parts.optimizer).tensors.items()}


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all_without_touching_a_bit(
    run_ranks: RunRanks, data_dir: Path, tmp_path: Path
) -> None:
    config = config_of(data_dir, tmp_path / "run", parallel=LAYOUTS["ddp-2"])
    results = run_ranks(skip_one, 2, init=False, config=config, sick_steps=(3,))
    assert results == [(["proceed", "proceed", "skip", "proceed", "proceed", "proceed"], True, 0)] * 2
    skips = [entry for entry in read_ledger(tmp_path / "run" / "ledger.jsonl") if entry.event == "update.skipped"]
    assert [(entry.step, entry.rule) for entry in skips] == [(3, "nonfinite")]


def test_the_third_skip_in_a_row_pauses_the_run_which_ends_with_6(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, tmp_path / "run", parallel=LAYOUTS["ddp-2"])
    results = run_ranks(skip_one, 2, init=False, config=config, sick_steps=(2, 3, 4, 5))
    assert results == [(["proceed", "skip", "skip", "pause"], True, 6)] * 2


def timeouts_of_all_groups(*, rank: int, world_size: int, config: RunConfig) -> list[float]:
    with open_run(config):
        groups = torch.distributed.distributed_c10d._world.pg_map
        return [_default_timeout(group) for group in groups]


def _default_timeout(group: torch.distributed.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_every_group_of_every_layout_has_the_configured_timeout(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, tmp_path / "run", parallel=LAYOUTS["hsdp-2x2"])
    for timeouts in run_ranks(timeouts_of_all_groups, 4, init=False, config=config):
        assert len(timeouts) >= 5  # the default one, the loop's, the saves', and two of the mesh
        assert set(timeouts) == {config.launch.collective_limit_s}


class Drawing(torch.nn.Module):
    """A model that drops: it draws from torch's own generator."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, 16)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(16, vocab_size)

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.drop(self.embed(tokens_BS))))


def build_drawing(section: ModelSection, vocab_size: int) -> torch.nn.Module:
    return Drawing(vocab_size)


def draw(*, rank: int, world_size: int, config: RunConfig) -> list[float]:
    """Losses of a model with dropout, whose factory is this file."""
    sys.modules["drawing_model"] = sys.modules[__name__]
    return [report.loss for report in training_steps(config)]


def test_what_a_model_draws_depends_on_seed_step_and_atom_only(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    def config(name: str, parallel: ParallelSection, *, seed: int = 11, eval_interval_steps: int = 0) -> RunConfig:
        train = TrainSection(
            num_steps=4, global_batch_size=12, micro_batch_size=3, eval_interval_steps=eval_interval_steps, eval_num_samples=8
        )
        made = config_of(data_dir, tmp_path / name, parallel=parallel, train=train)
        return replace(made, run=replace(made.run, seed=seed), model=ModelSection(factory="drawing_model:build_drawing"))

    (alone,) = run_ranks(draw, 1, init=False, config=config("alone", ParallelSection()))
    for layout in ("ddp-2", "ddp-3"):
        together = run_ranks(draw, LAYOUTS[layout].num_ranks, init=False, config=config(layout, LAYOUTS[layout]))
        assert together[0] == pytest.approx(alone, abs=1e-5)
    (evaluated,) = run_ranks(draw, 1, init=False, config=config("evaluated", ParallelSection(), eval_interval_steps=1))
    assert evaluated == alone  # evaluation draws nothing
    (other,) = run_ranks(draw, 1, init=False, config=config("other", ParallelSection(), seed=12))
    assert other != pytest.approx(alone, abs=1e-3)  # the control


def test_bf16_is_the_same_on_two_ranks_and_goes_on_to_the_same_bits(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    def config(name: str) -> RunConfig:
        train = TrainSection(num_steps=4, global_batch_size=12, micro_batch_size=3, precision="bf16", eval_num_samples=4)
        return config_of(data_dir, tmp_path / name, parallel=LAYOUTS["ddp-2"], train=train)

    reports, other = run_ranks(all_reports, 2, init=False, config=config("undisturbed"))
    assert [report.loss for report in reports] == [report.loss for report in other]
    with pytest.raises(AssertionError, match="died"):
        run_ranks(stop_after, 2, init=False, config=config("disturbed"), stop_step=3)
    run_ranks(all_reports, 2, init=False, config=config("disturbed"))
    assert ledgered_digest(tmp_path / "disturbed") == ledgered_digest(tmp_path / "undisturbed")
