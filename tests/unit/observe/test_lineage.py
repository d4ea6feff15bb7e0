from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.records import LedgerEntry, Manifest, Rung
from surefoot.observe.lineage import Lineage, adoptable, candidates, fold_counters, fold_lineage


@dataclass
class Story:
    """Writes the entries that a run would, so that a test reads as what happened."""

    entries: list[LedgerEntry] = field(default_factory=list)
    generation: int = 1
    attempt: int = 1
    step: int = 0

    def tell(self, event: Event, **fields: object) -> Story:
        seq = len(self.entries) + 1
        entry = LedgerEntry(seq, "", self.generation, self.attempt, self.step, event, "test", "", "", fields, ZERO_HASH, ZERO_HASH)
        self.entries.append(entry)
        return self

    def commit(self, step: int, parent: str | None, *, attempt: int | None = None, event: Event = Event.CHECKPOINT_COMMITTED) -> Story:
        attempt = attempt or self.attempt
        name = f"s{step}-a{attempt}"
        self.step = max(self.step, step) if attempt == self.attempt else self.step
        return self.tell(event, id=name, step=step, attempt=attempt, parent=parent, state_digest=f"d-{name}", num_bytes=10)

    def restart(self) -> Story:
        self.generation += 1
        return self.tell(Event.GENERATION_STARTED, world_size=2)

    def resume(self, checkpoint: str | None, *, step: int) -> Story:
        self.attempt, self.step = self.attempt + 1, step
        self.tell(Event.ATTEMPT_STARTED, checkpoint=checkpoint)
        return self.tell(Event.RUN_RESUMED, checkpoint=checkpoint) if checkpoint else self

    def roll_back(self, checkpoint: str, *, step: int) -> Story:
        self.attempt, self.step = self.attempt + 1, step
        return self.tell(Event.RUN_ROLLED_BACK, checkpoint=checkpoint)

    def fold(self) -> Lineage:
        return fold_lineage(self.entries)


@pytest.fixture
def story() -> Story:
    """Three saves of one undisturbed attempt."""
    return Story().tell(Event.GENERATION_STARTED).commit(100, None).commit(200, "s100-a1").commit(300, "s200-a1")


def ids(lineage: Lineage) -> list[str]:
    return [ref.id for ref in candidates(lineage)]


def newest(story: Story) -> str | None:
    ref = story.fold().newest()
    return ref.id if ref else None


def manifest(name: str, *, parent: str | None, ledger_seq: int, generation: int = 1) -> Manifest:
    step, attempt = (int(part[1:]) for part in name.split("-")[:2])
    return Manifest(
        format_version=1,
        id=name,
        run="r",
        step=step,
        attempt=attempt,
        generation=generation,
        parent=parent,
        time_utc="",
        loss=None,
        tokens=0,
        state_digest="",
        config_hashes={},
        data_hash="",
        code_version="",
        topology={},
        environment={},
        ledger_seq=ledger_seq,
        ledger_hash="",
        cursor={},
        files=(),
        tensors=(),
    )


def test_an_empty_ledger_has_nothing_to_restore() -> None:
    lineage = fold_lineage([])
    assert lineage.newest() is None
    assert lineage.head is None
    assert candidates(lineage) == []


def test_newest_is_the_last_commit_and_older_ones_follow(story: Story) -> None:
    lineage = story.fold()
    assert ids(lineage) == ["s300-a1", "s200-a1", "s100-a1"]
    head = lineage.head
    assert head is not None
    assert (head.id, head.step, head.attempt, head.parent, head.state_digest, head.num_bytes) == (
        "s300-a1",
        300,
        1,
        "s200-a1",
        "d-s300-a1",
        10,
    )
    assert head.rung is Rung.COMMITTED


def test_a_resume_from_the_newest_abandons_nothing(story: Story) -> None:
    story.restart().resume("s300-a1", step=300).commit(400, "s300-a1")
    assert ids(story.fold()) == ["s400-a2", "s300-a1", "s200-a1", "s100-a1"]


