"""Which source comes when: counts against shares, and against counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.data.mixture import MAX_PERIOD, MIXTURE, Mixture, integer_weights

WEIGHTS = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


def counted(sources: Any, num_sources: int) -> Any:
    """How many of each source come before each sample, by counting."""
    counts = np.zeros((len(sources) + 1, num_sources), dtype=np.int64)
    np.cumsum(np.asarray(sources)[:, None] == np.arange(num_sources), axis=0, out=counts[1:])
    return counts


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 2**64 - 1))
def test_arithmetic_equals_counting_and_no_source_drifts(weights: list[int], key: int) -> None:
    mixture = Mixture(weights, key=key)
    num_samples = 4 * mixture.period + 3
    sources, before = mixture.at(np.arange(num_samples))
    counts = counted(sources, len(weights))
    assert (before == counts[np.arange(num_samples), sources]).all()
    assert all((mixture.counts(offset) == counts[offset]).all() for offset in range(0, num_samples, max(1, num_samples // 20)))
    shares = np.array(weights) / mixture.period
    assert np.abs(counts - np.arange(num_samples + 1)[:, None] * shares).max() < 2
    assert (counts[4 * mixture.period] == 4 * np.array(weights)).all(), "whole periods are exact"
    for source, weight in enumerate(weights):
        places = np.flatnonzero(sources == source)[: 4 * weight]
        assert (mixture.offset_of(source, np.arange(4 * weight)) == places).all() if weight else places.size == 0


def test_repetitions_do_not_begin_alike() -> None:
    """With a batch of the period's size, a fixed pattern would give every rank one source for ever."""
    sources, _ = Mixture([7, 2, 1], key=3).at(np.arange(2000))
    firsts = sources.reshape(200, 10)[:, 0]
    assert set(firsts.tolist()) == {0, 1, 2}


def test_values_are_frozen() -> None:
    assert MIXTURE == "chairman-rotated/1"
    assert Mixture([3, 2, 1], key=42).at(np.arange(18))[0].tolist() == GOLDEN


GOLDEN = [0, 2, 1, 0, 0, 1, 1, 0, 0, 1, 0, 2, 0, 2, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [((0.7, 0.2, 0.1), (7, 2, 1)), ((1.0, 1.0), (1, 1)), ((3.0, 0.0), (1, 0)), ((0.333333, 0.666667), (10923, 21845))],
)
def test_weights_become_integers(weights: tuple[float, ...], wanted: tuple[int, ...]) -> None:
    assert integer_weights({str(index): weight for index, weight in enumerate(weights)}, where="here") == wanted


def test_a_share_that_would_give_nothing_is_refused() -> None:
    assert sum(integer_weights({"a": 1.0, "b": 1.234567e-4}, where="here")) == MAX_PERIOD
    with pytest.raises(ConfigError, match=r"source 'b' has a share of 1\.2e-06: it would get no sample"):
        integer_weights({"a": 1.0, "b": 1.234567e-6}, where="here")
    with pytest.raises(ConfigError, match="are 0"):
        integer_weights({"a": 0.0}, where="here")
