"""What the uploader of an agent decides on its own: what is lost, and under which generation it speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.checkpoint.slot import PAGE_BYTES, Slot, SlotHeader, SlotState
from surefoot.cli.uploader import generation_to_tell_under, give_up_older
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.observe.ledger import Ledger


@pytest.mark.parametrize(("own", "told"), [(3, 2), (2, 2), (1, 1)], ids=["not opened yet", "the newest", "an old one"])
def test_it_opens_no_generation(tmp_path: Path, own: int, told: int) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="agent")
    ledger.append(Event.GENERATION_STARTED, generation=2, attempt=1, step=0)
    assert generation_to_tell_under(ledger.path, own=own) == told


@pytest.mark.parametrize(("generation", "state"), [(1, SlotState.FREE), (2, SlotState.STAGING)], ids=["a dead rank's", "a live rank's"])
def test_only_what_dead_ranks_left_half_full_is_freed(generation: int, state: SlotState) -> None:
    slot = Slot.create(rank=0, number=0)
    slot.claim(
        SlotHeader(run="r", id="s1-a1", step=1, attempt=1, generation=generation, rank=0, world_size=1, file="f", image_bytes=PAGE_BYTES)
    )
    give_up_older([slot], generation=2)
    assert slot.state() is state
    slot.close()
