"""What may go and what never does; deleting; sweeping up after the dead."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.checkpoint.held import held
from surefoot.checkpoint.inspect import published
from surefoot.checkpoint.retention import boundaries, is_good, remove, retire, sweep
from surefoot.core.errors import CheckpointError
from surefoot.core.records import CheckpointRef, Rung
from surefoot.core.sections import CheckpointSection, RunConfig, ScheduleSection, TrainSection
from surefoot.data.steps import StepPlan
from surefoot.train.schedule import decay_length


def _ref(step: int, *, attempt: int = 1, read_back: bool = True, **marks: Any) -> CheckpointRef:
    """A good one, unless a mark says otherwise."""
    return CheckpointRef(
        id=f"s{step}-a{attempt}", step=step, attempt=attempt, parent=None, state_digest="", num_bytes=1, read_back=read_back, **marks
    )


def _retired(refs: list[CheckpointRef], *, keep_last: int = 2, milestone_steps: int = 0, **more: Any) -> list[str]:
    return [item.id for item in retire(refs, keep_last=keep_last, milestone_steps=milestone_steps, **more)]


def test_the_newest_stay() -> None:
    assert _retired([_ref(step) for step in (10, 20, 30, 40)]) == ["s10-a1", "s20-a1"]


@pytest.mark.parametrize("num", [0, 1, 2])
def test_nothing_goes_before_there_are_enough(num: int) -> None:
    assert _retired([_ref(step) for step in range(num)], keep_last=2) == []


@pytest.mark.parametrize("mark", [{"read_back": False}, {"damaged": True}, {"suspect": True}, {"abandoned": True}])
def test_nothing_goes_for_one_that_does_not_count(mark: dict[str, bool]) -> None:
    refs = [_ref(10), _ref(20), _ref(30, **mark), _ref(40, **mark)]
    assert _retired(refs, keep_last=2) == []
    assert _retired([*refs, _ref(50), _ref(60)], keep_last=2) == ["s10-a1", "s20-a1", "s30-a1", "s40-a1"]


def test_a_run_whose_checkpoints_were_never_read_back_keeps_all() -> None:
    assert _retired([_ref(step, read_back=False) for step in range(20)], keep_last=1) == []


def test_milestones_stay() -> None:
    refs = [_ref(step) for step in (0, 50, 70, 100, 110, 120)]
    assert _retired(refs, milestone_steps=50) == ["s0-a1", "s70-a1"]


def test_the_last_one_before_each_boundary_stays() -> None:
    refs = [_ref(step) for step in (50, 70, 100, 110, 120, 130)]
    assert _retired(refs, boundaries=(70, 105, 1000, 10)) == ["s50-a1", "s110-a1"]


def test_a_milestone_that_does_not_count_is_none() -> None:
    refs = [_ref(100, suspect=True), _ref(200, abandoned=True), _ref(100, attempt=2), _ref(110), _ref(120)]
    assert _retired(refs, milestone_steps=100) == ["s100-a1", "s200-a1"]


def test_the_newest_proven_one_stays_until_there_is_a_newer() -> None:
    refs = [_ref(10, rung=Rung.PROVEN), _ref(20, rung=Rung.PROVEN), *[_ref(step, rung=Rung.LOADABLE) for step in (30, 40, 50)]]
    assert _retired(refs, keep_last=1) == ["s10-a1", "s30-a1", "s40-a1"]
    assert _retired([*refs, _ref(60, rung=Rung.PROVEN)], keep_last=1) == ["s10-a1", "s20-a1", "s30-a1", "s40-a1", "s50-a1"]


def test_an_abandoned_branch_stays_until_enough_new_ones_exist() -> None:
    branch = [_ref(20, abandoned=True), _ref(30, abandoned=True)]
    assert _retired([_ref(10), *branch, _ref(15, attempt=2)], keep_last=2) == []
    assert _retired([_ref(10), *branch, _ref(15, attempt=2), _ref(25, attempt=2)], keep_last=2) == ["s10-a1", "s20-a1", "s30-a1"]


def test_the_newest_of_all_stays_whatever_it_is() -> None:
    assert "s40-a1" not in _retired([_ref(10), _ref(20), _ref(30), _ref(40, abandoned=True)], keep_last=1)


def test_each_retirement_says_why() -> None:
    (item,) = retire([_ref(10, abandoned=True, damaged=True), _ref(20)], keep_last=1, milestone_steps=0)
    assert item.reason == "damaged, abandoned, 1 newer good ones, keep_last 1"


def test_older_ones_are_kept_at_distances_that_double() -> None:
    refs: list[CheckpointRef] = []
    for step in range(10, 1010, 10):
        refs.append(_ref(step))
        gone = set(_retired(refs, keep_last=2, cover_steps=500))
        refs = [ref for ref in refs if ref.id not in gone]
    assert [1000 - ref.step for ref in reversed(refs)] == [0, 10, 20, 30, 50, 70, 110, 190, 350, 670]


@given(every=st.integers(1, 20), num=st.integers(1, 120), keep_last=st.integers(1, 4), cover_steps=st.integers(1, 2000))
def test_a_way_back_is_at_most_twice_as_long_as_asked(every: int, num: int, keep_last: int, cover_steps: int) -> None:
    refs: list[CheckpointRef] = []
    for step in range(every, every * num + 1, every):
        refs.append(_ref(step))
        gone = set(_retired(refs, keep_last=keep_last, cover_steps=cover_steps))
        refs = [ref for ref in refs if ref.id not in gone]
        for back in range(0, min(cover_steps, step - every) + 1, every):
            assert any(back <= step - ref.step <= max(2 * back, every) for ref in refs), (step, back, [ref.step for ref in refs])
    assert len(refs) <= keep_last + 2 * (cover_steps.bit_length() + 2)


def test_boundaries_of_a_config() -> None:
    config = RunConfig(
        train=TrainSection(num_steps=1000, global_batch_size=16, batch_ramp=((0, 4), (10, 8), (100, 16))),
        schedule=ScheduleSection(warmup_steps=50, decay_steps=300),
    )
    plan = StepPlan(config.train.batch_ramp, global_batch_size=16)
    grown = [step for step in range(1, 1000) if plan.span(step)[1] != plan.span(step - 1)[1]]
    assert boundaries(config) == {50, 700, *grown}
    assert boundaries(replace(config, checkpoint=CheckpointSection(keep_steps=(0, 421, 1000)))) == {50, 421, 700, *grown}


@pytest.mark.parametrize("decay_steps", [-1, 0, 10])
def test_the_decay_begins_where_the_schedule_has_it(decay_steps: int) -> None:
    schedule = ScheduleSection(warmup_steps=0, decay_steps=decay_steps)
    found = boundaries(RunConfig(train=TrainSection(num_steps=100), schedule=schedule))
    length = decay_length(schedule, num_steps=100)
    assert found == ({100 - length} if length else set())
    assert boundaries(RunConfig(train=TrainSection(num_steps=100), schedule=ScheduleSection(kind="cosine", warmup_steps=7))) == {7}


marks_strategy = st.fixed_dictionaries(
    {name: st.booleans() for name in ("read_back", "suspect", "abandoned", "damaged")} | {"rung": st.sampled_from(list(Rung))}
)
refs_strategy = st.lists(st.tuples(st.integers(0, 30), marks_strategy), max_size=12)


@given(drawn=refs_strategy, keep_last=st.integers(1, 4), milestone_steps=st.integers(0, 7), cover_steps=st.integers(0, 40))
def test_what_never_goes(drawn: list[tuple[int, dict[str, Any]]], keep_last: int, milestone_steps: int, cover_steps: int) -> None:
    refs = [replace(_ref(step, **marks), id=f"{index}") for index, (step, marks) in enumerate(drawn)]
    settings: dict[str, Any] = {
        "keep_last": keep_last,
        "milestone_steps": milestone_steps,
        "cover_steps": cover_steps,
        "boundaries": (9, 20),
    }
    gone = set(_retired(refs, **settings))
    good = [ref for ref in refs if is_good(ref)]
    proven = [ref for ref in good if ref.rung is Rung.PROVEN]
    assert not gone & {ref.id for ref in [*good[-keep_last:], *refs[-1:], *proven[-1:]]}
    assert all(milestone_steps == 0 or ref.step % milestone_steps or ref.step == 0 for ref in good if ref.id in gone)
    for name in gone:
        assert sum(1 for ref in good if int(ref.id) > int(name)) >= keep_last
    left = [ref for ref in refs if ref.id not in gone]
    assert _retired(left, **settings) == []


# --- Saves, looks and removals in any order, and a crash at any moment between them ---

HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "verify", "prove", "damage", "suspect", "retire", "crash in retire"]), st.integers(0, 20)
    ),
    max_size=60,
)


@dataclass
class Disk:
    """What the ledger says (`refs`, `told`: retired) and what is still there (`present`)."""

    keep_last: int
    refs: list[CheckpointRef] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)

    def standing(self) -> list[CheckpointRef]:
        return [ref for ref in self.refs if ref.id not in self.told]

    def mark(self, pick: int, **values: Any) -> None:
        standing = self.standing()
        if standing:
            chosen = standing[pick % len(standing)]
            self.refs[self.refs.index(chosen)] = replace(chosen, **values)

    def commit(self, pick: int) -> None:
        ref = _ref(10 * len(self.refs) + pick, read_back=False)
        self.refs.append(replace(ref, id=f"{len(self.refs)}"))
        self.present.add(self.refs[-1].id)

    def verify(self, pick: int) -> None:
        self.mark(pick, read_back=True, damaged=False)

    def prove(self, pick: int) -> None:
        self.mark(pick, read_back=True, damaged=False, rung=Rung.PROVEN)

    def damage(self, pick: int) -> None:
        self.mark(pick, damaged=True)

    def suspect(self, pick: int) -> None:
        self.mark(pick, suspect=True)

    def retire(self, _pick: int, *, num_told: int = 1000, num_removed: int = 1000) -> None:
        """As its callers do: each is told before it goes. A crash cuts it off anywhere; the next start removes what was told."""
        before = self.standing()
        chosen = retire(before, keep_last=self.keep_last, milestone_steps=50, cover_steps=100)[:num_told]
        self.check(before, {item.id for item in chosen})
        for number, item in enumerate(chosen):
            self.told.add(item.id)
            if number < num_removed:
                self.present.discard(item.id)

    def crash_in_retire(self, pick: int) -> None:
        self.retire(0, num_told=pick % 4, num_removed=pick % 3)
        self.present -= self.told

    def check(self, before: list[CheckpointRef], gone: set[str]) -> None:
        good = [ref for ref in before if is_good(ref)]
        left = [ref for ref in good if ref.id not in gone]
        assert len(left) >= min(len(good), self.keep_last)
        assert any(ref.rung is Rung.PROVEN for ref in left) or not any(ref.rung is Rung.PROVEN for ref in good)
        for name in gone:
            newer = before[[ref.id for ref in before].index(name) + 1 :]
            assert any(is_good(ref) and ref.id not in gone for ref in newer)


@given(happenings=HAPPENINGS, keep_last=st.integers(1, 3))
def test_no_order_of_events_and_no_crash_takes_the_last_good_one(happenings: list[tuple[str, int]], keep_last: int) -> None:
    disk = Disk(keep_last)
    for name, pick in happenings:
        getattr(disk, name.replace(" ", "_"))(pick)
        assert {ref.id for ref in disk.standing()} <= disk.present


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
    assert remove(tmp_path, "s10-a1", generation=1) is None
    assert published(tmp_path) == []


def test_sweep_takes_only_what_older_generations_left(tmp_path: Path) -> None:
    stays = ["s10-a1", ".s30-a1.g3.writing", ".s30-a1.g4.retired", ".mine", "notes.g1.writing"]
    goes = [".s20-a1.g1.writing", ".s20-a1-r1.g2.writing", ".s5-a1.g2.retired"]
    for name in stays + goes:
        _folder(tmp_path, name)
    (tmp_path / ".s40-a1.g1.writing").symlink_to(tmp_path / "s10-a1")
    (tmp_path / ".s50-a1.g1.writing").write_text("a file of somebody")
    stays += [".s40-a1.g1.writing", ".s50-a1.g1.writing"]
    assert sweep(tmp_path, generation=3) == sorted(goes)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(stays)
    assert sweep(tmp_path / "absent", generation=3) == []


def test_sweep_leaves_what_a_process_works_in(tmp_path: Path) -> None:
    folder = tmp_path / ".s20-a1.g0.writing"
    with held(folder):
        assert sweep(tmp_path, generation=3) == []
        with pytest.raises(CheckpointError, match="another process works on this checkpoint"), held(folder):
            pass
    assert sweep(tmp_path, generation=3) == [folder.name]
