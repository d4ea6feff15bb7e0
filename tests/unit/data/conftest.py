"""A small prepared corpus that the tests of this room share. Real files, real shards."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.sections import DataSection, SourceSection, TrainSection
from surefoot.data.loader import ShardedLoader
from surefoot.data.prepare import prepare

SEQ_LEN = 16
WORDS = ("step", "rank", "shard", "token", "loss", "batch", "node", "seed", "größe", "naïve")


def make_text(seed: int, *, num_words: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def write_corpus(folder: Path, *, num_documents: int = 12, first_seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    for number in range(num_documents):
        (folder / f"{number:03d}.txt").write_text(make_text(first_seed + number, num_words=5 + 7 * number % 40), encoding="utf-8")
    return folder


def prepare_folder(corpus: Path, out: Path, **changes: Any) -> Path:
    settings: dict[str, Any] = {"tokenizer": "bytes", "heldout_fraction": 0.3, **changes}
    prepare([SourceSection(name="text", files=(str(corpus),))], out=out, **settings)
    return out


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data to read only."""
    root = tmp_path_factory.mktemp("prepared")
    return prepare_folder(write_corpus(root / "corpus"), root / "out")


@pytest.fixture(scope="session")
def other_prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other text in the same tokenizer, to read only."""
    root = tmp_path_factory.mktemp("other")
    return prepare_folder(write_corpus(root / "corpus", num_documents=20, first_seed=100), root / "out")


@pytest.fixture
def open_loader(request: pytest.FixtureRequest) -> Callable[..., ShardedLoader]:
    """Opens a loader and closes it after the test. Settings of the sections and of the loader by name."""

    def open_one(path: Path, **settings: Any) -> ShardedLoader:
        train = {
            name: settings.pop(name)
            for name in ("global_batch_size", "micro_batch_size", "batch_ramp", "eval_num_samples")
            if name in settings
        }
        data = DataSection(seq_len=settings.pop("seq_len", SEQ_LEN), sources=settings.pop("sources", ()))
        merged = {"seed": 7, "rank": 0, "num_ranks": 1, **settings}
        loader = ShardedLoader(path, data=data, train=TrainSection(**{"global_batch_size": 6, "micro_batch_size": 2, **train}), **merged)
        request.addfinalizer(loader.close)
        return loader

    return open_one
