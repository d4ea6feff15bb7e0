from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from surefoot.coordinate.budget import fold_history
from surefoot.coordinate.grades import Failure, NodeLoss
from surefoot.coordinate.restart import RestartHistory, decide
from surefoot.core.events import Event
from surefoot.core.records import Fault, LedgerEntry
from surefoot.core.sections import LaunchSection

LIMITS = LaunchSection(max_restarts=5, no_progress_limit=3, window_s=600.0, restart_wait_s=1.0)
FAULT = Fault("rank", "rank 1 raised", 1, 1, None, 10, 0.0, cause="exception", fingerprint="ValueError at a.py:1 in f")


class Book:
    """The lines that an agent writes, a minute apart."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []

    def tell(self, event: Event, *, step: int = 10, rule: str = "", **fields: Any) -> None:
        number = len(self.entries)
        stamp = datetime.fromtimestamp(60.0 * number, UTC).isoformat()
        self.entries.append(LedgerEntry(number, stamp, 1, 1, step, event.value, "agent", rule, "", fields, "", ""))

    def fault(self, fault: Fault) -> None:
        fields = {"fingerprint": fault.fingerprint, "nodes": list(fault.nodes), "step_known": fault.step_known}
        self.tell(Event.RANK_LOST, step=fault.step, rule=fault.what, **fields)

    def decided(self, kind: str, *, exit_code: int = 0, step: int = 10) -> None:
        self.tell(Event.RESTART_DECIDED, step=step, kind=kind, exit_code=exit_code)

    def history(self) -> RestartHistory:
        return fold_history(self.entries, limits=LIMITS)


def test_the_ledger_gives_the_history_that_the_decisions_made() -> None:
    book, history = Book(), RestartHistory()
    for step in (10, 10, 12, 12):
        fault = replace(FAULT, step=step, fingerprint=f"E at a.py:{len(book.entries)} in f")
        book.fault(fault)
        stamp_s = 60.0 * len(book.entries)
        instruction, history = decide(history, replace(fault, utc_s=stamp_s), LIMITS)
        assert instruction.kind == "restart"
        book.decided("restart", step=step)
    assert book.history() == history


def test_an_agent_that_was_killed_before_it_decided_leaves_no_failure() -> None:
    book = Book()
    book.fault(FAULT)
    assert book.history().failures == ()
    book.decided("restart")
    assert book.history().failures == (Failure(10, FAULT.fingerprint),)


@pytest.mark.parametrize(("step", "stands"), [(10, True), (11, False)])
def test_a_checkpoint_of_a_later_step_takes_a_failure_away(step: int, stands: bool) -> None:
    book = Book()
    book.fault(FAULT)
    book.decided("restart")
    book.tell(Event.CHECKPOINT_COMMITTED, step=step)
    assert bool(book.history().failures) == stands


def test_progress_starts_the_count_in_a_row_again_and_not_the_total() -> None:
    book = Book()
    for _ in range(2):
        book.decided("restart")
    book.tell(Event.CHECKPOINT_COMMITTED, step=20)
    history = book.history()
    assert (history.num_restarts, history.num_restarts_without_progress, history.newest_step) == (2, 0, 20)


def test_a_requeue_goes_on_counting_and_a_person_begins_anew() -> None:
    book = Book()
    book.fault(FAULT)
    book.decided("restart")
    book.decided("stop", exit_code=75)
    assert book.history().num_restarts == 1
    book.decided("stop", exit_code=93)
    history = book.history()
    assert (history.num_restarts, history.restarts_utc_s) == (0, ())
    assert history.failures  # what was not mended stops at once
    book.tell(Event.RUN_RELEASED)
    assert book.history() == RestartHistory(newest_step=10)


def test_a_step_that_nobody_knows_is_no_failure_at_it() -> None:
    book = Book()
    book.fault(replace(FAULT, step_known=False))
    book.decided("restart")
    assert book.history().failures == ()


def test_lost_nodes_are_known_with_their_time() -> None:
    book = Book()
    book.tell(Event.RUN_CREATED)
    book.fault(replace(FAULT, what="node", nodes=("a",)))
    book.decided("restart")
    assert book.history().lost_nodes == (NodeLoss("a", 60.0),)


def test_a_ledger_without_faults_has_no_history() -> None:
    assert fold_history([], limits=LIMITS) == RestartHistory()
