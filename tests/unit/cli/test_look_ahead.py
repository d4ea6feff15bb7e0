"""The look-ahead opens the run again when its ledger has grown, and not at each look."""

from __future__ import annotations

from pathlib import Path

from surefoot.cli.look_ahead import View
from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.events import Event
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from tests.three_sources import make_run, prepare_three


def test_it_is_old_when_the_ledger_has_grown_and_half_a_minute_has_gone(tmp_path: Path) -> None:
    run = make_run(tmp_path, prepare_three(tmp_path / "data"))
    clock = ManualClock()
    view = View(run, clock=clock)
    clock.sleep(31.0)
    assert not view.is_old
    Ledger(run / LEDGER_NAME, clock=SystemClock(), by="test").append(Event.SHARD_QUARANTINED, generation=1, attempt=1, step=1)
    assert view.is_old
    view.close()
    again = View(run, clock=clock)
    Ledger(run / LEDGER_NAME, clock=SystemClock(), by="test").append(Event.SHARD_QUARANTINED, generation=1, attempt=1, step=2)
    clock.sleep(29.0)
    assert not again.is_old
    clock.sleep(2.0)
    assert again.is_old
    again.close()
