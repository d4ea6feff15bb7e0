from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.monitor.windows import WINDOWS, loss_figures, with_loss


def after(values: Sequence[float]) -> tuple[float, ...]:
    losses: tuple[float, ...] = ()
    for value in values:
        losses = with_loss(losses, value)
    return losses


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=700))
def test_figures_are_those_of_the_newest_losses(values: list[float]) -> None:
    figures = loss_figures(after(values))
    for window in WINDOWS:
        newest = np.asarray(values[-window:])
        assert figures[f"loss_mean_{window}"] == pytest.approx(newest.mean(), abs=1e-9)
        assert figures[f"loss_std_{window}"] == pytest.approx(newest.std(ddof=1), abs=1e-9)
        for percent in (10, 50, 90):
            assert figures[f"loss_p{percent}_{window}"] == pytest.approx(np.quantile(newest, percent / 100), abs=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_enters_nothing(value: float) -> None:
    assert after([1.0, value, 2.0]) == (1.0, 2.0)
    assert loss_figures(after([1.0, value, 2.0])) == loss_figures((1.0, 2.0))


def test_nothing_is_said_of_fewer_than_two() -> None:
    assert loss_figures(()) == loss_figures((3.0,)) == {}


def test_no_more_is_kept_than_the_long_window_needs() -> None:
    losses = after([float(step) for step in range(1000)])
    assert (losses[0], losses[-1], len(losses)) == (500.0, 999.0, 500)
