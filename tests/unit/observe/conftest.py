from __future__ import annotations

from collections.abc import Callable

import pytest

from surefoot.core.records import StepReport


@pytest.fixture
def report() -> Callable[..., StepReport]:
    """A report of one step; every field can be given."""

    def make(step: int, **given: object) -> StepReport:
        values: dict[str, object] = {
            "step": step,
            "attempt": 1,
            "generation": 1,
            "loss": 5.0 - step / 1000,
            "num_live_tokens": 4096,
            "tokens": 4096 * step,
            "grad_norm": 0.5,
            "clip_scale": 1.0,
            "lr": 1e-3,
            "action": "proceed",
            "next_sample": 16 * step,
            "step_s": 0.1,
            "data_wait_s": 0.0,
            "forward_backward_s": 0.08,
            "exchange_s": 0.001,
            "update_s": 0.01,
            "save_s": 0.0,
            "evaluate_s": 0.0,
            "tokens_per_s": 40960.0,
            "cpu_s": 2.0 * step,
        }
        return StepReport(**{**values, **given})  # type: ignore[arg-type]  # values are given by name

    return make