def test_a_crash_right_after_a_roll_back_never_restores_the_branch_that_was_given_up(story: Story) -> None:
    story.roll_back("s100-a1", step=100).restart()
    assert newest(story) == "s100-a1"
    assert [ref.id for ref in story.fold().refs if ref.abandoned] == ["s200-a1", "s300-a1"]


def test_newest_after_a_roll_back_is_the_last_commit_although_its_step_is_lower(story: Story) -> None:
    story.roll_back("s100-a1", step=100).commit(150, "s100-a1")
    assert ids(story.fold()) == ["s150-a2", "s100-a1"]


def test_falling_back_at_a_resume_abandons_what_was_skipped(story: Story) -> None:
    story.restart().tell(Event.CHECKPOINT_REJECTED, id="s300-a1").resume("s200-a1", step=200)
    assert ids(story.fold()) == ["s200-a1", "s100-a1"]


def test_a_rejected_one_is_tried_last_until_the_run_goes_on_without_it(story: Story) -> None:
    story.restart().tell(Event.CHECKPOINT_REJECTED, id="s300-a1")
    assert ids(story.fold()) == ["s200-a1", "s100-a1", "s300-a1"]


def test_a_suspect_one_is_never_newest_unasked_but_stays_the_parent(story: Story) -> None:
    story.tell(Event.CHECKPOINT_SUSPECTED, id="s300-a1")
    lineage = story.fold()
    assert ids(lineage) == ["s200-a1", "s100-a1"]
    assert lineage.head is not None
    assert (lineage.head.id, lineage.head.suspect) == ("s300-a1", True)


def test_a_retired_one_cannot_be_restored(story: Story) -> None:
    story.tell(Event.CHECKPOINT_RETIRED, id="s100-a1")
    assert ids(story.fold()) == ["s300-a1", "s200-a1"]


def test_an_abandoned_event_takes_one_off_the_line(story: Story) -> None:
    story.tell(Event.CHECKPOINT_ABANDONED, id="s300-a1")
    assert newest(story) == "s200-a1"
    story.commit(400, "s200-a1")
    assert ids(story.fold()) == ["s400-a1", "s200-a1", "s100-a1"]


def test_a_person_may_go_back_to_an_abandoned_branch(story: Story) -> None:
    story.roll_back("s100-a1", step=100).commit(150, "s100-a1").resume("s300-a1", step=300)
    lineage = story.fold()
    assert ids(lineage) == ["s300-a1", "s200-a1", "s100-a1"]
    assert [ref.id for ref in lineage.refs if ref.abandoned] == ["s150-a2"]


def test_a_fresh_start_leaves_every_earlier_commit_behind(story: Story) -> None:
    story.restart().resume(None, step=0)
    assert newest(story) is None
    story.commit(100, None)
    assert ids(story.fold()) == ["s100-a2"]


def test_a_resume_from_outside_begins_a_new_line(story: Story) -> None:
    story.restart().resume("s900-a7", step=900)
    assert newest(story) is None
    assert story.fold().base == "s900-a7"
    story.commit(1000, "s900-a7")
    assert ids(story.fold()) == ["s1000-a2"]


def test_a_save_that_ends_after_its_branch_was_given_up_is_abandoned(story: Story) -> None:
    story.roll_back("s300-a1", step=300).commit(400, "s300-a1", attempt=1)
    assert newest(story) == "s300-a1"
    story.commit(350, "s300-a1")
    assert ids(story.fold()) == ["s350-a2", "s300-a1", "s200-a1", "s100-a1"]


def test_a_save_whose_parent_was_given_up_is_abandoned(story: Story) -> None:
    story.roll_back("s100-a1", step=100).commit(400, "s300-a1")
    assert newest(story) == "s100-a1"


def test_a_commit_that_is_told_twice_counts_once(story: Story) -> None:
    story.commit(300, "s200-a1", event=Event.CHECKPOINT_ADOPTED)
    assert len(story.fold().refs) == 3
    assert newest(story) == "s300-a1"


def test_a_commit_without_a_parent_follows_the_head(story: Story) -> None:
    story.tell(Event.CHECKPOINT_COMMITTED, id="s400-a1", step=400, attempt=1)
    assert newest(story) == "s400-a1"


