"""What may go and what never does; deleting; sweeping up after the dead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.retention import remove, retire, sweep
from surefoot.core.records import CheckpointRef


def _ref(step: int, *, attempt: int = 1, suspect: bool = False, abandoned: bool = False) -> CheckpointRef:
    return CheckpointRef(
        id=f"s{step}-a{attempt}",
        step=step,
        attempt=attempt,
        parent=None,
        state_digest="",
        num_bytes=1,
        suspect=suspect,
        abandoned=abandoned,
    )


def _retired(refs: list[CheckpointRef], *, keep_last: int = 2, milestone_steps: int = 0, boundaries: tuple[int, ...] = ()) -> list[str]:
    return [item.id for item in retire(refs, keep_last=keep_last, milestone_steps=milestone_steps, boundaries=boundaries)]


def test_the_newest_stay() -> None:
    assert _retired([_ref(step) for step in (10, 20, 30, 40)]) == ["s10-a1", "s20-a1"]


@pytest.mark.parametrize("num", [0, 1, 2])
def test_nothing_goes_before_there_are_enough(num: int) -> None:
    assert _retired([_ref(step) for step in range(num)], keep_last=2) == []


def test_milestones_and_boundaries_stay() -> None:
    refs = [_ref(step) for step in (0, 50, 70, 100, 110, 120)]
    assert _retired(refs, milestone_steps=50, boundaries=(70,)) == ["s0-a1"]


def test_suspect_ones_do_not_count_and_go_when_old() -> None:
    refs = [_ref(10), _ref(20), _ref(30, suspect=True), _ref(40, suspect=True)]
    assert _retired(refs, keep_last=2) == []
    refs = [_ref(5), _ref(10, suspect=True), _ref(20), _ref(30)]
    assert _retired(refs, keep_last=2) == ["s5-a1", "s10-a1"]


def test_a_suspect_or_abandoned_milestone_is_none() -> None:
    refs = [_ref(100, suspect=True), _ref(200, abandoned=True), _ref(100, attempt=2), _ref(110), _ref(120)]
    assert _retired(refs, milestone_steps=100) == ["s100-a1", "s200-a1"]


def test_an_abandoned_branch_stays_until_enough_new_ones_exist() -> None:
    branch = [_ref(20, abandoned=True), _ref(30, abandoned=True)]
    assert _retired([_ref(10), *branch, _ref(15, attempt=2)], keep_last=2) == []
    assert _retired([_ref(10), *branch, _ref(15, attempt=2), _ref(25, attempt=2)], keep_last=2) == ["s10-a1", "s20-a1", "s30-a1"]


def test_the_newest_of_all_stays_whatever_it_is() -> None:
    assert "s40-a1" not in _retired([_ref(10), _ref(20), _ref(30), _ref(40, abandoned=True)], keep_last=1)


def test_each_retirement_says_why() -> None:
    (item,) = retire([_ref(10, abandoned=True), _ref(20)], keep_last=1, milestone_steps=0)
    assert item.reason == "abandoned, 1 newer good ones, keep_last 1"


refs_strategy = st.lists(
    st.builds(_ref, st.integers(0, 30), attempt=st.integers(1, 3), suspect=st.booleans(), abandoned=st.booleans()), max_size=12
)


@given(refs=refs_strategy, keep_last=st.integers(1, 4), milestone_steps=st.integers(0, 7))
def test_a_good_one_always_stays_and_keep_last_of_them(refs: list[CheckpointRef], keep_last: int, milestone_steps: int) -> None:
    numbered = [replace(ref, id=f"{index}") for index, ref in enumerate(refs)]
    gone = set(_retired(numbered, keep_last=keep_last, milestone_steps=milestone_steps))
    good = [ref for ref in numbered if not ref.suspect and not ref.abandoned]
    assert not gone & {ref.id for ref in good[-keep_last:]}
    assert not gone & {ref.id for ref in numbered[-1:]}
    assert all(milestone_steps == 0 or ref.step % milestone_steps or ref.step == 0 for ref in good if ref.id in gone)
    left = [ref for ref in numbered if ref.id not in gone]
    assert set(_retired(left, keep_last=keep_last, milestone_steps=milestone_steps)) == set()


def _folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_remove_unpublishes_and_deletes(tmp_path: Path) -> None:
    _folder(tmp_path, "s10-a1")
    _folder(tmp_path, "s20-a1")
    assert remove(tmp_path, "s10-a1", generation=1) is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["s20-a1"]


def test_a_failed_removal_is_reported(tmp_path: Path) -> None:
    reason = remove(tmp_path, "s10-a1", generation=1)
    assert reason is not None
    assert "No such file" in reason


def test_a_half_deleted_one_is_no_longer_published_and_swept_later(tmp_path: Path) -> None:
    _folder(tmp_path, "s10-a1")
    _folder(tmp_path, ".s10-a1.g1.retired")  # a removal that died in between left this in the way
    (tmp_path / ".s10-a1.g1.retired" / "manifest.json").unlink()
    assert remove(tmp_path, "s10-a1", generation=1) is None
    assert published(tmp_path) == []


def test_sweep_takes_only_what_older_generations_left(tmp_path: Path) -> None:
    stays = ["s10-a1", ".s30-a1.g3.writing", ".s30-a1.g4.retired", ".mine", "notes.g1.writing"]
    goes = [".s20-a1.g1.writing", ".s20-a1-r1.g2.writing", ".s5-a1.g2.retired"]
    for name in stays + goes:
        _folder(tmp_path, name)
    assert sweep(tmp_path, generation=3) == sorted(goes)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(stays)
    assert sweep(tmp_path / "absent", generation=3) == []
