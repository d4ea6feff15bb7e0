"""The order of one source over epochs and lengths: everything once, nothing lost, found back."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import surefoot.data.source_order as source_order
from surefoot.data.source_order import Era, Source


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 4 units, so that small sources have several."""
    monkeypatch.setattr(source_order, "WINDOW_UNITS", 4)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_token_comes_once_per_epoch_wherever_the_length_changes(data: st.DataObject) -> None:
    unit = data.draw(st.sampled_from([8, 12]))
    lengths = [length for length in range(2, unit + 1) if unit % length == 0]
    num_units = data.draw(st.integers(1, 30))
    source = Source(
        "text", num_units, unit, seed=data.draw(st.integers(0, 99)), num_reserve=data.draw(st.integers(0, min(3, num_units - 1)))
    )
    era = Era(source, 0, data.draw(st.sampled_from(lengths)))
    seen: dict[int, set[int]] = defaultdict(set)
    for _ in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(0, 2 * num_units * unit // era.seq_len))
        places = era.at(np.arange(count))
        for number in range(count):
            spans, epoch = era.spans(number), int(places.epochs[number])
            assert era.epoch_of(number) == epoch
            assert places.starts[number] < 0 or spans == ((int(places.starts[number]), era.seq_len),)
            tokens = {token for start, length in spans for token in range(start, start + length)}
            assert len(tokens) == sum(length for _, length in spans)
            assert not tokens & seen[epoch], "a token came twice in an epoch"
            seen[epoch] |= tokens
        era = era.after(count, seq_len=data.draw(st.sampled_from(lengths)))
    for epoch in sorted(seen)[:-1]:
        assert len(seen[epoch]) == source.num_regular * unit, "an epoch that is over lacks tokens"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_where_a_token_comes_is_found_back(data: st.DataObject) -> None:
    num_units = data.draw(st.integers(2, 20))
    source = Source("text", num_units, 8, seed=data.draw(st.integers(0, 99)), num_reserve=data.draw(st.integers(0, 1)))
    lengths = st.sampled_from([2, 4, 8])
    era = Era(source, 0, data.draw(lengths)).after(data.draw(st.integers(0, 40)), seq_len=data.draw(lengths))
    count = 2 * num_units * 8 // era.seq_len
    epochs = era.at(np.arange(count)).epochs
    spans = [era.spans(number) for number in range(count)]
    start = data.draw(st.integers(0, num_units * 8 - 1))
    end = min(num_units * 8, start + data.draw(st.integers(1, 30)))
    for epoch in range(era.epoch, int(epochs[-1]) + 1):
        holds = [any(first < end and first + length > start for first, length in row) for row in spans]
        wanted = [number for number in range(count) if epochs[number] == epoch and holds[number]]
        assert [number for number in era.numbers_of(start, end, epoch=epoch).tolist() if number < count] == wanted


def test_pieces_of_a_unit_do_not_stand_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_order, "WINDOW_UNITS", 4096)
    starts = Era(Source("text", 4096, 64, seed=1), 0, 4).at(np.arange(4096)).starts
    assert (np.diff(starts // 64) == 0).mean() < 0.01


def test_epochs_seeds_sources_and_restarts_have_orders_of_their_own() -> None:
    def order(source: Source, epoch: int = 0) -> list[int]:
        starts: list[int] = Era(source, 0, 4).at(np.arange(epoch * 500, (epoch + 1) * 500)).starts.tolist()
        return starts

    orders = [
        order(Source("text", 500, 4, seed=7)),
        order(Source("text", 500, 4, seed=7), epoch=1),
        order(Source("text", 500, 4, seed=8)),  # seed + epoch would be the one before
        order(Source("code", 500, 4, seed=7)),
        order(Source("text", 500, 4, seed=7, restart=1)),
    ]
    assert len({tuple(one) for one in orders}) == len(orders)
    assert {tuple(sorted(one)) for one in orders} == {tuple(range(0, 2000, 4))}