def test_marks_of_unknown_checkpoints_change_nothing(story: Story) -> None:
    before = ids(story.fold())
    for event in (Event.CHECKPOINT_SUSPECTED, Event.CHECKPOINT_RETIRED, Event.CHECKPOINT_ABANDONED, Event.CHECKPOINT_REJECTED):
        story.tell(event, id="s9-a9").tell(event)
    assert ids(story.fold()) == before


def test_what_a_new_process_resumed_from_is_loadable(story: Story) -> None:
    story.restart().resume("s300-a1", step=300).commit(400, "s300-a1")
    assert [ref.rung for ref in candidates(story.fold())] == [Rung.COMMITTED, Rung.LOADABLE, Rung.COMMITTED, Rung.COMMITTED]


# --- What others found ---


@pytest.mark.parametrize(
    ("events", "rung", "read_back"),
    [
        ([], Rung.COMMITTED, False),
        ([Event.CHECKPOINT_VERIFIED], Rung.COMMITTED, True),
        ([Event.CHECKPOINT_LOADED], Rung.LOADABLE, True),
        ([Event.CHECKPOINT_PROVEN], Rung.PROVEN, True),
        ([Event.CHECKPOINT_PROVEN, Event.CHECKPOINT_LOADED, Event.CHECKPOINT_VERIFIED], Rung.PROVEN, True),
    ],
)
def test_looks_raise_the_rung_and_never_lower_it(story: Story, events: list[Event], rung: Rung, read_back: bool) -> None:
    for event in events:
        story.tell(event, id="s300-a1", host="h")
    ref = story.fold().ref("s300-a1")
    assert ref is not None
    assert (ref.rung, ref.read_back, ref.damaged) == (rung, read_back, False)


def test_a_resume_of_a_proven_one_leaves_it_proven(story: Story) -> None:
    story.tell(Event.CHECKPOINT_PROVEN, id="s300-a1").restart().resume("s300-a1", step=300)
    assert [ref.rung for ref in story.fold().refs] == [Rung.COMMITTED, Rung.COMMITTED, Rung.PROVEN]


def test_a_damaged_one_is_tried_after_all_others(story: Story) -> None:
    story.tell(Event.CHECKPOINT_DAMAGED, id="s300-a1", problems=[])
    story.tell(Event.CHECKPOINT_REJECTED, id="s200-a1")
    assert ids(story.fold()) == ["s100-a1", "s200-a1", "s300-a1"]


@pytest.mark.parametrize("event", [Event.CHECKPOINT_VERIFIED, Event.CHECKPOINT_LOADED, Event.CHECKPOINT_PROVEN])
def test_a_look_that_finds_it_well_takes_damage_back(story: Story, event: Event) -> None:
    story.tell(Event.CHECKPOINT_DAMAGED, id="s300-a1", problems=[]).tell(event, id="s300-a1")
    assert newest(story) == "s300-a1"


def test_only_a_load_takes_a_rejection_back(story: Story) -> None:
    story.tell(Event.CHECKPOINT_REJECTED, id="s300-a1").tell(Event.CHECKPOINT_VERIFIED, id="s300-a1")
    assert newest(story) == "s200-a1"
    story.tell(Event.CHECKPOINT_LOADED, id="s300-a1")
    assert newest(story) == "s300-a1"


def test_a_suspect_one_stays_suspect_however_often_it_loads(story: Story) -> None:
    story.tell(Event.CHECKPOINT_SUSPECTED, id="s300-a1").tell(Event.CHECKPOINT_PROVEN, id="s300-a1")
    assert ids(story.fold()) == ["s200-a1", "s100-a1"]


def test_looks_are_kept_with_who_where_and_which_files(story: Story) -> None:
    story.tell(Event.CHECKPOINT_VERIFIED, id="s300-a1", host="n1", by="uploader")
    story.tell(Event.CHECKPOINT_PROVEN, id="s300-a1", host="n2", world_size=3)
    problem = {"kind": "wrong-digest", "file": "__1_0.distcp,__0_0.distcp", "tensor": "model.w", "detail": "differs"}
    story.tell(Event.CHECKPOINT_DAMAGED, id="s300-a1", host="n2", problems=[problem, "cannot be read"])
    first, second, third = story.fold().looks["s300-a1"]
    assert (first.ok, first.host, first.by) == (True, "n1", "uploader")
    assert (second.by, second.world_size) == ("test", 3)
    assert (third.ok, third.bad_files) == (False, ("__0_0.distcp", "__1_0.distcp"))
    assert third.details == ("wrong-digest differs", "cannot be read")


