"""A folder of many shards, most of them names of one file: what opening, seeking and locating touch (larger: benchmarks/data_scale.py)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from benchmarks.data_folders import EOS, SOURCE, Marked, sparse_folder

from surefoot.core.blocking import TokenSpan
from surefoot.core.sections import DataSection, SourceSection, TrainSection
from surefoot.data.loader import ShardedLoader
from surefoot.data.provenance import Provenance
from surefoot.data.shards import TokenStore
from surefoot.data.storage import LocalStorage

NUM_SHARDS = 400
SHARD_TOKENS = 1 << 20
SEQ_LEN = 500


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Marked]:
    folder = tmp_path_factory.mktemp("many")
    marked = sparse_folder(folder, num_shards=NUM_SHARDS, shard_tokens=SHARD_TOKENS, marked_shard=250)
    assert marked is not None
    return folder, marked


def num_read_calls() -> int:
    return int(Path("/proc/self/io").read_text().split("syscr: ")[1].split()[0])


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_opening_reads_the_manifest_and_reading_no_more_than_is_touched(many: tuple[Path, Marked]) -> None:
    folder, _ = many
    calls, files = num_read_calls(), num_open_files()
    storage = LocalStorage(folder, max_open_files=16)
    store = TokenStore(folder, source=SOURCE, split="train", storage=storage)
    assert store.check_files() == NUM_SHARDS
    assert num_read_calls() - calls < 20
    assert num_open_files() - files == 1
    starts = np.random.default_rng(0).integers(0, store.num_tokens - SEQ_LEN, size=300)
    calls = num_read_calls()
    tokens = store.read_rows(starts, SEQ_LEN)
    touched = np.unique(starts // SHARD_TOKENS).size  # each has a header, and its checksums are kept
    assert 300 + 2 * touched <= num_read_calls() - calls <= 300 + 2 * touched + 40
    calls = num_read_calls()
    assert np.array_equal(store.read_rows(starts, SEQ_LEN), tokens)
    assert num_read_calls() - calls < 300 + 20
    assert num_open_files() - files == 1 + 16
    assert set(np.unique(tokens).tolist()) == {0, EOS}
    storage.close()


def test_a_run_over_it_seeks_and_locates(many: tuple[Path, Marked]) -> None:
    folder, marked = many
    data = DataSection(seq_len=SEQ_LEN, sources=(SourceSection(name=SOURCE),))
    train = TrainSection(num_steps=50_000, global_batch_size=16, micro_batch_size=4)
    loader = ShardedLoader(folder, data=data, train=train, seed=3, rank=1, num_ranks=2)
    middle = loader.cursor_after(loader.num_samples // 32)
    calls = num_read_calls()
    loader.seek(middle)
    assert num_read_calls() - calls < 20
    step = next(loader)
    assert (step.first_sample, step.num_samples) == (middle["next_sample"], 16)
    with Provenance(folder, manifest=loader.manifest) as provenance:
        (place,) = provenance.find(marked.hash)
        assert place.span.start == marked.shard * SHARD_TOKENS + marked.document * 1000
        order = loader.course.order
        (sample,) = order.holding(SOURCE, place.span.start + 1, place.span.start + 2, first=0, until=loader.num_samples).tolist()
        (held,) = order.at(np.array([sample]))
        found = provenance.documents(TokenSpan(SOURCE, held.spans[0][0], sum(held.spans[0])))
        assert place in found
    loader.close()
