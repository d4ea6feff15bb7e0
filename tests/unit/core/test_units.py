from __future__ import annotations

import pytest

from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.hashing import key64
from surefoot.core.units import show_bytes, show_count, show_duration


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (999, "999"), (1234, "1.23k"), (1_234_567, "1.23M"), (2.5e9, "2.5G"), (0.25, "0.25")]
)
def test_counts(value: float, shown: str) -> None:
    assert show_count(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(12, "12 B"), (16384, "16.0 KiB"), (3 << 30, "3.0 GiB")])
def test_bytes(value: int, shown: str) -> None:
    assert show_bytes(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(2.5, "2.5s"), (61, "1m01s"), (7384, "2h03m"), (100_000, "1d03h")])
def test_durations(value: float, shown: str) -> None:
    assert show_duration(value) == shown


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock()
    assert (clock.monotonic_s(), clock.utc()) == (0.0, "2026-01-01T00:00:00.000Z")
    clock.sleep(61.5)
    assert (clock.monotonic_s(), clock.utc()) == (61.5, "2026-01-01T00:01:01.500Z")


def test_the_system_clock_stamps_in_utc_with_milliseconds() -> None:
    stamp = SystemClock().utc()
    assert stamp.endswith("Z")
    assert len(stamp) == len("2026-01-01T00:00:00.000Z")


def test_keys_do_not_collide_by_adding_up_and_never_change() -> None:
    assert key64(7, "a", 2) != key64(8, "a", 1)
    assert key64(1, "source", 0) == 0x36C48FFE387A2F7F  # frozen: sample orders hang on it