def test_copies_are_counted_once_per_tier(story: Story) -> None:
    for tier in ("s3://b/p", "s3://b/p", "file:///mnt"):
        story.tell(Event.CHECKPOINT_COPIED, id="s300-a1", tier=tier)
    assert story.fold().tiers == {"s300-a1": ("s3://b/p", "file:///mnt")}


def test_a_copy_that_was_retired_is_gone_from_its_tier_alone(story: Story) -> None:
    for tier in ("s3://one", "file:///two"):
        story.tell(Event.CHECKPOINT_COPIED, id="s200-a1", tier=tier)
    story.tell(Event.CHECKPOINT_RETIRED, id="s200-a1", tier="s3://one")
    lineage = story.fold()
    assert lineage.tiers == {"s200-a1": ("file:///two",)}
    assert lineage.retired == frozenset()
    assert ids(lineage) == ["s300-a1", "s200-a1", "s100-a1"]
    story.tell(Event.CHECKPOINT_RETIRED, id="s200-a1", tier="file:///two").tell(Event.CHECKPOINT_RETIRED, id="s9-a1", tier="file:///two")
    assert story.fold().tiers == {}


def test_the_fold_grows_with_the_ledger_and_not_with_its_square() -> None:
    """Four times the saves take four times as long, where the square would take sixteen times."""
    assert min(_fold_s(8000) for _ in range(3)) < 8 * min(_fold_s(2000) for _ in range(3))


def _fold_s(num_saves: int) -> float:
    story, parent = Story(), None
    for step in range(1, num_saves + 1):
        story.commit(step, parent)
        parent = f"s{step}-a1"
    for _ in range(10):
        story.resume(parent, step=num_saves)
    started_s = time.process_time()
    lineage = story.fold()
    assert all(lineage.ref(name) is not None for name in lineage.line)
    return time.process_time() - started_s


def test_a_run_that_stands_on_nothing_goes_on_from_an_import() -> None:
    story = Story().tell(Event.RUN_BRANCHED, from_run="parent", checkpoint="s900-a7", state_digest="d")
    story.tell(Event.CHECKPOINT_IMPORTED, id="s900-a0", step=900, attempt=0, parent=None, state_digest="d", num_bytes=10)
    assert newest(story) == "s900-a0"
    assert (story.fold().branched_from or {}).get("from_run") == "parent"
    story.restart().resume("s900-a0", step=900).commit(1000, "s900-a0")
    assert ids(story.fold()) == ["s1000-a2", "s900-a0"]


def test_an_import_into_a_run_with_checkpoints_waits_until_it_is_asked_for(story: Story) -> None:
    story.tell(Event.CHECKPOINT_IMPORTED, id="s900-a0", step=900, attempt=0, parent=None, state_digest="d", num_bytes=10)
    assert newest(story) == "s300-a1"
    story.commit(400, "s300-a1")
    assert newest(story) == "s400-a1"
    story.restart().resume("s900-a0", step=900).commit(1000, "s900-a0")
    assert ids(story.fold()) == ["s1000-a2", "s900-a0"]


# --- Adoption: published, but the writer died before the ledger heard of it ---


def test_a_published_successor_is_adopted(story: Story) -> None:
    story.restart()
    found = adoptable([manifest("s400-a1", parent="s300-a1", ledger_seq=4)], story.fold())
    assert [item.id for item in found] == ["s400-a1"]
    story.commit(400, "s300-a1", attempt=1, event=Event.CHECKPOINT_ADOPTED)
    assert newest(story) == "s400-a1"
    assert adoptable([manifest("s400-a1", parent="s300-a1", ledger_seq=4)], story.fold()) == []


def test_the_first_save_of_a_run_can_be_adopted() -> None:
    story = Story().tell(Event.GENERATION_STARTED)
    assert [item.id for item in adoptable([manifest("s100-a1", parent=None, ledger_seq=1)], story.fold())] == ["s100-a1"]


