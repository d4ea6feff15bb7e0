from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from surefoot.core.errors import DataError
from surefoot.data.block_sums import LONGEST_RUN, BlockSums
from surefoot.data.manifest import load_manifest
from surefoot.data.shards import TokenStore
from surefoot.data.storage import ByteRange, LocalStorage
from tests.stores import write_store

NAMES = ["0.sum", "1.sum", "2.sum"]
NUM_BLOCKS = np.array([20_000, 1, 9_000])


class Noted(LocalStorage):
    """Notes what was read of checksum files, and gives the first `num_wrong` of them wrong."""

    def __init__(self, folder: Path, *, num_wrong: int = 0) -> None:
        super().__init__(folder)
        self.num_wrong = num_wrong
        self.read_bytes: list[int] = []

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        for one, data in zip(wanted, super().ranges(wanted), strict=True):
            if one.name.endswith(".sum"):
                self.read_bytes.append(len(data))
                if self.num_wrong:
                    self.num_wrong -= 1
                    data[0] ^= 1
            yield data

    def joined(self, wanted: Sequence[ByteRange]) -> bytes:
        return b"".join(map(bytes, self.ranges(wanted)))


@pytest.fixture
def words(tmp_path: Path) -> list[list[int]]:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1 << 63, size=count).astype("<u8") for count in NUM_BLOCKS]
    for name, array in zip(NAMES, arrays, strict=True):
        (tmp_path / name).write_bytes(array.tobytes())
    return [array.tolist() for array in arrays]


def ask(sums: BlockSums, *runs: tuple[int, int, int]) -> list[list[int]]:
    found, firsts = sums.of(*np.array(runs).T)
    return [list(found[first : first + count]) for first, (_, _, count) in zip(firsts, runs, strict=True)]


@pytest.mark.parametrize("keep", [False, True])
def test_runs_are_what_the_files_say(tmp_path: Path, words: list[list[int]], keep: bool) -> None:
    storage = LocalStorage(tmp_path)
    sums = BlockSums(storage, NAMES, NUM_BLOCKS, keep=keep)
    rng = np.random.default_rng(1)
    for _ in range(30):
        shards = rng.choice([0, 1, 2], size=20)
        counts = np.minimum(rng.integers(1, LONGEST_RUN + 1, size=20), NUM_BLOCKS[shards])
        runs = [(s, int(rng.integers(0, NUM_BLOCKS[s] - c + 1)), c) for s, c in zip(shards.tolist(), counts.tolist(), strict=True)]
        assert ask(sums, *runs) == [words[shard][first : first + count] for shard, first, count in runs]
    assert ask(sums, (0, 8192 - 1, LONGEST_RUN)) == [words[0][8192 - 1 : 8192 - 1 + LONGEST_RUN]]
    assert sums.again(2, 7, 3) == words[2][7:10]
    storage.close()


def test_what_is_kept_is_read_once_and_in_pieces(tmp_path: Path, words: list[list[int]]) -> None:
    storage = Noted(tmp_path)
    sums = BlockSums(storage, NAMES, NUM_BLOCKS, keep=True)
    for _ in range(3):
        assert ask(sums, (0, 9000, 2), (0, 9001, 1), (1, 0, 1)) == [words[0][9000:9002], words[0][9001:9002], words[1]]
    assert sorted(storage.read_bytes) == [8, 8 * (8192 + LONGEST_RUN)]
    storage.close()


def test_what_is_not_kept_is_read_as_it_is_asked_for(tmp_path: Path, words: list[list[int]]) -> None:
    storage = Noted(tmp_path)
    sums = BlockSums(storage, NAMES, NUM_BLOCKS, keep=False)
    for _ in range(2):
        assert ask(sums, (0, 9000, 2), (1, 0, 1)) == [words[0][9000:9002], words[1]]
    assert storage.read_bytes == [16, 8, 16, 8]
    storage.close()


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_cut_short_is_an_error_where_it_is_missing_and_only_there(tmp_path: Path, words: list[list[int]], keep: bool) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "0.sum").write_bytes((tmp_path / "0.sum").read_bytes()[: 8 * 9000])
    sums = BlockSums(storage, NAMES, NUM_BLOCKS, keep=keep)
    assert ask(sums, (0, 8999, 1), (2, 0, 2)) == [words[0][8999:9000], words[2][:2]]
    with pytest.raises(DataError, match=r"0\.sum: the checksum file is cut short"):
        ask(sums, (0, 8999, 2))
    storage.close()


@pytest.mark.parametrize("max_kept_bytes", [0, 1 << 20])
def test_a_checksum_that_was_wrong_once_is_not_kept_wrong(tmp_path: Path, max_kept_bytes: int) -> None:
    stream = write_store(tmp_path)
    storage = Noted(tmp_path, num_wrong=1)
    manifest = load_manifest(tmp_path)
    store = TokenStore(tmp_path, source="text", split="train", manifest=manifest, storage=storage, max_kept_bytes=max_kept_bytes)
    for _ in range(3):
        assert np.array_equal(store.read(0, 10), stream[:10])
    assert store.num_refetched == 1
    assert len(storage.read_bytes) == (1 if max_kept_bytes else 3)
    storage.close()
