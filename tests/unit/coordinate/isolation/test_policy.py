"""Whether a node is taken out of service: a branch each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.coordinate.isolation.burn_in import burn_in
from surefoot.coordinate.isolation.policy import IsolationCaps, Past, decide_isolation, decide_readmission
from surefoot.coordinate.isolation.records import Wish, is_node_name, reason_of
from surefoot.core.clock import ManualClock

FLEET = ("n1", "n2", "n3")
CAPS = IsolationCaps("auto", max_nodes=2, max_share=1.0, min_nodes=1)
WISH = Wish("n1", "g3", "its device is lost")


def test_a_certain_fault_of_one_node_is_acted_upon() -> None:
    assert decide_isolation(WISH, fleet=FLEET, past=(), caps=CAPS).kind == "isolate"


@pytest.mark.parametrize(("mode", "kind"), [("dry_run", "say"), ("ask", "ask"), ("auto", "isolate")])
def test_the_mode_says_who_decides_and_a_person_may(mode: str, kind: str) -> None:
    caps = replace(CAPS, mode=mode)  # type: ignore[arg-type]
    assert decide_isolation(WISH, fleet=FLEET, past=(), caps=caps).kind == kind
    assert decide_isolation(WISH, fleet=FLEET, past=(), caps=caps, confirmed=True).kind == "isolate"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (replace(WISH, confidence="inconclusive"), "inconclusive"),
        (replace(WISH, grade="large-scale"), "not one of a single node"),
        (replace(WISH, grade="process"), "not one of a single node"),
        (replace(WISH, node="n9"), "no node of this run"),
    ],
)
def test_no_node_goes_on_a_guess_or_for_what_is_not_its_own(wish: Wish, words: str) -> None:
    decision = decide_isolation(wish, fleet=FLEET, past=(), caps=CAPS, confirmed=True)
    assert decision.kind == "refuse"
    assert words in decision.reason


def test_a_node_that_is_out_is_not_taken_out_again_and_one_that_came_back_is() -> None:
    assert decide_isolation(WISH, fleet=FLEET, past=(Past("n1", 5.0),), caps=CAPS).kind == "already"
    assert decide_isolation(WISH, fleet=FLEET, past=(Past("n1", 5.0, is_out=False),), caps=CAPS).kind == "isolate"


def test_the_cap_of_a_day() -> None:
    one_a_day = replace(CAPS, max_nodes=1)
    assert decide_isolation(WISH, fleet=FLEET, past=(Past("n2", 100.0, is_out=False),), caps=one_a_day).kind == "refuse"
    assert decide_isolation(WISH, fleet=FLEET, past=(Past("n2", 86401.0, is_out=False),), caps=one_a_day).kind == "isolate"
    assert decide_isolation(WISH, fleet=FLEET, past=(), caps=replace(CAPS, max_nodes=0)).kind == "refuse"


def test_the_share_of_a_fleet_never_forbids_the_first_node() -> None:
    few = replace(CAPS, max_nodes=9, max_share=0.05)
    assert decide_isolation(WISH, fleet=FLEET, past=(), caps=few).kind == "isolate"
    assert decide_isolation(WISH, fleet=FLEET, past=(Past("n2", 1.0, is_out=False),), caps=few).kind == "refuse"
    many = tuple(f"n{number}" for number in range(60))
    past = (Past("n2", 1.0), Past("n3", 1.0))
    assert decide_isolation(WISH, fleet=many, past=past, caps=few).kind == "isolate"
    assert decide_isolation(WISH, fleet=many, past=(*past, Past("n4", 1.0)), caps=few).kind == "refuse"


def test_never_fewer_nodes_than_the_run_needs() -> None:
    needs_two = replace(CAPS, min_nodes=2)
    assert decide_isolation(WISH, fleet=FLEET, past=(), caps=needs_two).kind == "isolate"
    decision = decide_isolation(WISH, fleet=FLEET, past=(Past("n2", 1e6),), caps=needs_two)
    assert (decision.kind, decision.reason) == ("refuse", "1 nodes would be left, and the run needs 2")


@pytest.mark.parametrize(
    ("passed_for_s", "num_failed", "is_ours", "kind"),
    [(600.0, 0, True, "already"), (599.0, 0, True, "say"), (600.0, 1, True, "refuse"), (600.0, 0, False, "refuse")],
)
def test_readmission(passed_for_s: float, num_failed: int, is_ours: bool, kind: str) -> None:
    assert decide_readmission(passed_for_s=passed_for_s, burn_in_s=600.0, num_failed=num_failed, is_ours=is_ours).kind == kind


def test_a_burn_in_lasts_its_time_and_ends_at_the_first_failure() -> None:
    clock = ManualClock()
    shown = burn_in(lambda: [], burn_in_s=25.0, every_s=10.0, clock=clock)
    assert (shown.passed_for_s, shown.num_rounds, shown.decide(burn_in_s=25.0, is_ours=True).kind) == (25.0, 4, "already")
    told = iter([[], ["disk: slow"]])
    shown = burn_in(lambda: next(told), burn_in_s=25.0, every_s=10.0, clock=clock)
    assert (shown.num_rounds, shown.failures, shown.decide(burn_in_s=25.0, is_ours=True).kind) == (2, ("disk: slow",), "refuse")


def test_a_reason_is_one_plain_line() -> None:
    reason = reason_of("g3", "a\n'b' `c` $d " + "x" * 300)
    assert reason.startswith("surefoot:g3: a b c d xxx")
    assert len(reason) == 200


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("n1", True),
        ("gpu-7.site.org", True),
        ("n[1-4]", False),
        ("a,b", False),
        ("ALL", False),
        ("all", False),
        ("", False),
        ("-n", False),
        ("a b", False),
    ],
)
def test_only_a_name_is_a_name(name: str, is_one: bool) -> None:
    assert is_node_name(name) is is_one
