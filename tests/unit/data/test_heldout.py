"""Which held-out samples there are: one set for evaluations, and behind it another for the canary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.data.batches import HeldoutBatches
from surefoot.data.loader import ShardedLoader
from surefoot.tensors.batch import IGNORED_LABEL
from tests.three_sources import SOURCES, prepare_three

OpenLoader = Callable[..., ShardedLoader]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "out")


def samples_of(*parts: HeldoutBatches) -> list[tuple[str, int]]:
    """(source, sample) of all rows but phantoms, in the order of atoms."""
    atoms = sorted(
        ((batch.atom, batch, rows) for part in parts for batch, rows in zip(part.micro_batches, part.source_of_row, strict=True)),
        key=lambda atom: atom[0],
    )
    return [
        (parts[0].sources[source], sample)
        for _, batch, rows in atoms
        for source, sample in zip(rows, batch.sample_ids_B.tolist(), strict=True)
        if source >= 0
    ]


def test_those_behind_the_first_are_others_as_long_as_there_are_any(open_loader: OpenLoader, three: Path) -> None:
    loader = open_loader(three)
    everything = loader.heldout_batches(10**6)
    assert len(set(samples_of(everything))) == everything.num_samples >= 20
    first, behind = loader.heldout_batches(8), loader.heldout_batches(10, behind=8)
    assert (first.num_samples, behind.num_samples) == (8, 10)
    assert set(samples_of(first)).isdisjoint(samples_of(behind))
    assert set(samples_of(loader.heldout_batches(10))) > set(samples_of(first))  # the control: not behind, they are the same
    most = everything.num_samples - 3
    overlapping = set(samples_of(loader.heldout_batches(most, behind=8)))
    assert len(overlapping) == most
    assert len(overlapping & set(samples_of(first))) >= 5


def test_sources_are_represented_as_they_are_held_out(open_loader: OpenLoader, three: Path) -> None:
    loader = open_loader(three)
    held = Counter(source for source, _ in samples_of(loader.heldout_batches(10**6)))
    behind = Counter(source for source, _ in samples_of(loader.heldout_batches(10, behind=8)))
    assert sorted(held) == sorted(SOURCES)
    for source, number in held.items():
        assert abs(behind[source] - 10 * number / sum(held.values())) < 1


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_know_their_source_on_any_number_of_ranks(open_loader: OpenLoader, three: Path, num_ranks: int) -> None:
    alone = open_loader(three).heldout_batches(11, behind=4)
    parts = [open_loader(three, rank=rank, num_ranks=num_ranks).heldout_batches(11, behind=4) for rank in range(num_ranks)]
    assert samples_of(*parts) == samples_of(alone)
    for source in range(len(SOURCES)):
        assert sum(part.live_tokens_of_source[source] for part in parts) == alone.live_tokens_of_source[source]
        labels = [
            batch.labels_BS[row]
            for batch, rows in zip(alone.micro_batches, alone.source_of_row, strict=True)
            for row, own in enumerate(rows)
            if own == source
        ]
        assert sum(int((row != IGNORED_LABEL).sum()) for row in labels) == alone.live_tokens_of_source[source]
