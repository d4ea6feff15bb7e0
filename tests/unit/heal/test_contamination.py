"""Which checkpoints a window got into, which one to go back to, and at what cost."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.records import CheckpointRef, Rung
from surefoot.heal.contamination import Contamination, contaminated


def _ref(step: int, **marks: Any) -> CheckpointRef:
    return CheckpointRef(f"s{step}-a1", step=step, attempt=1, parent=None, state_digest="", num_bytes=1, **marks)


def _of(refs: list[CheckpointRef], *, first: int = 25, step: int = 50, **more: Any) -> Contamination:
    return contaminated(refs, first_step=first, last_step=first + 5, step=step, **more)


def test_everything_from_the_first_bad_step_on_is_affected() -> None:
    found = _of([_ref(10), _ref(20), _ref(30), _ref(40)])
    assert (found.affected, found.clean) == (("s30-a1", "s40-a1"), ("s10-a1", "s20-a1"))
    assert found.choice is not None
    assert (found.choice.id, found.choice.cost_steps) == ("s20-a1", 30)
    assert found.reason == "the newest clean one that is committed: 30 steps are trained again"


def test_the_edge_of_the_window() -> None:
    """The checkpoint of step 20 holds the update of step 20; that of step 19 does not."""
    found = _of([_ref(19), _ref(20)], first=20)
    assert (found.clean, found.affected) == (("s19-a1",), ("s20-a1",))


def test_a_proven_one_is_preferred_and_the_price_is_told() -> None:
    found = _of([_ref(10, rung=Rung.PROVEN), _ref(20)])
    assert (found.choice and found.choice.id, found.newest and found.newest.id) == ("s10-a1", "s20-a1")
    assert found.reason.endswith("40 steps are trained again; s20-a1 would cost 30, but is only committed")


def test_a_proof_by_another_node_is_preferred_to_one_by_its_writer() -> None:
    refs = [_ref(10, rung=Rung.PROVEN), _ref(20, rung=Rung.PROVEN)]
    written = {ref.id: ["n1"] for ref in refs}
    found = _of(refs, proven_on={"s10-a1": ["n2"], "s20-a1": ["n1"]}, written_on=written)
    assert found.choice is not None
    assert (found.choice.id, found.choice.proven_elsewhere) == ("s10-a1", True)
    assert found.reason.endswith("s20-a1 would cost 30, but is only proven by the node that wrote it")
    both = _of(refs, proven_on={"s10-a1": ["n2"], "s20-a1": ["n1", "n2"]}, written_on=written)
    assert both.choice == both.newest


def test_who_wrote_it_may_be_unknown() -> None:
    found = _of([_ref(10, rung=Rung.PROVEN)], proven_on={"s10-a1": ["n2"]})
    assert found.choice is not None
    assert not found.choice.proven_elsewhere


def test_suspect_damaged_and_abandoned_ones_are_no_way_back() -> None:
    found = _of([_ref(5), _ref(10, suspect=True), _ref(15, damaged=True), _ref(20, abandoned=True)])
    assert found.clean == ("s5-a1",)


def test_nothing_clean_is_left() -> None:
    found = _of([_ref(30)])
    assert (found.choice, found.newest) == (None, None)
    assert "only a fresh start is clean" in found.reason


@given(
    steps=st.lists(st.integers(0, 60), unique=True, max_size=10),
    rungs=st.lists(st.sampled_from(list(Rung)), min_size=10, max_size=10),
    first=st.integers(1, 60),
)
def test_the_choice_is_clean_and_no_other_of_its_kind_is_newer(steps: list[int], rungs: list[Rung], first: int) -> None:
    refs = [_ref(step, rung=rung) for step, rung in zip(sorted(steps), rungs, strict=False)]
    found = _of(refs, first=first, step=60)
    assert {*found.affected, *found.clean} == {ref.id for ref in refs}
    if found.choice is None:
        assert not found.clean
        return
    assert found.choice.id in found.clean
    assert found.choice.cost_steps == 60 - found.choice.step
    same = [ref.step for ref in refs if ref.step < first and ref.rung is found.choice.rung]
    assert found.choice.step == max(same)
