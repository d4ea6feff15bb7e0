from __future__ import annotations

import math

import pytest

from surefoot.heal.diagnosis import RankFigures, Run, compare_repetition, compare_rotated, data_or_state


def run(*losses: float, rotation: int = 0, norms: tuple[float, ...] = (), grad_norm: float = 1.0) -> Run:
    norms = norms or (1.0,) * len(losses)
    return Run(rotation, tuple(RankFigures(loss, 64, norm) for loss, norm in zip(losses, norms, strict=True)), grad_norm)


def rotated(of: Run) -> Run:
    return Run(1, (of.ranks[-1], *of.ranks[:-1]), of.grad_norm)


def test_the_same_bits_again_say_nothing_nan_included() -> None:
    assert compare_repetition(run(1.0, 2.0, math.nan), run(1.0, 2.0, math.nan)) is None


@pytest.mark.parametrize("again", [run(1.0, 2.0, 3.5), run(1.0, 2.0, 3.0, norms=(1.0, 1.0, 9.0))])
def test_the_rank_whose_figures_differ_had_a_transient_fault(again: Run) -> None:
    found = compare_repetition(run(1.0, 2.0, 3.0), again)
    assert found is not None
    assert (found.cause, found.ranks, found.is_transient) == ("hardware", (2,), True)


def test_where_all_ranks_differ_the_machine_does_not_repeat_its_bits() -> None:
    found = compare_repetition(run(1.0, 2.0), run(1.5, 2.5))
    assert found is not None
    assert found.cause == "inconclusive"


def test_a_norm_that_differs_without_a_rank_is_inconclusive_but_on_one_rank() -> None:
    found = compare_repetition(run(1.0, 2.0), run(1.0, 2.0, grad_norm=3.0))
    assert found is not None
    assert (found.cause, found.ranks) == ("inconclusive", ())
    found = compare_repetition(run(1.0), run(1.0, grad_norm=3.0))
    assert found is not None
    assert (found.cause, found.ranks) == ("hardware", (0,))


def test_where_half_of_the_ranks_differ_none_is_named() -> None:
    found = compare_repetition(run(1.0, 2.0, 3.0, 4.0), run(1.5, 2.0, 3.5, 4.0))
    assert found is not None
    assert found.cause == "inconclusive"


def test_a_replay_on_other_ranks_asks_for_figures_that_are_alike() -> None:
    again = run(1.0, 2.0, 3.0)
    alike = run(3.001, 1.001, 2.001, rotation=1)
    assert compare_rotated(again, alike, tolerance=0.01) is None
    assert compare_rotated(again, alike) is not None
    wrong = compare_rotated(again, run(3.001, 1.001, 2.5, rotation=1), tolerance=0.01)
    assert wrong is not None


def test_figures_that_move_with_their_atoms_name_no_rank() -> None:
    again = run(1.0, 9.0, 3.0)
    assert compare_rotated(again, rotated(again)) is None


@pytest.mark.parametrize("num_ranks", [3, 4, 7])
def test_the_rank_that_makes_others_of_its_atoms_than_its_neighbours_is_named(num_ranks: int) -> None:
    atoms = [float(atom) for atom in range(num_ranks)]
    for culprit in range(num_ranks):
        again = run(*(loss + 100.0 * (rank == culprit) for rank, loss in enumerate(atoms)))
        moved = [atoms[(rank - 1) % num_ranks] + 100.0 * (rank == culprit) for rank in range(num_ranks)]
        found = compare_rotated(again, run(*moved, rotation=1))
        assert found is not None
        assert (found.cause, found.ranks, found.is_transient) == ("hardware", (culprit,), False)


def test_two_ranks_cannot_be_told_apart() -> None:
    found = compare_rotated(run(101.0, 2.0), run(102.0, 1.0, rotation=1))
    assert found is not None
    assert (found.cause, found.ranks) == ("inconclusive", (0, 1))


def test_the_canary_tells_data_from_state() -> None:
    assert data_or_state(run(1.0, 9.0), ill_ranks=(1,), canary_is_high=False).cause == "data"
    assert data_or_state(run(1.0, 9.0), ill_ranks=(1,), canary_is_high=True).cause == "state"


def test_without_a_canary_the_spread_over_ranks_does() -> None:
    found = data_or_state(run(1.0, 9.0), ill_ranks=(1,), canary_is_high=None)
    assert (found.cause, found.ranks) == ("data", (1,))
    assert data_or_state(run(9.0, 9.0), ill_ranks=(0, 1), canary_is_high=None).cause == "state"
    assert data_or_state(run(9.0, 9.0), ill_ranks=(), canary_is_high=None).cause == "state"
    assert data_or_state(run(9.0), ill_ranks=(0,), canary_is_high=None).cause == "inconclusive"
