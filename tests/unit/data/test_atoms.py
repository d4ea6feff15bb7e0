from __future__ import annotations

import pytest

from surefoot.core.errors import ConfigError
from surefoot.data.atoms import deal
from surefoot.data.steps import StepPlan


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_split_covers_each_slot_once_in_the_right_place(num_ranks: int) -> None:
    for num_samples in range(1, 14):
        for micro_batch_size in range(1, num_samples + 2):
            for rotation in range(num_ranks):
                dealt = [
                    deal(num_samples, micro_batch_size=micro_batch_size, num_ranks=num_ranks, rank=rank, rotation=rotation)
                    for rank in range(num_ranks)
                ]
                assert len({len(atoms) for atoms in dealt}) == 1, "a rank would leave the others waiting"
                for rank, atoms in enumerate(dealt):
                    for micro_step, atom in enumerate(atoms):
                        assert atom.index // num_ranks == micro_step
                        assert (atom.index + rotation) % num_ranks == rank
                        assert atom.first_slot == atom.index * micro_batch_size
                        assert 0 <= atom.num_rows <= micro_batch_size
                every_atom = sorted((atom for atoms in dealt for atom in atoms), key=lambda atom: atom.index)
                slots = [slot for atom in every_atom for slot in range(atom.first_slot, atom.first_slot + atom.num_rows)]
                assert slots == list(range(num_samples))
                num_real = -(-num_samples // micro_batch_size)
                assert [atom.is_phantom for atom in every_atom] == [index >= num_real for index in range(len(every_atom))]


def test_what_is_in_an_atom_does_not_hang_on_the_ranks() -> None:
    alone = {atom.index: atom for atom in deal(23, micro_batch_size=4, num_ranks=1, rank=0)}
    for num_ranks in (2, 3, 4):
        for rank in range(num_ranks):
            for atom in deal(23, micro_batch_size=4, num_ranks=num_ranks, rank=rank, rotation=1):
                assert atom.is_phantom or alone[atom.index] == atom


def test_without_a_ramp_every_step_is_alike() -> None:
    plan = StepPlan(global_batch_size=6)
    assert [plan.span(step) for step in (0, 1, 1000)] == [(0, 6), (6, 6), (6000, 6)]
    assert [plan.step_at(sample) for sample in (0, 5, 6, 6005)] == [0, 0, 1, 1000]


RAMPS = [
    ((0, 4),),
    ((0, 2), (6, 4)),
    ((0, 2), (7, 4)),  # in the middle of a step: the step that began at 6 keeps its size
    ((0, 8), (1, 3), (2, 5), (20, 4)),  # entries that pass before any step begins under them
    ((0, 3), (3, 1), (10, 7), (11, 4)),
]


@pytest.mark.parametrize("ramp", RAMPS)
def test_a_ramp_equals_walking_step_by_step(ramp: tuple[tuple[int, int], ...]) -> None:
    plan = StepPlan(ramp, global_batch_size=ramp[-1][1])
    first = 0
    for step in range(60):
        batch = [size for start, size in ramp if start <= first][-1]
        assert plan.span(step) == (first, batch)
        assert plan.batch_at(first) == batch
        assert {plan.step_at(sample) for sample in range(first, first + batch)} == {step}
        first += batch


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        (((5, 4),), "starts at sample 5"),
        (((0, 2), (0, 4)), "do not increase"),
        (((0, 2), (8, 1), (4, 4)), "do not increase"),
        (((0, 0), (8, 4)), "less than one"),
        (((0, 2), (8, 3)), "global_batch_size is 4"),
    ],
)
def test_a_ramp_that_leaves_a_size_open_is_refused(ramp: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        StepPlan(ramp, global_batch_size=4)
    assert caught.value.where == "[train] batch_ramp"
