from __future__ import annotations

import random
from collections.abc import Callable

from surefoot.coordinate.stragglers import Look, RankTime, StragglerLimits, StragglerState, look

LIMITS = StragglerLimits()
Times = Callable[[int, random.Random], list[RankTime]]


def run(times: Times, *, num_steps: int, state: StragglerState | None = None, num_stages: int = 1, generation: int = 1) -> list[Look]:
    draw, looks, state = random.Random(0), [], state or StragglerState()
    for step in range(num_steps):
        looks.append(look(state, times(step, draw), generation=generation, num_stages=num_stages, limits=LIMITS))
        state = looks[-1].state
    return looks


def together(own_s: list[float]) -> list[RankTime]:
    """All ranks end together: whoever is fast waits for the slowest."""
    return [RankTime(max(own_s), max(own_s) - own, 0.0) for own in own_s]


def noisy(slow: int | None = None, *, by: float = 1.3, num_ranks: int = 4) -> Times:
    return lambda _, draw: together([0.1 * draw.uniform(0.95, 1.05) * (by if rank == slow else 1.0) for rank in range(num_ranks)])


def test_a_rank_that_is_slower_by_a_third_is_named_within_20_steps_whichever_it_is() -> None:
    for rank in range(4):
        found = [found for seen in run(noisy(rank), num_steps=20) for found in seen.found]
        assert [(named.rank, named.cause) for named in found] == [(rank, "compute")]
        assert 0.02 < found[0].lost_s < 0.04
        assert f"rank {rank} computes for longer" in found[0].reason


def test_two_ranks_name_the_slow_one_too() -> None:
    assert run(noisy(1, num_ranks=2), num_steps=20)[-1].state.named[0].rank == 1


def test_clean_steps_and_single_slow_ones_name_nobody() -> None:
    assert not any(seen.found for seen in run(noisy(), num_steps=200))
    hiccups: Times = lambda step, draw: noisy(2 if step % 4 == 0 else None, by=5.0)(step, draw)  # noqa: E731
    assert not any(seen.found for seen in run(hiccups, num_steps=200))
    one_busy_half: Times = lambda step, draw: noisy(2 if step < 10 else None)(step, draw)  # noqa: E731
    assert not any(seen.found for seen in run(one_busy_half, num_steps=100))


def test_what_costs_next_to_nothing_is_no_finding() -> None:
    assert not any(seen.found for seen in run(lambda *_: together([0.01, 0.01, 0.015]), num_steps=40))


def test_it_is_told_once_and_again_when_it_is_over() -> None:
    looks = run(lambda step, draw: noisy(1 if step < 60 else None)(step, draw), num_steps=120)
    assert [found.rank for seen in looks for found in seen.found] == [1]
    assert [gone.rank for seen in looks[60:] for gone in seen.gone] == [1]
    assert looks[-1].state.named == ()


def test_a_rank_that_waits_for_its_data_is_told_apart() -> None:
    named = run(lambda *_: [RankTime(0.1, 0.0, 0.0), RankTime(0.1, 0.0, 0.05), RankTime(0.1, 0.0, 0.0)], num_steps=20)[-1].state.named
    assert [(found.rank, found.cause) for found in named] == [(1, "data")]


def test_a_link_is_slow_where_the_rank_is_not() -> None:
    named = run(lambda *_: [RankTime(0.1, 0.02, 0.0), RankTime(0.1, 0.02, 0.0), RankTime(0.15, 0.07, 0.0)], num_steps=20)[-1].state.named
    assert [(found.rank, found.cause) for found in named] == [(2, "link")]


def test_stages_of_a_pipeline_are_compared_with_themselves() -> None:
    by_stage: Times = lambda *_: together([0.1, 0.1, 0.2, 0.2])  # noqa: E731
    assert not run(by_stage, num_steps=20, num_stages=2)[-1].state.named
    assert [found.rank for found in run(lambda *_: together([0.1, 0.1, 0.2, 0.3]), num_steps=20, num_stages=2)[-1].state.named] == [3]
    assert not run(lambda *_: together([0.1, 0.3]), num_steps=20, num_stages=2)[-1].state.named  # nobody to compare with


def test_another_generation_begins_anew() -> None:
    state = run(noisy(1), num_steps=20)[-1].state
    seen = run(noisy(1), num_steps=1, state=state, generation=2)[0]
    assert (len(seen.state.steps), seen.state.named, seen.gone) == (1, (), ())
