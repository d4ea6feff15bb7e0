"""Range reads of the files beside a shard: right at every edge, and few."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.core.errors import DataError
from surefoot.data.shards import LEN_STRIDE
from surefoot.data.side_files import DAMAGED_FILE, Lengths, SideFile, documents_by_hash, runs_of
from surefoot.data.storage import ByteRange, LocalStorage
from surefoot.data.stored_rows import ROW, origins_file

Keys = npt.NDArray[np.uint64]
NUM_DOCS = 200_000
TOP = (1 << 64) - 1


class Counting(LocalStorage):
    """A folder that counts what is read of it."""

    num_reads = 0
    num_bytes_read = 0

    def ranges(self, wanted: Sequence[ByteRange]) -> Iterator[memoryview]:
        self.num_reads += len(wanted)
        self.num_bytes_read += sum(one.num_bytes for one in wanted)
        return super().ranges(wanted)


def index_of(keys: Keys, folder: Path) -> Counting:
    order = np.argsort(keys, kind="stable")
    (folder / "00000.idx").write_bytes(keys[order].astype("<u8").tobytes() + order.astype("<u4").tobytes())
    return Counting(folder)


def found(storage: Counting, num_docs: int, low: int, high: int) -> list[int]:
    (numbers,) = documents_by_hash(storage, [("00000.idx", num_docs)], keys=[(low, high)])
    return numbers


def test_a_hash_is_found_by_about_two_reads(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).integers(0, TOP, NUM_DOCS, dtype=np.uint64)
    storage = index_of(keys, tmp_path)
    chosen = [0, 1, NUM_DOCS - 1, *range(0, NUM_DOCS, 1999)]
    for document in chosen:
        assert found(storage, NUM_DOCS, int(keys[document]), int(keys[document])) == [document]
    assert storage.num_reads / len(chosen) < 2.5
    assert storage.num_bytes_read / len(chosen) < 20_000


@pytest.mark.parametrize("shape", ["uniform", "low", "high", "equal", "two heaps", "none"])
def test_a_range_of_hashes_is_found_whatever_they_are(shape: str, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    keys = {
        "uniform": random.integers(0, TOP, 5000, dtype=np.uint64),
        "low": random.integers(0, 9000, 5000, dtype=np.uint64),
        "high": TOP - random.integers(0, 9000, 5000, dtype=np.uint64),
        "equal": np.full(5000, 77, dtype=np.uint64),
        "two heaps": np.concatenate([random.integers(0, 50, 2500, dtype=np.uint64), TOP - random.integers(0, 50, 2500, dtype=np.uint64)]),
        "none": np.empty(0, dtype=np.uint64),
    }[shape]
    storage = index_of(keys, tmp_path)
    bounds = sorted({0, 1, 49, 50, 77, 78, 4000, TOP // 2, TOP - 4000, TOP, *map(int, keys[:20])})
    for low in bounds:
        for high in (low, low + 1000, TOP):
            wanted = np.flatnonzero((keys >= np.uint64(low)) & (keys <= np.uint64(min(high, TOP)))).tolist()
            assert sorted(found(storage, len(keys), low, min(high, TOP))) == wanted


def lengths_of(counts: npt.NDArray[np.int64], folder: Path) -> Lengths:
    data = counts.astype("<u4").tobytes()
    firsts = np.concatenate([[0], np.cumsum(counts)])[: len(counts) : LEN_STRIDE].astype("<u8")
    (folder / "00000.len").write_bytes(data + bytes(-len(data) % 8) + firsts.tobytes())
    return Lengths(SideFile(Counting(folder), "00000.len"), num_docs=len(counts), num_tokens=int(counts.sum()))


@pytest.mark.parametrize("num_docs", [1, 2, LEN_STRIDE - 1, LEN_STRIDE, LEN_STRIDE + 1, 5 * LEN_STRIDE + 7])
def test_a_token_is_in_the_document_that_the_lengths_say(num_docs: int, tmp_path: Path) -> None:
    counts = np.random.default_rng(num_docs).integers(1, 9, num_docs)
    lengths = lengths_of(counts, tmp_path)
    owner = np.repeat(np.arange(num_docs), counts)
    ends = np.cumsum(counts)
    edges = {0, 1, len(owner) - 1, *(int(ends[place]) for place in (LEN_STRIDE - 1, 2 * LEN_STRIDE - 1) if place < num_docs - 1)}
    for token in edges | set(range(0, len(owner), 97)):
        assert lengths.documents_in(token, token + 1) == (owner[token], owner[token] + 1)
        assert lengths.documents_in(token, len(owner)) == (owner[token], num_docs)
    assert lengths.bounds(0, num_docs).tolist() == [0, *ends.tolist()]
    middle = num_docs // 2
    assert lengths.bounds(middle, middle + 1).tolist() == [int(ends[middle] - counts[middle]), int(ends[middle])]


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    lengths_of(np.full(3000, 5), tmp_path)
    file = tmp_path / "00000.len"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match="cut short") as refused:
        Lengths(SideFile(LocalStorage(tmp_path), "00000.len"), num_docs=3000, num_tokens=15_000)
    assert refused.value.where.endswith("00000.len")
    with pytest.raises(DataError, match=r"cannot open 00001\.len"):
        Lengths(SideFile(LocalStorage(tmp_path), "00001.len"), num_docs=3000, num_tokens=15_000)


def test_lengths_of_other_data_are_refused(tmp_path: Path) -> None:
    lengths_of(np.full(3000, 5), tmp_path)
    lengths = Lengths(SideFile(LocalStorage(tmp_path), "00000.len"), num_docs=3000, num_tokens=14_000)
    with pytest.raises(DataError, match="have 15000 tokens by their lengths, 14000 by the sums"):
        lengths.documents_in(13_999, 14_000)


@pytest.mark.parametrize("number", [0, 1, LEN_STRIDE, 2500, 2999, 3000, 3001, 3002])
def test_one_length_or_sum_that_changed_is_seen(number: int, tmp_path: Path) -> None:
    """All documents are as long as a bit is worth, so that none ends where the tokens would contradict it."""
    lengths_of(np.full(3000, 8), tmp_path)
    file = tmp_path / "00000.len"
    data = bytearray(file.read_bytes())
    data[4 * number if number < 3000 else 12_000 + 8 * (number - 3000)] ^= 16
    file.write_bytes(data)
    document = min(number, 2999) if number < 3000 else (number - 3000) * LEN_STRIDE
    with pytest.raises(DataError, match="sums") as refused:
        Lengths(SideFile(LocalStorage(tmp_path), "00000.len"), num_docs=3000, num_tokens=24_000).bounds(document, document + 1)
    assert refused.value.values["kind"] == DAMAGED_FILE


def test_an_index_out_of_order_is_seen(tmp_path: Path) -> None:
    keys = np.arange(0, 1 << 60, 1 << 50, dtype=np.uint64)
    index_of(keys, tmp_path)
    file = tmp_path / "00000.idx"
    data = bytearray(file.read_bytes())
    data[8 * 700 + 6] ^= 128
    file.write_bytes(data)
    with pytest.raises(DataError, match="not in order"):
        found(Counting(tmp_path), len(keys), int(keys[800]), int(keys[800]))


READ_ORIGINS = """
import os, sys
from pathlib import Path
from surefoot.data.side_files import Origins, SideFile, read_footer
from surefoot.data.storage import LocalStorage
import pyarrow.parquet
file = SideFile(LocalStorage(Path(sys.argv[1])), "00000.src.parquet")
before = len(os.listdir("/proc/self/task"))
rows = Origins(file, footer=read_footer(file), num_docs=3).rows(0, 3)
print(len(rows), len(os.listdir("/proc/self/task")) - before)
"""


def test_where_documents_came_from_is_read_in_no_other_thread(tmp_path: Path) -> None:
    """One that Arrow starts may still run at the end of the process, and aborts it."""
    (tmp_path / "00000.src.parquet").write_bytes(origins_file(np.zeros(3, dtype=ROW), files=["a"]))
    done = subprocess.run([sys.executable, "-c", READ_ORIGINS, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0"]


def test_numbers_become_runs() -> None:
    assert runs_of([]) == []
    assert runs_of([1, 2, 3, 7, 9, 10]) == [(1, 4), (7, 8), (9, 11)]
