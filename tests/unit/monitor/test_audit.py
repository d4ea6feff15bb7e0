"""Who is wrong, from what ranks say about the same thing; what is replicated."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.monitor.audit import Opinion, Shared, rule, shared_parts

GOOD, BAD = 1, 2


def _about(name: str, *digests: tuple[int, int]) -> list[Opinion]:
    return [Opinion(name, rank, digest) for rank, digest in digests]


def _of_neighbours(num_ranks: int, faulty: dict[int, int], *, num_opinions: int) -> list[Opinion]:
    """Each atom as its owner and the ranks before it computed it; a faulty rank's digest is wrong in its own way."""
    return [
        Opinion(f"atom {owner}", rank, 100 * owner + faulty.get(rank, 0))
        for owner in range(num_ranks)
        for rank in ((owner - back) % num_ranks for back in range(num_opinions))
    ]


def test_who_agrees_is_well() -> None:
    assert rule([]).verdict == "agreed"
    assert rule(_of_neighbours(5, {}, num_opinions=3)).verdict == "agreed"


def test_two_say_that_and_not_who() -> None:
    ruling = rule(_about("w", (0, GOOD), (1, BAD)) + _about("v", (0, GOOD), (1, GOOD)))
    assert (ruling.verdict, ruling.ranks, ruling.about) == ("inconclusive", (0, 1), ("w",))
    assert ruling.reason == "ranks 0, 1 disagree about w, and there is no majority"


def test_one_of_two_that_contradicts_itself_is_named() -> None:
    ruling = rule(_about("atom", (0, GOOD), (0, GOOD), (1, GOOD), (1, BAD)))
    assert (ruling.verdict, ruling.ranks) == ("named", (1,))
    assert ruling.reason == "rank 1 contradicts itself: 1 of 1 comparisons differ"


@pytest.mark.parametrize(
    "said",
    [
        [(0, 1), (0, 2), (1, 3), (1, 4)],
        [(0, 1), (1, 2), (2, 3)],
        [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 5)],
    ],
    ids=["each of two contradicts itself", "no two of three agree", "one of three repeats itself, and no other"],
)
def test_what_differs_everywhere_accuses_nobody(said: list[tuple[int, int]]) -> None:
    ruling = rule(_about("atom", *said))
    assert (ruling.verdict, ruling.has_witness) == ("inconclusive", False)
    assert "bits do not repeat here" in ruling.reason
    assert rule(_about("atom", (0, GOOD), (1, GOOD), (2, BAD))).has_witness


def test_a_tie_names_nobody() -> None:
    assert rule(_about("w", (0, GOOD), (1, GOOD), (2, BAD), (3, BAD))).verdict == "inconclusive"


def test_pairs_alone_cannot_tell() -> None:
    """Each rank and the one before it: every opinion is held against one other."""
    ruling = rule(_of_neighbours(4, {2: 7}, num_opinions=2))
    assert (ruling.verdict, ruling.ranks) == ("inconclusive", (1, 2, 3))


@given(num_ranks=st.integers(3, 9), data=st.data())
def test_any_single_faulty_rank_is_named(num_ranks: int, data: st.DataObject) -> None:
    faulty = data.draw(st.integers(0, num_ranks - 1))
    ruling = rule(_of_neighbours(num_ranks, {faulty: data.draw(st.integers(1, 99))}, num_opinions=3))
    assert (ruling.verdict, ruling.ranks) == ("named", (faulty,))
    replicas = [Opinion("w", rank, BAD if rank == faulty else GOOD) for rank in range(num_ranks)]
    assert rule(replicas).ranks == (faulty,)


@given(num_ranks=st.integers(4, 9), data=st.data())
def test_a_rank_that_is_well_is_never_named(num_ranks: int, data: st.DataObject) -> None:
    """Of faulty ranks each in its own way: either they are all named, or all that may be are told."""
    faulty = data.draw(st.dictionaries(st.integers(0, num_ranks - 1), st.integers(1, 99), max_size=num_ranks))
    faulty = {rank: 100 * rank + way + 1000 * num_ranks for rank, way in faulty.items()}
    ruling = rule(_of_neighbours(num_ranks, faulty, num_opinions=3))
    if ruling.verdict == "named":
        assert set(ruling.ranks) == set(faulty)
    else:
        assert set(ruling.ranks) >= set(faulty)


def test_two_faulty_neighbours_of_many_are_both_named() -> None:
    for pair in combinations(range(6), 2):
        assert rule(_of_neighbours(6, {rank: 10 + rank for rank in pair}, num_opinions=3)).ranks == pair


WHOLE, FIRST, SECOND, EMPTY = ((4, 4), (0, 0)), ((2, 4), (0, 0)), ((2, 4), (2, 0)), ((0, 4), (4, 0))


@pytest.mark.parametrize(
    ("held", "shared"),
    [
        ([{"w": WHOLE}, {"w": WHOLE, "v": WHOLE}], (Shared((0, 1), ("w",)),)),
        ([{"w": FIRST}, {"w": SECOND}], ()),
        ([{"w": EMPTY}, {"w": EMPTY}], ()),
        ([{"w": FIRST}, {"w": SECOND}, {"w": FIRST}, {"w": SECOND}], (Shared((0, 2), ("w",)), Shared((1, 3), ("w",)))),
        ([{"w": FIRST, "step": ((), ())}, {"w": SECOND, "step": ((), ())}], (Shared((0, 1), ("step",)),)),
    ],
    ids=["copies", "shards", "nothing", "copies of shards", "a scalar beside shards"],
)
def test_what_is_replicated(held: list[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]], shared: tuple[Shared, ...]) -> None:
    assert shared_parts(held) == shared
