"""What an interrupted preparation left: what was noted counts, what was not is cut off, what was changed is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from surefoot.data.journal import Damaged, Journal, Spool


def test_a_file_goes_on_behind_its_mark(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "a", header_bytes=4)
    spool.append(b"one")
    mark = spool.sync()
    spool.append(b"never noted")
    spool.close()
    spool = Spool(tmp_path / "a", mark=mark, header_bytes=4)
    spool.append(b"two")
    assert b"".join(spool.blocks()) == spool.rows(np.dtype("S6"))[0] == b"onetwo"
    spool.close()
    assert (tmp_path / "a").read_bytes() == bytes(4) + b"onetwo"


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_file_that_is_not_what_was_noted_is_refused(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path / "a")
    spool.append(b"one")
    mark = spool.sync()
    spool.close()
    Spool(tmp_path / "a", mark=mark).close()
    match damage:
        case "flip":
            (tmp_path / "a").write_bytes(b"ona")
        case "cut":
            (tmp_path / "a").write_bytes(b"on")
        case "gone":
            (tmp_path / "a").unlink()
    with pytest.raises(Damaged):
        Spool(tmp_path / "a", mark=mark)


def test_notes_are_of_one_key_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Journal(tmp_path, key="one").note("x", {"y": 1})
    assert Journal(tmp_path, key="one").read("x") == {"y": 1}
    assert not caplog.records
    assert Journal(tmp_path, key="two").read("x") is None
    assert "it begins anew" in caplog.text


@pytest.mark.parametrize("damage", ["value", "json", "shape"])
def test_a_note_that_was_changed_is_refused(tmp_path: Path, damage: str) -> None:
    journal = Journal(tmp_path, key="one")
    journal.note("x", {"y": 1})
    path = tmp_path / "work" / "x.json"
    changed = {"value": path.read_text().replace('"y":1', '"y":2'), "json": path.read_text()[:-1], "shape": json.dumps([1])}[damage]
    path.write_text(changed)
    with pytest.raises(Damaged, match="note x"):
        journal.read("x")
