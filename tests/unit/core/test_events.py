from __future__ import annotations

from pathlib import Path

import surefoot
from surefoot.core.events import Event


def test_every_event_is_used() -> None:
    """A name that nothing says is a promise that nothing keeps."""
    source = "".join(path.read_text() for path in Path(surefoot.__file__).parent.rglob("*.py"))
    assert [event.name for event in Event if f"Event.{event.name}" not in source] == []


def test_names_are_noun_and_past() -> None:
    assert all(event.value.count(".") == 1 and event.value == event.value.lower() for event in Event)
