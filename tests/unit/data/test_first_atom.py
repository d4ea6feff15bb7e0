"""Another rank's first atom of the step that was handed out last: what an audit computes a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.core.errors import DataError
from tests.unit.data.test_loader import OpenLoader, assert_same_batch


@pytest.mark.parametrize("rotation", [0, 1])
def test_it_is_what_that_rank_had_and_moves_nothing(open_loader: OpenLoader, prepared: Path, rotation: int) -> None:
    num_ranks = 3
    loaders = [open_loader(prepared, rank=rank, num_ranks=num_ranks, global_batch_size=5, rotation=rotation) for rank in range(num_ranks)]
    for _ in range(2):
        steps = [next(loader) for loader in loaders]
    cursors = [loader.cursor() for loader in loaders]
    for rank, loader in enumerate(loaders):
        for shift in range(num_ranks + 1):
            assert_same_batch(loader.first_atom(shift=shift), steps[(rank + shift) % num_ranks].micro_batches[0])
    assert [loader.cursor() for loader in loaders] == cursors
    following = [next(loader).micro_batches[0].atom for loader in loaders]
    assert following == [step.micro_batches[0].atom for step in steps]


def test_before_the_first_step_there_is_none(open_loader: OpenLoader, prepared: Path) -> None:
    with pytest.raises(DataError, match="no step was handed out yet"):
        open_loader(prepared).first_atom(shift=1)
