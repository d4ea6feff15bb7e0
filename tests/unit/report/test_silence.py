from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError
from surefoot.core.events import Event
from surefoot.core.holder import LockRecord, this_process
from surefoot.core.strict_json import dumps
from surefoot.observe.ledger import Ledger
from surefoot.observe.live import LiveRecord, write_live
from surefoot.report.silence import Signs, judge_silence, signs_of

WELL = Signs(is_expected=False, lock_is_held=True, live_age_s=1.0, step_age_s=1.0)


def found(signs: Signs) -> str:
    return judge_silence(signs, silent_s=10.0).silence


def test_a_run_that_makes_steps_or_is_supervised_through_a_long_phase_is_not_silent() -> None:
    assert found(WELL) == "none"
    assert found(replace(WELL, step_age_s=500.0)) == "none"
    assert found(replace(WELL, step_age_s=None)) == "none"


def test_a_run_without_any_sign_is_gone() -> None:
    assert found(replace(WELL, live_age_s=11.0, step_age_s=11.0)) == "run-gone"
    assert found(Signs(False, False, None, None)) == "run-gone"
    assert found(Signs(False, False, 11.0, None)) == "run-gone"


def test_what_died_at_once_is_not_silent_before_its_time_and_never_looks_like_telemetry_alone() -> None:
    assert found(Signs(False, False, 1.0, 20.0)) == "none"
    assert found(Signs(False, False, 10.5, 9.5)) == "none"
    assert found(Signs(False, False, 11.5, 10.5)) == "run-gone"


def test_a_run_that_starts_has_no_sign_but_its_lock() -> None:
    assert found(Signs(False, True, None, None)) == "none"


def test_steps_without_a_live_record_are_telemetry_that_is_gone() -> None:
    assert found(replace(WELL, live_age_s=60.0)) == "telemetry-gone"
    assert found(replace(WELL, live_age_s=None)) == "telemetry-gone"


def test_nothing_is_expected_of_a_run_that_is_over_or_waits_for_a_person() -> None:
    assert found(Signs(True, False, None, 9000.0)) == "none"


class Folder:
    """Of a run that has told the ledger things."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, ManualClock()
        (path / "config.toml").write_text('[run]\nname = "watched"\n')
        self._ledger = Ledger(path / "ledger.jsonl", clock=self.clock, by="rank 0")
        self.tell(Event.GENERATION_STARTED, world_size=1)

    def tell(self, event: Event, **fields: object) -> None:
        self._ledger.append(event, generation=1, attempt=1, step=3, fields=fields)

    def hold(self) -> None:
        here = this_process()
        (self.path / "lock").write_text(dumps(LockRecord("j", here, 1, self.clock.utc(), 30.0).as_json()))
        write_live(self.path, LiveRecord(here.pid, here.host, 1, 1, "step", 3, (), self.clock.utc(), 0))

    def signs(self) -> Signs:
        return signs_of(self.path, clock=self.clock)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_signs_of_a_run_that_is_held_and_of_one_that_nobody_holds(folder: Folder) -> None:
    assert folder.signs() == Signs(False, False, None, None)
    folder.hold()
    folder.clock.sleep(7.0)
    assert folder.signs() == Signs(False, True, 7.0, None)
    (folder.path / "lock").unlink()
    assert folder.signs() == Signs(False, False, 7.0, None)


@pytest.mark.parametrize("event", [Event.RUN_FINISHED, Event.RUN_HALTED, Event.RUN_PAUSED])
def test_an_end_and_a_pause_are_expected(folder: Folder, event: Event) -> None:
    folder.tell(event)
    assert folder.signs().is_expected


def test_a_hold_is_expected(folder: Folder) -> None:
    folder.tell(Event.RESTART_DECIDED, kind="stop", exit_code=7)
    assert folder.signs().is_expected


def test_a_stop_by_a_person_is_expected_until_the_next_start(folder: Folder) -> None:
    folder.tell(Event.ORDER_TAKEN, verb="stop", by="ada")
    assert folder.signs().is_expected
    folder.tell(Event.GENERATION_STARTED, world_size=1)
    assert not folder.signs().is_expected


def test_a_save_by_order_and_a_signal_say_nothing_of_an_end(folder: Folder) -> None:
    folder.tell(Event.ORDER_TAKEN, verb="save", by="ada")
    folder.tell(Event.RUN_LEFT)
    assert not folder.signs().is_expected


def test_where_no_run_is_there_are_no_signs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        signs_of(tmp_path / "nothing")
