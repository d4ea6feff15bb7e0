"""Shared by tests that train our own loop on real ranks."""

from __future__ import annotations

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
