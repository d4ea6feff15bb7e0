from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.core.errors import DataError
from surefoot.core.ports import DataPort
from surefoot.core.sections import SourceSection
from surefoot.core.strict_json import canonical, dumps
from surefoot.data.batches import StepBatch
from surefoot.data.cursor import source_identity
from surefoot.data.loader import ShardedLoader
from surefoot.data.manifest import load_manifest
from surefoot.data.shards import HEADER_BYTES, TokenStore
from surefoot.data.source_order import Era, Source
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch

SEQ_LEN = 16
RAMP = ((0, 3), (10, 7), (40, 6))

OpenLoader = Callable[..., ShardedLoader]


def atoms_in_order(steps: list[StepBatch]) -> list[Batch]:
    return sorted((batch for step in steps for batch in step.micro_batches), key=lambda batch: batch.atom)


def ids_of(steps: list[StepBatch]) -> list[int]:
    """The sample ids of one step over all ranks, in slot order, phantoms left out."""
    ids = [int(sample) for batch in atoms_in_order(steps) for sample in batch.sample_ids_B]
    return [sample for sample in ids if sample != PHANTOM_SAMPLE]


def consumed_ids(open_loader: OpenLoader, path: Path, *, num_ranks: int, num_steps: int, **settings: Any) -> list[int]:
    loaders = [open_loader(path, rank=rank, num_ranks=num_ranks, **settings) for rank in range(num_ranks)]
    return [sample for _ in range(num_steps) for sample in ids_of([next(loader) for loader in loaders])]


