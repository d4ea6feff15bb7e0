from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from surefoot.data.read_ahead import ReadAhead

LIMIT_S = 20.0  # against a hang


class Fetch:
    """Squares its key; notes who asked and in which order; waits where a key is held."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.threads: set[str] = set()
        self.held: dict[int, threading.Event] = {}
        self.entered: dict[int, threading.Event] = {}

    def hold(self, key: int) -> threading.Event:
        self.held[key], self.entered[key] = threading.Event(), threading.Event()
        return self.held[key]

    def __call__(self, key: int) -> int:
        self.began.append(key)
        self.threads.add(threading.current_thread().name)
        if key in self.held:
            self.entered[key].set()
            assert self.held[key].wait(LIMIT_S)
        if key < 0:
            raise ValueError(f"no square of {key}")
        return key * key


@pytest.fixture
def fetch() -> Fetch:
    return Fetch()


@pytest.fixture
def ahead(fetch: Fetch) -> Iterator[ReadAhead[int, int]]:
    reader = ReadAhead(fetch, depth=3)
    yield reader
    for event in fetch.held.values():
        event.set()
    reader.close()


def test_what_was_announced_is_fetched_by_another_thread(ahead: ReadAhead[int, int], fetch: Fetch) -> None:
    gate = fetch.hold(4)
    ahead.announce([4, 5, 6])
    assert fetch.entered[4].wait(LIMIT_S)
    assert {name.split("_")[0] for name in fetch.threads} == {"read-ahead"}
    gate.set()
    assert [ahead.take(key) for key in (4, 5, 6)] == [16, 25, 36]
    assert sorted(fetch.began) == [4, 5, 6]


def test_no_more_than_its_depth_is_ahead(ahead: ReadAhead[int, int], fetch: Fetch) -> None:
    gate = fetch.hold(0)
    ahead.announce(range(10))
    assert fetch.entered[0].wait(LIMIT_S)
    gate.set()
    assert ahead.take(0) == 0
    ahead.announce(range(1, 10))
    assert [ahead.take(key) for key in (1, 2, 3)] == [1, 4, 9]
    ahead.announce([1, 2])  # taken: announcing again fetches again
    assert ahead.take(1) == 1
    assert set(fetch.began) <= {0, 1, 2, 3}


def test_what_nobody_announced_is_fetched_by_who_asks(ahead: ReadAhead[int, int], fetch: Fetch) -> None:
    assert ahead.take(7) == 49
    assert fetch.threads == {threading.current_thread().name}


def test_what_has_not_begun_is_fetched_by_who_asks_and_not_waited_for(ahead: ReadAhead[int, int], fetch: Fetch) -> None:
    fetch.hold(1)
    ahead.announce([1, 2])
    assert fetch.entered[1].wait(LIMIT_S)
    assert ahead.take(2) == 4
    assert fetch.began == [1, 2]


def test_an_owner_who_is_back_at_once_fetches_alone(fetch: Fetch) -> None:
    reader = ReadAhead(fetch, depth=2, head_start_s=3600.0)
    reader.announce([1, 2, 3])
    assert [reader.take(key) for key in (1, 2)] == [1, 4]
    reader.announce([3])
    reader.close()  # waits for no head start
    assert fetch.threads == {threading.current_thread().name}
    assert fetch.began == [1, 2]


def test_an_error_waits_for_its_key(ahead: ReadAhead[int, int]) -> None:
    ahead.announce([-1, 3])
    assert ahead.take(3) == 9
    with pytest.raises(ValueError, match="no square of -1"):
        ahead.take(-1)
    assert ahead.take(4) == 16


def test_what_is_dropped_is_fetched_anew(ahead: ReadAhead[int, int], fetch: Fetch) -> None:
    fetch.hold(1)
    ahead.announce([1, 2, 3])
    assert fetch.entered[1].wait(LIMIT_S)
    ahead.drop()
    ahead.announce([8])
    fetch.held[1].set()
    assert ahead.take(8) == 64
    assert ahead.take(2) == 4
    assert fetch.began.count(2) == 1
    assert 3 not in fetch.began


def test_an_error_that_was_dropped_is_nobodys(ahead: ReadAhead[int, int]) -> None:
    ahead.announce([-2])
    ahead.drop()
    assert ahead.take(2) == 4


def test_it_has_no_thread_before_it_is_needed_and_none_after_its_end(fetch: Fetch) -> None:
    before = threading.active_count()
    reader = ReadAhead(fetch, depth=2)
    assert reader.take(3) == 9
    assert threading.active_count() == before
    fetch.hold(5)
    reader.announce([5, 6])
    assert fetch.entered[5].wait(LIMIT_S)
    assert threading.active_count() == before + 1
    fetch.held[5].set()
    reader.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="was closed"):
        reader.announce([7])
    reader.close()


def test_closing_waits_for_what_is_under_way(fetch: Fetch) -> None:
    reader = ReadAhead(fetch, depth=2)
    fetch.hold(1)
    reader.announce([1])
    assert fetch.entered[1].wait(LIMIT_S)
    closer = threading.Thread(target=reader.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    fetch.held[1].set()
    closer.join(LIMIT_S)
    assert not closer.is_alive()
