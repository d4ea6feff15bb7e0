"""What a store does when bytes are wrong, once or for good; many spans at once; several threads; bounded descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.data.manifest import load_manifest
from surefoot.data.quarantine import is_damaged_block, quarantine_record
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
    record = quarantine_record(caught.value, time_utc="2026-01-01T00:00:00.000Z", rank=1, step=7)
    assert record == {
        "time_utc": "2026-01-01T00:00:00.000Z",
        "rank": 1,
        "step": 7,
        "path": str(tmp_path / TOK),
        "source": "text",
        "split": "train",
        "shard": "text/00000",
        "block": 0,
        "offset": HEADER_BYTES,
        "got": caught.value.values["got"],
        "wanted": caught.value.values["wanted"],
        "sample": 12,
    }


def test_other_errors_are_no_damaged_block(tmp_path: Path) -> None:
    write_store(tmp_path)
    (tmp_path / TOK).unlink()
    store = open_store(tmp_path)
    with pytest.raises(DataError, match=r"cannot open 00000\.tok") as caught:
        store.read(0, 1)
    store.close()
    assert not is_damaged_block(caught.value)
    with pytest.raises(ValueError, match="no damaged block"):
        quarantine_record(caught.value, time_utc="", rank=0)


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
