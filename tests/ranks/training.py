"""Shared by tests that train our own loop on real ranks."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

import pytest

from surefoot.core.records import StepReport
from surefoot.core.sections import RunConfig
from surefoot.observe.ledger import read_ledger
from surefoot.train.loop import open_run, training_steps
from surefoot.train.sample import text_sample
from surefoot.train.step import train_step

PROBE_STEPS = 2


def all_reports(*, rank: int, world_size: int, config: RunConfig) -> tuple[list[StepReport], str]:
    """Of a run to its end, and a few words of the model."""
    with open_run(config) as (parts, guard):
        guard.restore()
        reports = []
        while guard.begin():
            reports.append(train_step(parts, guard))
        return reports, text_sample(parts, num_tokens=5)


def stop_after(*, rank: int, world_size: int, config: RunConfig, stop_step: int) -> None:
    for report in training_steps(config):
        if report.step == stop_step:
            os.kill(os.getpid(), signal.SIGKILL)


def ledgered_digest(run_dir: Path) -> str:
    return str(read_ledger(run_dir / "ledger.jsonl")[-1].fields["state_digest"])


def compare_reports(reports: list[StepReport], alone: list[StepReport]) -> None:
    """With those of one process: float32 sums in another order."""
    for report, expected in zip(reports, alone, strict=True):
        assert report.loss == pytest.approx(expected.loss, abs=1e-5)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert report.val_loss == (pytest.approx(expected.val_loss, abs=1e-5) if expected.val_loss is not None else None)
        assert report.num_live_tokens == expected.num_live_tokens
        assert report.next_sample == expected.next_sample


def compare_signals(reports: list[StepReport], alone: list[StepReport], *, probes: bool = True) -> None:
    """What is told per group of parameters, with what one process tells; `probes` where both compute the same atoms and no phantoms."""
    for report, expected in zip(reports, alone, strict=True):
        assert list(report.group_norms) == list(expected.group_norms)
        assert dict(report.group_norms) == pytest.approx(dict(expected.group_norms), rel=1e-3)
        assert math.hypot(*report.group_norms.values()) == pytest.approx(report.grad_norm, rel=1e-6)
        # From a sample, which is another one where tensors are cut; and the first update of a weight is of the size of its rate.
        assert dict(report.update_ratios) == pytest.approx(dict(expected.update_ratios), rel=0.1)
        assert report.lr_applied_ratio == (pytest.approx(1.0) if report.step > 1 else None)
        assert bool(report.update_ratios) == (report.step > 1)
        assert bool(report.probes) == (report.step % PROBE_STEPS == 0)
        if probes:
            assert dict(report.probes) == pytest.approx(dict(expected.probes), rel=2e-3, abs=1e-9)
        assert len(report.rank_norms) == len(report.rank_losses)
        assert all(math.isfinite(norm) and norm > 0 for norm in report.rank_norms)
