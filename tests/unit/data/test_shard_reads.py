"""What a store does when bytes are wrong, once or for good; many spans at once; several threads; bounded descriptors."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from surefoot.core.errors import DataError, lost_shard
from surefoot.data.manifest import Split, load_manifest
from surefoot.data.shards import BLOCK_BYTES, HEADER_BYTES, TokenStore
from surefoot.data.storage import ByteRange, LocalStorage, Storage
from tests.stores import open_store, write_store

TOK = Path("text") / "train" / "00000.tok"


def flip(path: Path, offset: int, mask: int = 4) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@dataclass
class CorruptsOnce:
    """A folder whose first answer to a read of `suffix` files is wrong, as after a flip in memory or on the wire."""

    inner: LocalStorage
    suffix: str
    damage: Callable[[bytearray], bytearray]
    num_left: int = 1

    @property
    def place(self) -> str:
        return self.inner.place

    def read(self, name: str) -> bytes:
        return self.inner.read(name)

    def num_bytes(self, names: Sequence[str]) -> list[int]:
        return self.inner.num_bytes(names)

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        for one, data in zip(wanted, self.inner.ranges(wanted), strict=True):
            if one.offset and one.name.endswith(self.suffix) and self.num_left:
                self.num_left -= 1
                yield memoryview(self.damage(bytearray(data)))
            else:
                yield data

    def joined(self, wanted: Sequence[ByteRange]) -> bytes:
        return b"".join(map(bytes, self.ranges(wanted)))

    def again(self, wanted: ByteRange) -> bytes:
        return self.inner.again(wanted)

    def close(self) -> None:
        self.inner.close()


def flipped(data: bytearray) -> bytearray:
    data[5] ^= 1
    return data


def cut(data: bytearray) -> bytearray:
    return data[:-3]


def store_over(path: Path, storage: Storage) -> TokenStore:
    return TokenStore(path, source="text", split="train", manifest=load_manifest(path), storage=storage)


@pytest.mark.parametrize("suffix", ["tok", "sum"])
@pytest.mark.parametrize("damage", [flipped, cut, lambda data: bytearray()])
def test_what_was_wrong_once_is_fetched_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, damage: Callable[[bytearray], bytearray]
) -> None:
    stream = write_store(tmp_path)
    storage = CorruptsOnce(LocalStorage(tmp_path), suffix, damage)
    store = store_over(tmp_path, storage)
    assert np.array_equal(store.read(BLOCK_BYTES, 3 * BLOCK_BYTES), stream[BLOCK_BYTES : 4 * BLOCK_BYTES])
    assert storage.num_left == 0
    if (suffix, damage) in {("sum", flipped), ("tok", flipped), ("tok", cut)}:
        assert store.num_refetched == 1
        assert "were right when fetched again" in caplog.text
    assert np.array_equal(store.read(BLOCK_BYTES, 10), stream[BLOCK_BYTES : BLOCK_BYTES + 10])
    storage.close()


def test_a_whole_store_fetches_nothing_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = write_store(tmp_path, shard_bytes=30_000)
    store = open_store(tmp_path)
    store.read(0, len(stream))
    assert (store.num_refetched, caplog.text) == (0, "")
    store.close()


def test_a_bit_that_flips_after_a_first_read_is_seen_at_the_next(tmp_path: Path) -> None:
    stream = write_store(tmp_path)
    store = open_store(tmp_path)
    assert np.array_equal(store.read(0, 100), stream[:100])
    flip(tmp_path / TOK, HEADER_BYTES + 40)
    with pytest.raises(DataError, match="block 0 at byte 4096") as caught:
        store.read(60, 100, sample=12)
    flip(tmp_path / TOK, HEADER_BYTES + 40)
    assert np.array_equal(store.read(60, 100), stream[60:160])
    store.close()
    assert (lost_shard(caught.value), caught.value.where) == ("text/00000", str(tmp_path / TOK))
    assert caught.value.values == {
        "kind": "damaged-block",
        "source": "text",
        "split": "train",
        "shard": "text/00000",
        "block": 0,
        "offset": HEADER_BYTES,
        "got": caught.value.values["got"],
        "wanted": caught.value.values["wanted"],
        "sample": 12,
    }


class FailingDisk(LocalStorage):
    """A folder whose disk gives an error for whatever stands behind a header, each time."""

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        for one, data in zip(wanted, super().ranges(wanted), strict=True):
            yield data[:-1] if one.offset else data

    def _read_direct(self, wanted: ByteRange) -> bytes | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def lose(tok: Path, kind: str) -> None:
    if kind == "missing":
        tok.unlink()
    elif kind == "cut-short":
        os.truncate(tok, tok.stat().st_size - 2)
    elif kind == "damaged-header":
        flip(tok, 3)


@pytest.mark.parametrize("kind", ["missing", "cut-short", "damaged-header", "unreadable"])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_shard_that_is_lost_in_any_way_is_named_with_the_way_on(tmp_path: Path, kind: str, split: Split) -> None:
    """Only of what is trained on a run can do without some."""
    stream = write_store(tmp_path)
    (tmp_path / "text" / "heldout").mkdir(exist_ok=True)
    for path in (tmp_path / "text" / "train").iterdir():
        shutil.copy(path, tmp_path / "text" / "heldout")
    lose(tmp_path / "text" / split / "00000.tok", kind)
    manifest = load_manifest(tmp_path)
    source = manifest.sources["text"]
    both = replace(source, splits={**source.splits, "heldout": source.splits["train"]})
    manifest = replace(manifest, sources={"text": both})
    storage = FailingDisk(tmp_path) if kind == "unreadable" else LocalStorage(tmp_path)
    store = TokenStore(tmp_path, source="text", split=split, manifest=manifest, storage=storage)
    with pytest.raises(DataError) as caught:
        store.read(0, len(stream))
    storage.close()
    error = caught.value
    assert (lost_shard(error), error.values["kind"], error.values["split"]) == ("text/00000", kind, split)
    assert error.where.startswith(str(tmp_path / "text" / split / "00000."))
    assert ("surefoot data block RUN --shard text/00000" in error.hint) == (split == "train")


@pytest.mark.parametrize("kind", ["missing", "cut-short"])
def test_so_is_one_that_is_met_before_the_first_read(tmp_path: Path, kind: str) -> None:
    write_store(tmp_path)
    lose(tmp_path / TOK, kind)
    store = open_store(tmp_path)
    with pytest.raises(DataError, match="data block RUN --shard text/00000") as caught:
        store.check_files()
    store.close()
    assert (lost_shard(caught.value), caught.value.values["kind"]) == ("text/00000", kind)


def test_a_header_that_is_wrong_once_is_fetched_again(tmp_path: Path) -> None:
    class WrongOnce(LocalStorage):
        def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
            for one, data in zip(wanted, super().ranges(wanted), strict=True):
                yield data[:0] if one.num_bytes == HEADER_BYTES else data

    stream = write_store(tmp_path)
    storage = WrongOnce(tmp_path)
    assert np.array_equal(store_over(tmp_path, storage).read(0, 10), stream[:10])
    storage.close()


def test_another_error_of_the_data_is_of_no_shard() -> None:
    assert lost_shard(DataError("nothing there", kind="missing")) == ""
    assert lost_shard(DataError("no answer", kind="unreachable", shard="text/00000")) == ""
    assert lost_shard(OSError("no answer")) == ""
    assert lost_shard(None) == ""


@pytest.mark.parametrize("shard_bytes", [1, 30_000, 1 << 30])
def test_many_spans_come_behind_each_other_in_the_order_asked_for(tmp_path: Path, shard_bytes: int) -> None:
    stream = write_store(tmp_path, shard_bytes=shard_bytes)
    store = open_store(tmp_path)
    rng = np.random.default_rng(3)
    starts = rng.integers(0, len(stream) - 20_000, size=50)
    counts = rng.integers(0, 20_000, size=50)
    wanted = [stream[start : start + count] for start, count in zip(starts, counts, strict=True)]
    assert np.array_equal(store.read_spans(starts, counts), np.concatenate(wanted))
    rows = store.read_rows(starts, 129)
    assert np.array_equal(rows, np.stack([stream[start : start + 129] for start in starts]))
    assert store.read_rows(np.empty(0, dtype=np.int64), 129).shape == (0, 129)
    store.close()


def test_the_sample_that_needed_a_damaged_block_is_the_one_that_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    flip(tmp_path / TOK, HEADER_BYTES + 2 * BLOCK_BYTES)
    store = open_store(tmp_path)
    tokens_per_block = BLOCK_BYTES // 2
    starts = np.array([3, 2, 1, 0]) * tokens_per_block
    with pytest.raises(DataError, match="needed for sample 901") as caught:
        store.read_rows(starts, 100, samples=np.array([900, 901, 902, 903]))
    assert caught.value.values["sample"] == 901
    store.close()


def test_a_read_that_is_long_is_made_of_short_ones(tmp_path: Path) -> None:
    class Counts(LocalStorage):
        longest = 0

        def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
            self.longest = max(self.longest, *(one.num_bytes for one in wanted))
            return super().ranges(wanted)

    lengths = 700_000
    stream = write_store(tmp_path, lengths=(lengths, lengths))
    storage = Counts(tmp_path)
    assert np.array_equal(store_over(tmp_path, storage).read(5, len(stream) - 9), stream[5:-4])
    assert storage.longest == 64 * BLOCK_BYTES
    storage.close()


def test_descriptors_are_bounded_and_all_given_back(tmp_path: Path) -> None:
    stream = write_store(tmp_path, shard_bytes=1)
    before = len(os.listdir("/proc/self/fd"))
    storage = LocalStorage(tmp_path, max_open_files=5)
    store = store_over(tmp_path, storage)
    for start in range(0, len(stream) - 2000, 1999):
        assert np.array_equal(store.read(start, 2000), stream[start : start + 2000])
        assert len(os.listdir("/proc/self/fd")) <= before + 6
    assert len(os.listdir("/proc/self/fd")) > before + 1
    store.close()
    assert len(os.listdir("/proc/self/fd")) > before + 1, "a storage that was handed in is closed by its owner"
    storage.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_a_store(tmp_path: Path) -> None:
    stream = write_store(tmp_path, shard_bytes=1)
    storage = LocalStorage(tmp_path, max_open_files=2)  # every read evicts what another thread reads from
    store = store_over(tmp_path, storage)
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for start in rng.integers(0, len(stream) - 900, size=150).tolist():
            if not np.array_equal(store.read(start, 900), stream[start : start + 900]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    storage.close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    write_store(tmp_path)
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="was closed"):
        store.read(0, 1)
