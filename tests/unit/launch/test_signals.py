"""Signals wake a selector and do nothing else, and what was there before comes back."""

from __future__ import annotations

import os
import select
import signal

import pytest

from surefoot.launch.process import LEAVE_SIGNALS
from surefoot.launch.signals import LeaveSignals


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_a_signal_wakes_and_is_named(number: signal.Signals) -> None:
    own = signal.getsignal(number)
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, before)  # whatever started the tests: nohup has SIGHUP ignored
    try:
        with LeaveSignals() as signals:
            assert signals.take() == []
            os.kill(os.getpid(), number)
            assert select.select([signals], [], [], 10.0)[0] == [signals]
            assert signals.take() == [number]
            assert signals.take() == []
        assert signal.getsignal(number) == before
    finally:
        signal.signal(number, own)


def test_two_interrupts_are_two() -> None:
    with LeaveSignals() as signals:
        taken = []
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            taken += signals.take()
        assert taken == [signal.SIGINT, signal.SIGINT]


def test_other_signals_are_not_ours() -> None:
    before = signal.signal(signal.SIGWINCH, lambda number, frame: None)
    try:
        with LeaveSignals() as signals:
            os.kill(os.getpid(), signal.SIGWINCH)
            assert signals.take() == []
    finally:
        signal.signal(signal.SIGWINCH, before)


def test_a_closing_terminal_is_one_of_them() -> None:
    assert signal.SIGHUP in LEAVE_SIGNALS


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with LeaveSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.take() == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
