"""Planned memory against what the allocator reports for a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.sections import ModelSection, RunConfig, TrainSection
from surefoot.plan.memory.estimate import estimate
from surefoot.plan.memory.implementations import SUREFOOT_BF16
from surefoot.plan.records import FP32, Layout, Workload
from surefoot.train.loop import training_steps

pytestmark = pytest.mark.gpu

MODEL = ModelSection(num_layers=8, d_model=1024, num_heads=16, num_kv_heads=4, vocab_size=32000)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_a_step_is_the_planned_one(device: torch.device, config: RunConfig, precision: str) -> None:
    """Within 15%, and never above it by more than the allocator's share: beyond, a plan would promise a layout that does not fit."""
    train = TrainSection(num_steps=3, global_batch_size=8, micro_batch_size=4, precision="bf16" if precision == "bf16" else "fp32")
    data = replace(config.data, seq_len=512)
    wanted = replace(config, model=MODEL, train=train, data=data, checkpoint=replace(config.checkpoint, interval_steps=0))
    work = Workload(resolve_sizes(MODEL, MODEL.vocab_size), 512, 8, dtypes=SUREFOOT_BF16 if precision == "bf16" else FP32)
    planned = estimate(work, Layout(micro_batch_size=4))
    steps = training_steps(wanted)
    next(steps)  # moments are there from now on
    torch.cuda.reset_peak_memory_stats(device)
    next(steps)
    assert torch.cuda.max_memory_allocated(device) == pytest.approx(planned.allocated, rel=0.15)
    assert torch.cuda.max_memory_reserved(device) <= 1.05 * planned.reserved
    del steps
