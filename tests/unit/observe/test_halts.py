"""What holds a run back: halts and pauses until a person releases them, a stop for the job that it was given to."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.core.errors import Held, TrainingHalted
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.observe.halts import refuse_halted, refuse_stopped, standing_halt
from surefoot.observe.wishes import Wish, open_wish


def entries(*told: tuple[Event, dict[str, Any]], generation: int = 1) -> list[LedgerEntry]:
    return [
        LedgerEntry(seq, "", generation, 1, 7, event.value, "rank 0", "rule", "because", fields, "", "")
        for seq, (event, fields) in enumerate(told, start=1)
    ]


Line = tuple[Event, dict[str, Any]]
PAUSE_ORDER: Line = (Event.ORDER_TAKEN, {"verb": "pause", "by": "ada@here"})
PAUSED: Line = (Event.RUN_PAUSED, {})
HALTED: Line = (Event.RUN_HALTED, {})


@pytest.mark.parametrize("holds", [(PAUSE_ORDER,), (PAUSED,), (HALTED,), (PAUSE_ORDER, PAUSED, HALTED)])
def test_whatever_holds_a_run_back_is_over_when_a_person_says_so(holds: tuple[Line, ...]) -> None:
    with pytest.raises(TrainingHalted, match="because"):
        refuse_halted(entries(*holds))
    released: tuple[Line, ...] = ((Event.RUN_RELEASED, {}), (Event.RUN_UNPAUSED, {}), (Event.ORDER_TAKEN, {"verb": "resume"}))
    for over in released:
        assert standing_halt(entries(*holds, over)) is None
        assert standing_halt(entries(over, *holds)) is not None


def test_a_pause_names_who_asked_for_it() -> None:
    with pytest.raises(TrainingHalted, match="paused at step 7 by ada@here: because"):
        refuse_halted(entries(PAUSE_ORDER))


def test_other_orders_hold_nobody_back() -> None:
    others = [(Event.ORDER_TAKEN, {"verb": verb, "checkpoint": "s1-a1"}) for verb in ("save", "stop", "rollback")]
    refuse_halted(entries(*others, (Event.ORDER_REFUSED, {"verb": "pause"})))


def test_a_stop_holds_for_its_own_generation() -> None:
    stopped = entries((Event.ORDER_TAKEN, {"verb": "stop", "by": "ada@here"}), (Event.RANK_LOST, {}), generation=3)
    with pytest.raises(TrainingHalted, match="stopped at step 7 by ada@here"):
        refuse_stopped(stopped, generation=3)
    refuse_stopped(stopped, generation=4)


def test_an_order_to_go_back_is_the_wish_of_the_next_start_until_it_was_met() -> None:
    order = (Event.ORDER_TAKEN, {"verb": "rollback", "checkpoint": "s4-a1", "by": "ada@here"})
    assert open_wish(entries(order)) == Wish("s4-a1", "ada@here")
    for met in (Event.ATTEMPT_STARTED, Event.RUN_ROLLED_BACK):
        assert open_wish(entries(order, (met, {}))) is None
    assert open_wish(entries((Event.ORDER_TAKEN, {"verb": "save", "checkpoint": "s4-a1"}))) is None


def test_a_hold_lasts_until_a_person_releases_it() -> None:
    held: Line = (Event.RESTART_DECIDED, {"kind": "stop", "exit_code": 7})
    with pytest.raises(Held, match="held at step 7 after a large-scale fault: because"):
        refuse_halted(entries(held))
    refuse_halted(entries(held, (Event.RUN_RELEASED, {})))
    refuse_halted(entries((Event.RESTART_DECIDED, {"kind": "stop", "exit_code": 93}), (Event.RESTART_DECIDED, {"kind": "restart"})))
