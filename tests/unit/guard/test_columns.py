"""What a step's report says beside loss and norm: columns from signals, speed, and what a loop without gauges goes without."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.records import RankSignals, Signals
from surefoot.core.sections import DataSection, ModelSection, MonitorSection, RunConfig, StageSection
from surefoot.guard.capabilities import missing_capabilities
from surefoot.guard.columns import signal_columns, tells_parts
from surefoot.guard.speed import Speed
from surefoot.plan.hardware import peak_of_device

CPU = torch.device("cpu")
RANK = RankSignals(
    rank=0, loss_sum=30.0, num_live_tokens=10, data_wait_s=0.0, forward_backward_s=1.0, step_clock_s=0.0, cpu_s=0.0, local_norm=2.0,
    memory_bytes=7,
)  # fmt: skip
SIGNALS = Signals(
    step=4, attempt=1, generation=1, loss=3.0, num_live_tokens=10, grad_norm=0.5, num_nonfinite=0, leave_requested=False,
    save_requested=False, save_clock_s=0.0, save_stall_s=0.0, save_slot_free=True, block_requested=False,
    ranks=(RANK, replace(RANK, rank=1, loss_sum=0.0, num_live_tokens=0, local_norm=math.inf, memory_bytes=9)),
)  # fmt: skip


def test_what_was_not_measured_is_none_or_empty() -> None:
    columns = signal_columns(SIGNALS, losses=(), times={})
    assert [columns[name] for name in ("lr_applied_ratio", "loss_scale", "forward_s", "backward_s", "reduce_s")] == [None] * 5
    assert [dict(columns[name]) for name in ("group_norms", "update_ratios", "probes")] == [{}] * 3
    assert "loss_mean_128" not in columns
    silent = replace(SIGNALS, ranks=(replace(RANK, memory_bytes=0),))
    assert signal_columns(silent, losses=(), times={})["memory_bytes"] is None


def test_each_rank_has_its_own_figures() -> None:
    columns = signal_columns(replace(SIGNALS, lr_applied_ratio=0.5), losses=(3.0, 5.0), times={"forward_s": 0.25})
    assert columns["rank_losses"][0] == 3.0
    assert math.isnan(columns["rank_losses"][1])  # it counts no tokens
    assert (columns["rank_tokens"], columns["rank_norms"], columns["memory_bytes"]) == ((10, 0), (2.0, math.inf), 9)
    assert (columns["lr_applied_ratio"], columns["forward_s"], columns["loss_mean_500"]) == (0.5, 0.25, 4.0)


@pytest.mark.parametrize(
    ("step", "interval_steps", "world_size", "is_news", "wanted"),
    [
        (7, 0, 64, False, True),
        (7, 0, 65, False, False),
        (10, 0, 65, False, True),
        (7, 0, 1024, True, True),
        (7, 5, 2, False, False),
        (15, 5, 2, False, True),
        (7, 1, 1024, False, True),
    ],
)
def test_rows_of_many_ranks_have_columns_by_rank_at_a_cadence(
    step: int, interval_steps: int, world_size: int, is_news: bool, wanted: bool
) -> None:
    assert tells_parts(step, interval_steps=interval_steps, world_size=world_size, is_news=is_news) == wanted


def test_a_row_without_parts_has_all_the_rest() -> None:
    whole, bare = (signal_columns(SIGNALS, losses=(3.0, 5.0), times={}, by_part=by_part) for by_part in (True, False))
    assert whole.keys() - bare.keys() == {"rank_losses", "rank_tokens", "rank_norms", "group_norms", "update_ratios"}
    assert bare == {name: whole[name] for name in bare}


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = resolve_sizes(ModelSection(), 512)


def speed_of(model: nn.Module, **settings: float) -> Speed:
    stages = (StageSection(first_sample=0), StageSection(first_sample=100, seq_len=512))
    monitor = MonitorSection(**settings)  # type: ignore[arg-type]  # values are given by name
    config = RunConfig(data=DataSection(seq_len=256), stage=stages, monitor=monitor)
    return Speed(config, model=model, device=CPU, num_devices=4)


def test_mfu_is_a_share_of_the_peak_at_the_length_of_the_stage() -> None:
    model = Sized()
    speed = speed_of(model, peak_flops=1e12)
    assert speed.of_device(8000.0) == 2000.0
    for next_sample, seq_len in ((50, 256), (200, 512)):
        wanted = 2000.0 * model.sizes.flops_per_token(seq_len) / 1e12
        assert speed.mfu(8000.0, next_sample=next_sample) == pytest.approx(wanted)


def test_mfu_is_not_made_up() -> None:
    assert speed_of(Sized()).mfu(8000.0, next_sample=1) is None  # a CPU has no peak
    assert speed_of(nn.Linear(2, 2), peak_flops=1e12).mfu(8000.0, next_sample=1) is None
    assert speed_of(nn.Linear(2, 2), peak_flops=1e12, flops_per_token=1e6).mfu(8000.0, next_sample=1) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H200", "fp32", 66.9e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA GB200", "bf16", peak_of_device("gb200", dtype="bf16")),
        ("NVIDIA H100 PCIe", "bf16", 0.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 0.0),
        ("Tesla V100-SXM2-32GB", "bf16", 0.0),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_data_sheet(name: str, dtype: str, peak: float) -> None:
    assert peak_of_device(name, dtype=dtype) == peak


class Points:
    """Somebody's data."""

    next_sample = 0

    def __iter__(self) -> Iterator[None]:
        return self

    def __next__(self) -> None: ...

    def cursor(self) -> Mapping[str, Any]:
        return {}

    def seek(self, cursor: Mapping[str, Any]) -> None: ...


def test_a_loop_on_several_ranks_without_gauges_is_told() -> None:
    for world_size, wanted in ((1, 0), (2, 1)):
        lines = missing_capabilities(
            RunConfig(), model=nn.Linear(2, 2), data=Points(), evaluation=None, extra={}, world_size=world_size, under_agent=False
        )
        assert sum(line.startswith("no rank's own gradient") for line in lines) == wanted
