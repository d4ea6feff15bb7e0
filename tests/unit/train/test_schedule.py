from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.sections import ScheduleSection
from surefoot.train.schedule import learning_rate


def rates(schedule: ScheduleSection, num_steps: int) -> list[float]:
    return [learning_rate(step, schedule, num_steps=num_steps, peak=1.0) for step in range(1, num_steps + 1)]


def test_the_warm_up_is_linear_and_reaches_the_peak() -> None:
    assert rates(ScheduleSection(kind="constant", warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_wsd_holds_then_decays_to_the_floor() -> None:
    linear = rates(ScheduleSection(warmup_steps=0, decay_steps=4, decay_shape="linear", final_ratio=0.2), 8)
    assert linear == pytest.approx([1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    one_minus_sqrt = rates(ScheduleSection(warmup_steps=0, decay_steps=4), 8)
    assert one_minus_sqrt[4:] == pytest.approx([1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75), 0.0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=10, final_ratio=0.1)
    assert learning_rate(60, schedule, num_steps=110, peak=2.0) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(110, schedule, num_steps=110, peak=2.0) == pytest.approx(0.2)


def test_beyond_the_end_it_stays() -> None:
    schedule = ScheduleSection(kind="cosine", warmup_steps=0, final_ratio=0.1)
    assert learning_rate(500, schedule, num_steps=100, peak=1.0) == learning_rate(100, schedule, num_steps=100, peak=1.0)


@given(st.sampled_from(["wsd", "cosine", "constant"]), st.integers(0, 50), st.integers(0, 50), st.integers(1, 200))
def test_every_rate_lies_between_zero_and_the_peak(kind: str, warmup: int, decay: int, num_steps: int) -> None:
    schedule = ScheduleSection(kind=kind, warmup_steps=warmup, decay_steps=decay)  # type: ignore[arg-type]  # drawn from the literals
    assert all(0.0 <= rate <= 1.0 for rate in rates(schedule, num_steps))
