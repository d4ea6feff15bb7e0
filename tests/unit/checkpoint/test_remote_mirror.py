from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.mirror import next_copy, remote_retirements
from surefoot.core.records import CheckpointRef


def ref(step: int, **changes: Any) -> CheckpointRef:
    found = CheckpointRef(id=f"s{step}-a1", step=step, attempt=1, parent=None, state_digest="", num_bytes=1, read_back=True)
    return replace(found, **changes)


def test_the_newest_that_the_store_lacks_comes_first() -> None:
    refs = [ref(10), ref(20), ref(30)]
    copied: list[str] = []
    while found := next_copy(refs, copied=copied, retired=["s20-a1"]):
        copied.append(found.id)
    assert copied == ["s30-a1", "s10-a1"]


@pytest.mark.parametrize("changes", [{"read_back": False}, {"damaged": True}, {"suspect": True}, {"abandoned": True}])
def test_what_is_no_good_copy_is_not_sent(changes: dict[str, bool]) -> None:
    found = next_copy([ref(10), ref(20, **changes)], copied=[], retired=[])
    assert found is not None
    assert found.id == "s10-a1"


def test_a_copy_goes_when_it_went_from_disk_and_a_newer_good_one_is_there() -> None:
    refs = [ref(10), ref(20), ref(30)]
    assert remote_retirements(refs, copied=["s10-a1"], retired=["s10-a1"]) == []
    (gone,) = remote_retirements(refs, copied=["s10-a1", "s20-a1"], retired=["s10-a1"])
    assert (gone.id, gone.reason) == ("s10-a1", "retired on disk; s20-a1 is newer and copied")
    assert remote_retirements(refs, copied=["s10-a1", "s20-a1"], retired=[]) == []


@pytest.mark.parametrize("changes", [{"suspect": True}, {"abandoned": True}])
def test_a_newer_one_that_is_no_good_lets_nothing_go(changes: dict[str, bool]) -> None:
    refs = [ref(10), ref(20, **changes)]
    assert remote_retirements(refs, copied=["s10-a1", "s20-a1"], retired=["s10-a1"]) == []


FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("suspect", "abandoned", "damaged", "copied", "retired")})


@given(st.lists(FLAGS, max_size=8))
def test_the_newest_good_copy_always_stays(flags: list[dict[str, bool]]) -> None:
    refs = [ref(index, **{key: flag[key] for key in ("suspect", "abandoned", "damaged")}) for index, flag in enumerate(flags)]
    copied = [item.id for item, flag in zip(refs, flags, strict=True) if flag["copied"]]
    retired = [item.id for item, flag in zip(refs, flags, strict=True) if flag["retired"]]
    gone = {item.id for item in remote_retirements(refs, copied=copied, retired=retired)}
    good = [item.id for item in refs if item.id in copied and not (item.suspect or item.abandoned)]
    assert gone <= set(copied) & set(retired)
    assert good[-1:] == [name for name in good[-1:] if name not in gone]
    assert good or not gone