def test_successors_of_an_adopted_one_are_adopted_in_order(story: Story) -> None:
    published = [manifest("s500-a1", parent="s400-a1", ledger_seq=4), manifest("s400-a1", parent="s300-a1", ledger_seq=4)]
    assert [item.id for item in adoptable(published, story.fold())] == ["s400-a1", "s500-a1"]


def test_of_several_tries_at_one_save_the_last_is_adopted(story: Story) -> None:
    published = [manifest(name, parent="s300-a1", ledger_seq=4) for name in ("s400-a1-r2", "s400-a1", "s400-a1-r10")]
    assert [item.id for item in adoptable(published, story.fold())] == ["s400-a1-r10"]


def test_what_the_ledger_knows_is_not_adopted(story: Story) -> None:
    assert adoptable([manifest("s300-a1", parent="s200-a1", ledger_seq=3)], story.fold()) == []


@pytest.mark.parametrize("to", ["s300-a1", "s200-a1"])
def test_nothing_of_a_branch_that_was_given_up_is_adopted(story: Story, to: str) -> None:
    late = manifest("s400-a1", parent="s300-a1", ledger_seq=4)
    assert adoptable([late], story.fold()) == [late]
    story.roll_back(to, step=200)
    assert adoptable([late], story.fold()) == []


def test_nothing_is_adopted_once_the_run_went_on_without_it(story: Story) -> None:
    story.restart().resume("s300-a1", step=300)
    assert adoptable([manifest("s400-a1", parent="s300-a1", ledger_seq=4)], story.fold()) == []


def test_a_save_from_beyond_the_end_of_the_ledger_is_not_adopted(story: Story) -> None:
    assert adoptable([manifest("s400-a1", parent="s300-a1", ledger_seq=99)], story.fold()) == []


def test_a_save_with_another_parent_is_not_adopted(story: Story) -> None:
    assert adoptable([manifest("s400-a1", parent="s100-a1", ledger_seq=4)], story.fold()) == []


# --- Counters ---


def test_counters(story: Story) -> None:
    story.restart().resume("s300-a1", step=300).commit(400, "s300-a1").roll_back("s300-a1", step=300)
    counters = fold_counters(story.entries)
    assert (counters.generation, counters.attempt, counters.seq, counters.step) == (2, 3, len(story.entries), 300)
    assert (counters.num_generations, counters.num_restarts, counters.num_resumes, counters.num_roll_backs) == (2, 1, 1, 1)
    assert not counters.finished


def test_counters_of_nothing_are_zero() -> None:
    assert fold_counters([]).num_restarts == 0


def test_a_run_is_finished_until_a_later_attempt_begins(story: Story) -> None:
    story.tell(Event.RUN_FINISHED).restart()
    assert fold_counters(story.entries).finished
    story.resume("s300-a1", step=300)
    assert not fold_counters(story.entries).finished
    story.tell(Event.RUN_FINISHED)
    assert fold_counters(story.entries).finished


# --- A simulated run against the plainest possible model: the list of saves that the present weights went through ---

Move = tuple[str, int]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("save", "save", "save", "crash", "publish and crash", "roll back", "roll back and crash", "late save", "mark suspect"),
                *("find damaged", "find well", "prove", "import"),
            ]
        ),
        st.integers(0, 5),
    ),
    max_size=40,
)