def indices_at(num_samples: int, numbers: Any, *, restart: int = 0) -> list[int]:
    """The order of the one source of these tests, straight from its permutations."""
    era = Era(Source("text", num_samples, SEQ_LEN, seed=7, restart=restart), 0, SEQ_LEN)
    return [start // SEQ_LEN for start in era.at(np.asarray(numbers)).starts.tolist()]


def assert_same_batch(one: Batch, other: Batch) -> None:
    for name in ("tokens_BS", "labels_BS", "positions_BS", "doc_ids_BS", "sample_ids_B"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.num_live_tokens, one.atom) == (other.num_live_tokens, other.atom)


def num_read_calls() -> int:
    """Read system calls of this process so far."""
    return int(Path("/proc/self/io").read_text().split("syscr: ")[1].split()[0])


def test_it_is_a_data_port(open_loader: OpenLoader, prepared: Path) -> None:
    loader = open_loader(prepared)
    assert isinstance(loader, DataPort)
    assert iter(loader) is loader


def test_a_batch_is_the_packed_tokens_of_the_order(open_loader: OpenLoader, prepared: Path) -> None:
    loader = open_loader(prepared)
    step = next(loader)
    indices = indices_at(loader.num_samples, range(6))
    store = TokenStore(prepared, source="text", split="train")
    batches = step.micro_batches
    assert [batch.atom for batch in batches] == [0, 1, 2]
    for row, index in enumerate(indices):
        batch, place = batches[row // 2], row % 2
        tokens = store.read(index * SEQ_LEN, SEQ_LEN + 1).astype(np.int64)
        assert batch.sample_ids_B[place] == index
        assert batch.tokens_BS[place].tolist() == tokens[:-1].tolist()
        labels = np.where(tokens[:-1] == 256, IGNORED_LABEL, tokens[1:])
        assert batch.labels_BS[place].tolist() == labels.tolist()
    store.close()
    assert {batch.tokens_BS.dtype for batch in batches} == {torch.int64}
    assert (step.first_sample, step.num_samples) == (0, 6)
    assert step.num_live_tokens == sum(int((batch.labels_BS != IGNORED_LABEL).sum()) for batch in batches)
    assert step.data_wait_s >= 0.0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("ramp", [(), RAMP])
def test_ids_are_the_same_for_all_ranks_and_splits(
    open_loader: OpenLoader, prepared: Path, num_ranks: int, ramp: tuple[tuple[int, int], ...]
) -> None:
    num_steps = 25
    wanted = consumed_ids(open_loader, prepared, num_ranks=1, num_steps=num_steps, micro_batch_size=1, batch_ramp=ramp)
    assert wanted == indices_at(open_loader(prepared).num_samples, range(len(wanted)))
    for micro_batch_size in range(1, 8):
        settings: dict[str, Any] = {"micro_batch_size": micro_batch_size, "batch_ramp": ramp, "rotation": micro_batch_size % num_ranks}
        assert consumed_ids(open_loader, prepared, num_ranks=num_ranks, num_steps=num_steps, **settings) == wanted


def test_each_sample_comes_once_per_epoch_over_ranks_that_do_not_divide_it(open_loader: OpenLoader, prepared: Path) -> None:
    num_samples = open_loader(prepared).num_samples
    ids = consumed_ids(open_loader, prepared, num_ranks=3, num_steps=3 * num_samples // 7 + 1, global_batch_size=7)
    for epoch in range(3):
        assert sorted(ids[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_an_atom_is_the_same_on_every_number_of_ranks_and_every_rotation(open_loader: OpenLoader, prepared: Path) -> None:
    alone = next(open_loader(prepared, global_batch_size=7, micro_batch_size=2)).micro_batches
    for num_ranks in (2, 3, 4):
        for rotation in range(num_ranks):
            loaders = [
                open_loader(prepared, rank=rank, num_ranks=num_ranks, rotation=rotation, global_batch_size=7) for rank in range(num_ranks)
            ]
            steps = [next(loader) for loader in loaders]
            assert len({len(step.micro_batches) for step in steps}) == 1
            atoms = atoms_in_order(steps)
            for batch, wanted in zip(atoms, alone, strict=False):
                assert_same_batch(batch, wanted)
            assert all(batch.is_phantom for batch in atoms[len(alone) :])
            assert sum(step.num_live_tokens for step in steps) == sum(batch.num_live_tokens for batch in alone)


def test_phantoms_have_the_shape_of_all_and_nothing_to_learn(open_loader: OpenLoader, prepared: Path) -> None:
    step = next(open_loader(prepared, rank=3, num_ranks=4, global_batch_size=5, micro_batch_size=2))
    (batch,) = step.micro_batches
    assert (batch.is_phantom, batch.atom, batch.num_live_tokens, step.num_live_tokens) == (True, 3, 0, 0)
    assert batch.tokens_BS.shape == (2, SEQ_LEN)
    assert not batch.tokens_BS.any()
    assert not batch.doc_ids_BS.any()
    assert (batch.labels_BS == IGNORED_LABEL).all()
    assert batch.positions_BS.tolist() == [list(range(SEQ_LEN))] * 2
    assert batch.sample_ids_B.tolist() == [PHANTOM_SAMPLE] * 2


def test_a_part_filled_atom_has_phantom_rows_at_its_end(open_loader: OpenLoader, prepared: Path) -> None:
    batch = next(open_loader(prepared, global_batch_size=3, micro_batch_size=2)).micro_batches[-1]
    assert not batch.is_phantom
    assert batch.sample_ids_B[0] != PHANTOM_SAMPLE
    assert batch.sample_ids_B[1] == PHANTOM_SAMPLE
    assert (batch.labels_BS[1] == IGNORED_LABEL).all()


def test_the_cursor_after_any_resumes_is_that_of_no_resume(open_loader: OpenLoader, prepared: Path) -> None:
    """Random places, epoch edges, back to back, with another number of ranks each time."""
    settings: dict[str, Any] = {"batch_ramp": RAMP}
    straight = open_loader(prepared, **settings)
    wanted_ids, wanted_cursors = [], [canonical(straight.cursor())]
    num_steps = 3 * straight.num_samples // 6
    for step in islice(straight, num_steps):
        wanted_ids.append(ids_of([step]))
        wanted_cursors.append(canonical(straight.cursor()))
    rng = random.Random(0)
    done, cursor = 0, json.loads(wanted_cursors[0])
    ids: list[list[int]] = []
    while done < num_steps:
        num_ranks, num_here = rng.randint(1, 4), min(rng.choice((0, 1, 2, 9)), num_steps - done)
        micro_batch_size = rng.randint(1, 3)
        loaders = [
            open_loader(prepared, rank=rank, num_ranks=num_ranks, micro_batch_size=micro_batch_size, **settings)
            for rank in range(num_ranks)
        ]
        for loader in loaders:
            loader.seek(cursor)
        ids.extend(ids_of([next(loader) for loader in loaders]) for _ in range(num_here))
        done += num_here
        assert {canonical(loader.cursor()) for loader in loaders} == {wanted_cursors[done]}
        cursor = json.loads(wanted_cursors[done])
    assert ids == wanted_ids


def test_counts_are_of_the_whole_job(open_loader: OpenLoader, prepared: Path) -> None:
    loaders = [open_loader(prepared, rank=rank, num_ranks=2, batch_ramp=RAMP) for rank in range(2)]
    for loader in loaders:
        for _ in range(5):
            next(loader)
        assert loader.next_sample == 4 * 3 + 7
        assert loader.consumed_tokens == loader.next_sample * SEQ_LEN
        assert loader.cursor()["next_step"] == 5


def test_a_batch_size_that_changes_at_a_resume_loses_nothing(open_loader: OpenLoader, prepared: Path) -> None:
    loader = open_loader(prepared, global_batch_size=6)
    first = [ids_of([next(loader)]) for _ in range(3)]
    other = open_loader(prepared, global_batch_size=4)
    other.seek(loader.cursor())
    second = [ids_of([next(other)]) for _ in range(3)]
    assert [sample for step in (*first, *second) for sample in step] == indices_at(loader.num_samples, range(30))
    assert other.cursor()["next_step"] == 6


def test_seek_reads_at_most_64_samples_however_far(open_loader: OpenLoader, prepared: Path) -> None:
    """Position 10^15 is found at once: it is arithmetic."""
    far = open_loader(prepared)
    near = far.cursor()
    epoch, position = divmod(10**15, far.num_samples)
    distant = {
        **near,
        "next_sample": 10**15,
        "consumed_tokens": SEQ_LEN * 10**15,
        "per_source": {"text": {**near["per_source"]["text"], "epoch": epoch, "position": position}},
    }
    far.seek({**distant, "order_probe": ""})
    proven = far.cursor()
    before = num_read_calls()
    far.seek(proven)
    assert num_read_calls() - before <= 2 * 64 + 2, "tokens and checksums of each probed sample, and the two of this count"
    assert far.cursor() == proven
    assert ids_of([next(far)]) == indices_at(far.num_samples, 10**15 + np.arange(6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "seed"),
        ({"seq_len": 8}, "seq_len"),
    ],
)
def test_another_recipe_is_refused_and_nothing_moves(open_loader: OpenLoader, prepared: Path, change: dict[str, Any], message: str) -> None:
    loader = open_loader(prepared)
    next(loader)
    other = open_loader(prepared, **change)
    next(other)
    before = other.cursor()
    with pytest.raises(DataError, match=message):
        other.seek(loader.cursor())
    assert other.cursor() == before


def test_a_probe_that_differs_is_refused(open_loader: OpenLoader, prepared: Path) -> None:
    loader = open_loader(prepared)
    next(loader)
    cursor = loader.cursor()
    with pytest.raises(DataError, match="not those that the run consumed"):
        loader.seek({**cursor, "order_probe": "0" * 64})
    with pytest.raises(DataError, match="the place of source 'text'"):
        loader.seek({**cursor, "next_sample": 7})
    loader.seek(cursor)


def test_changed_data_is_refused_or_bridged_by_choice(open_loader: OpenLoader, prepared: Path, other_prepared: Path) -> None:
    old = open_loader(prepared)
    for _ in range(4):
        next(old)
    cursor = old.cursor()

    refusing = open_loader(other_prepared)
    with pytest.raises(DataError, match="the data changed"):
        refusing.seek(cursor)
    assert refusing.next_sample == 0

    mapped = open_loader(other_prepared, on_data_change="map")
    mapped.seek(cursor)
    assert ids_of([next(mapped)]) == indices_at(mapped.num_samples, range(24, 30))
    assert mapped.data_change
    assert mapped.data_change.startswith("map:")

    restarted = open_loader(other_prepared, on_data_change="restart-source")
    restarted.seek(cursor)
    first_epoch = ids_of([next(restarted) for _ in range(1)])
    assert first_epoch == indices_at(restarted.num_samples, range(6), restart=1)
    data = source_identity(load_manifest(other_prepared), "text")
    assert restarted.cursor()["per_source"]["text"] == {"first_sample": 24, "restart": 1, "epoch": 0, "position": 6, "data": data}

    # From then on it is a cursor like any other: no choice is needed to go on.
    for bridged in (mapped, restarted):
        later = open_loader(other_prepared)
        later.seek(bridged.cursor())
        assert later.data_change is None
        assert canonical(later.cursor()) == canonical(bridged.cursor())
        assert ids_of([next(later)]) == ids_of([next(bridged)])


def test_unchanged_data_needs_no_bridge(open_loader: OpenLoader, prepared: Path) -> None:
    loader = open_loader(prepared, on_data_change="map")
    next(loader)
    cursor = loader.cursor()
    loader.seek(cursor)
    assert loader.data_change is None
    assert loader.cursor() == cursor


def test_data_that_was_moved_is_the_same_data(open_loader: OpenLoader, prepared: Path, tmp_path: Path) -> None:
    loader = open_loader(prepared)
    next(loader)
    shutil.copytree(prepared, tmp_path / "elsewhere")
    moved = open_loader(tmp_path / "elsewhere")
    moved.seek(loader.cursor())
    assert moved.cursor() == loader.cursor()


def test_a_flipped_bit_stops_the_run_with_the_sample_that_needed_it(open_loader: OpenLoader, prepared: Path, tmp_path: Path) -> None:
    shutil.copytree(prepared, tmp_path / "copy")
    path = tmp_path / "copy" / "text" / "train" / "00000.tok"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 5] ^= 1
    path.write_bytes(data)
    loader = open_loader(tmp_path / "copy")
    with pytest.raises(DataError, match=r"block 0 at byte 4096 .* needed for sample \d+"):
        next(loader)


def test_an_id_that_the_tokenizer_does_not_have_is_named(open_loader: OpenLoader, prepared: Path, tmp_path: Path) -> None:
    """Checksums of a foreign shard may be right: the ids are not."""
    shutil.copytree(prepared, tmp_path / "copy")
    manifest = load_manifest(prepared)
    smaller = replace(manifest, tokenizer=replace(manifest.tokenizer, vocab_size=100))
    (tmp_path / "copy" / "manifest.json").write_text(dumps(smaller.as_json()))
    with pytest.raises(DataError, match=r"id \d+ at position \d+ of sample \d+, the tokenizer has 100 ids") as caught:
        next(open_loader(tmp_path / "copy"))
    assert caught.value.exit_code == 4


def test_too_little_text_for_one_sample_is_refused(open_loader: OpenLoader, prepared: Path) -> None:
    with pytest.raises(DataError, match="hold no sample of 100001"):
        open_loader(prepared, seq_len=100_000)


def test_unknown_sources_are_refused(open_loader: OpenLoader, prepared: Path) -> None:
    open_loader(prepared, sources=(SourceSection(name="text"),))
    for sources in ((SourceSection(name="text"), SourceSection(name="code")), (SourceSection(name="code"),)):
        with pytest.raises(DataError, match="no source 'code' in the prepared data"):
            open_loader(prepared, sources=sources)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_held_out_samples_are_the_same_however_they_are_dealt(open_loader: OpenLoader, prepared: Path, num_ranks: int) -> None:
    wanted = open_loader(prepared, seed=1).heldout_batches(7)
    parts = [open_loader(prepared, rank=rank, num_ranks=num_ranks, micro_batch_size=2).heldout_batches(7) for rank in range(num_ranks)]
    assert len({len(part.micro_batches) for part in parts}) == 1
    batches = sorted((batch for part in parts for batch in part.micro_batches), key=lambda batch: batch.atom)
    for batch, same in zip(batches, wanted.micro_batches, strict=False):
        assert_same_batch(batch, same)
    ids = [int(sample) for batch in batches for sample in batch.sample_ids_B if sample != PHANTOM_SAMPLE]
    assert len(set(ids)) == len(ids) == 7
    assert sum(part.num_live_tokens for part in parts) == wanted.num_live_tokens
    assert sum(part.num_bytes for part in parts) == wanted.num_bytes


def test_all_held_out_text_is_used_and_its_bytes_are_counted(open_loader: OpenLoader, prepared: Path) -> None:
    loader = open_loader(prepared)
    split = loader.manifest.split("text", "heldout")
    held = loader.heldout_batches(10**6)
    # Every token but the first of the stream is a label once, except the first of each later document: no one can foretell it.
    assert held.num_live_tokens == split.tokens - 1 - (split.docs - 1)
    assert held.num_bytes == split.text_bytes - split.docs
    assert loader.heldout_batches().num_live_tokens <= held.num_live_tokens
    assert loader.next_sample == 0


def test_without_held_out_documents_there_is_nothing_to_evaluate(open_loader: OpenLoader, prepared: Path, tmp_path: Path) -> None:
    from surefoot.data.prepare import prepare

    (tmp_path / "one.txt").write_text("only one document, long enough for a few samples of it")
    prepare([SourceSection(name="text", files=(str(tmp_path / "one.txt"),))], out=tmp_path / "out", tokenizer="bytes")
    held = open_loader(tmp_path / "out").heldout_batches()
    assert (held.micro_batches, held.num_live_tokens, held.num_bytes) == ((), 0, 0)
