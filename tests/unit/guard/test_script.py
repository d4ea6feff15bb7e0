from __future__ import annotations

import json
from typing import Any

import pytest

from surefoot.core.records import Proceed, Signals, SkipUpdate
from surefoot.guard.script import ReplayTask, Script, script_from_json, task_from_json

SKIP = SkipUpdate("nonfinite", "the loss was nan")
SCRIPT = Script(skips={7: SKIP}, rates=((5, 0.5), (9, 0.25)), rotations=((4, 1), (8, 0)))


def signals(step: int, **values: Any) -> Signals:
    told: dict[str, Any] = {
        **{"attempt": 1, "generation": 1, "loss": 2.0, "num_live_tokens": 10, "grad_norm": 20.0, "num_nonfinite": 0},
        **{"leave_requested": False, "save_requested": False, "save_clock_s": 0.0, "save_stall_s": 0.0, "save_slot_free": True},
        **{"block_requested": False, "ranks": ()},
    }
    return Signals(step=step, **{**told, **values})


def act(step: int, **values: Any) -> SkipUpdate | Proceed:
    """What is done with step `step`."""
    return SCRIPT.action(signals(step - 1, **values), max_grad_norm=1.0, gradient_divisor=1.0)


def test_what_was_skipped_is_skipped_though_all_is_well_and_nothing_else() -> None:
    assert act(7) == SKIP
    other = act(8)
    assert isinstance(other, Proceed)
    assert other.clip_scale == pytest.approx(1.0 / 20.0 / 10)


def test_what_was_not_skipped_is_updated_with_though_it_is_ill() -> None:
    assert act(8, grad_norm=float("nan"), num_nonfinite=3).proceeds


def test_without_live_tokens_there_is_nothing_to_update_with() -> None:
    ended = act(8, num_live_tokens=0)
    assert isinstance(ended, SkipUpdate)
    assert ended.rule == "no_live_tokens"


def test_rates_and_rotations_hold_until_the_next() -> None:
    assert [SCRIPT.rate_factor(step) for step in (4, 5, 8, 9, 100)] == [1.0, 0.5, 0.5, 0.25, 0.25]
    assert [SCRIPT.rotation(step) for step in (3, 4, 7, 8)] == [0, 1, 1, 0]


def test_a_task_survives_a_file() -> None:
    task = ReplayTask(3, 9, SCRIPT, name_nonfinite=True)
    assert task_from_json(json.loads(json.dumps(task.to_json()))) == task
    assert script_from_json(json.loads(json.dumps(Script().to_json()))) == Script(skips={})