@dataclass
class Model:
    """`path` is the true history of the weights."""

    story: Story = field(default_factory=Story)
    path: list[tuple[str, int]] = field(default_factory=list)
    suspect: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    num_imports: int = 0

    def play(self, moves: Sequence[Move]) -> None:
        self.story.tell(Event.GENERATION_STARTED)
        for name, pick in moves:
            getattr(self, "import_" if name == "import" else name.replace(" ", "_"))(pick)
            self.check()

    @property
    def head(self) -> str | None:
        return self.path[-1][0] if self.path else None

    def save(self, pick: int) -> None:
        step = (self.path[-1][1] if self.path else 0) + 10 + pick
        self.story.commit(step, self.head)
        self.path.append((f"s{step}-a{self.story.attempt}", step))

    def publish_and_crash(self, pick: int) -> None:
        """The ledger never hears of this save; the next start adopts it."""
        step = (self.path[-1][1] if self.path else 0) + 10 + pick
        published = manifest(f"s{step}-a{self.story.attempt}", parent=self.head, ledger_seq=len(self.story.entries))
        self.story.restart()
        assert adoptable([published], self.story.fold()) == [published]
        self.story.commit(step, self.head, event=Event.CHECKPOINT_ADOPTED)
        self.path.append((published.id, step))
        self.restore()

    def crash(self, _pick: int) -> None:
        self.story.restart()
        self.restore()

    def restore(self) -> None:
        """From the newest that is neither suspect nor damaged; where all are damaged, from the newest of those."""
        tried = self.usable()
        while self.path and self.head != tried[0] if tried else self.path:
            self.path.pop()
        found = self.story.fold().newest()
        assert (found.id if found else None) == self.head
        self.story.resume(self.head, step=self.path[-1][1] if self.path else 0)

    def roll_back(self, pick: int) -> None:
        clean = [index for index, (name, _) in enumerate(self.path) if name not in self.suspect]
        if clean:
            del self.path[clean[pick % len(clean)] + 1 :]
            self.story.roll_back(self.path[-1][0], step=self.path[-1][1])

    def roll_back_and_crash(self, pick: int) -> None:
        self.roll_back(pick)
        self.crash(pick)

    def late_save(self, pick: int) -> None:
        """A save is on its way when the run is rolled back to its own parent; it ends afterwards, told or only published."""
        if self.head is None or self.head in self.suspect:
            return
        step, attempt, seq = self.path[-1][1] + 10 + pick, self.story.attempt, len(self.story.entries)
        parent = self.head
        self.story.roll_back(parent, step=self.path[-1][1])
        late = manifest(f"s{step}-a{attempt}", parent=parent, ledger_seq=seq)
        if self.story.fold().ref(late.id) is None:
            assert adoptable([late], self.story.fold()) == []
            self.story.commit(step, parent, attempt=attempt)

    def mark_suspect(self, pick: int) -> None:
        if self.path:
            name = self.path[pick % len(self.path)][0]
            self.story.tell(Event.CHECKPOINT_SUSPECTED, id=name)
            self.suspect.add(name)

    def find_damaged(self, pick: int) -> None:
        if self.path:
            name = self.path[pick % len(self.path)][0]
            self.story.tell(Event.CHECKPOINT_DAMAGED, id=name, problems=[])
            self.damaged.add(name)

    def find_well(self, pick: int) -> None:
        if self.path:
            name = self.path[pick % len(self.path)][0]
            self.story.tell(Event.CHECKPOINT_VERIFIED, id=name)
            self.damaged.discard(name)

    def prove(self, pick: int) -> None:
        if self.path:
            name = self.path[pick % len(self.path)][0]
            self.story.tell(Event.CHECKPOINT_PROVEN, id=name)
            self.damaged.discard(name)
            self.proven.add(name)

    def import_(self, pick: int) -> None:
        """Into a run that stands on something: it is there, and nobody resumes from it."""
        if self.path:
            self.num_imports += 1
            name = f"s{900 + pick}-a0-r{self.num_imports}"
            self.story.tell(Event.CHECKPOINT_IMPORTED, id=name, step=900 + pick, attempt=0, parent=None)

    def usable(self) -> list[str]:
        names = [name for name, _ in reversed(self.path) if name not in self.suspect]
        return sorted(names, key=lambda name: name in self.damaged)

    def check(self) -> None:
        lineage = self.story.fold()
        assert list(lineage.line) == [name for name, _ in self.path]
        assert [ref.id for ref in candidates(lineage)] == self.usable()
        assert {ref.id for ref in lineage.refs if ref.damaged} == self.damaged
        assert {ref.id for ref in lineage.refs if ref.rung is Rung.PROVEN} == self.proven
        on_path = {name for name, _ in self.path}
        assert all(ref.abandoned == (ref.id not in on_path) for ref in lineage.refs)


@given(MOVES)
def test_the_line_is_the_history_of_the_weights(moves: list[Move]) -> None:
    Model().play(moves)
