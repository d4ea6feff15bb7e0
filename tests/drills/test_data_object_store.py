"""Prepared data in a real S3 server: the same tokens as from the folder, with faults on the way, a flip on the wire, and real damage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import S3Store

from surefoot.core.clock import SystemClock
from surefoot.core.errors import DataError
from surefoot.core.stores import Patience
from surefoot.data.manifest import MANIFEST_NAME, Manifest, load_manifest
from surefoot.data.object_storage import ObjectStorage
from surefoot.data.shards import BLOCK_BYTES, HEADER_BYTES, TokenStore
from surefoot.data.storage import read_file
from tests.drills.s3_server import BUCKET, Faults, reach
from tests.stores import write_store

QUICK = Patience(num_requests=3, request_limit_s=5.0, num_tries=4, wait_s=0.02, max_wait_s=0.1)
TOK = "text/train/00000.tok"
ROW = 1025


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 KB of tokens."""
    root = tmp_path_factory.mktemp("data")
    write_store(root)
    return root


@pytest.fixture
def bucket(s3: str, folder: Path) -> S3Store:
    """The prepared folder, copied to the URL `s3`."""
    backend = S3Store(BUCKET, prefix=s3.removeprefix(f"s3://{BUCKET}/"), client_options={"allow_http": True})
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(backend, str(path.relative_to(folder)), path)
    return backend


@pytest.fixture
def storage(s3: str, bucket: S3Store) -> Iterator[ObjectStorage]:
    opened = ObjectStorage.open(s3, patience=QUICK, clock=SystemClock())
    yield opened
    opened.close()


def store_over(storage: ObjectStorage, manifest: Manifest) -> TokenStore:
    return TokenStore(storage.place, source="text", split="train", manifest=manifest, storage=storage)


def some_rows(manifest: Manifest) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(1).integers(0, manifest.split("text", "train").tokens - ROW, size=40)


def local_rows(folder: Path, starts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray[tuple[int, int], np.dtype[np.uint16]]:
    store = TokenStore(folder, source="text", split="train")
    rows = store.read_rows(starts, ROW)
    store.close()
    return rows


def test_tokens_are_those_of_the_folder(s3: str, folder: Path, storage: ObjectStorage) -> None:
    manifest = load_manifest(s3)
    assert manifest == load_manifest(folder)
    assert read_file(s3, MANIFEST_NAME) == (folder / MANIFEST_NAME).read_bytes()
    store = TokenStore(s3, source="text", split="train")
    assert store.check_files() == 1
    starts = some_rows(manifest)
    assert np.array_equal(store.read_rows(starts, ROW), local_rows(folder, starts))
    whole = TokenStore(folder, source="text", split="train")
    assert np.array_equal(store.read(0, store.num_tokens), whole.read(0, whole.num_tokens))
    store.close()
    whole.close()


def test_requests_that_fail_are_asked_again_and_flips_on_the_wire_fetched_again(
    folder: Path, storage: ObjectStorage, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    told = faults(slow_down=0.1, reset=0.05, lost=0.05, flip=0.1, seed=2)
    manifest = load_manifest(folder)
    store = store_over(storage, manifest)
    starts = some_rows(manifest)
    wanted = local_rows(folder, starts)
    for first in range(0, 40, 4):
        rows = store.read_rows(starts[first : first + 4], ROW)
        assert np.array_equal(rows, wanted[first : first + 4])
    assert {"slow_down GET", "flip GET"} <= set(told())
    assert store.num_refetched > 0
    assert "were right when fetched again" in caplog.text


def test_a_damaged_object_is_named_and_the_rest_is_read(s3: str, folder: Path, bucket: S3Store, storage: ObjectStorage) -> None:
    manifest = load_manifest(folder)
    store = store_over(storage, manifest)
    whole = (folder / TOK).read_bytes()
    place = HEADER_BYTES + 2 * BLOCK_BYTES + 77
    first = store.read(2 * BLOCK_BYTES // 2, 50)
    obstore.put(bucket, TOK, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(DataError, match=r"block 2 at byte 36864 .* needed for sample 5; fetching it again did not help") as caught:
        store.read(2 * BLOCK_BYTES // 2, 50, sample=5)
    assert caught.value.where == f"{s3}/{TOK}"
    assert store.read(0, 50).size == 50
    obstore.put(bucket, TOK, whole)
    assert np.array_equal(store.read(2 * BLOCK_BYTES // 2, 50), first)
    obstore.put(bucket, TOK, whole[:20_000])
    with pytest.raises(DataError, match="block 2 at byte"):
        store.read(2 * BLOCK_BYTES // 2, 50)
    fresh = store_over(storage, manifest)
    with pytest.raises(DataError, match="file size is 20000"):
        fresh.read(0, 1)
    bucket.delete(TOK)
    with pytest.raises(DataError, match=f"nothing there: looking at {TOK}"):
        fresh.check_files()


def test_a_store_that_cannot_be_reached_is_an_error_after_bounded_tries(
    folder: Path, storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(monkeypatch, port=9)  # nothing listens there
    store = store_over(storage, load_manifest(folder))
    began_s = time.monotonic()
    with pytest.raises(DataError, match="no answer that helps") as caught:
        store.read(0, 10)
    assert time.monotonic() - began_s < 60.0, "it hangs"
    assert caught.value.values["kind"] == "unreachable"


def test_a_prefix_without_data_says_so(s3: str) -> None:
    with pytest.raises(DataError, match="no prepared data here"):
        load_manifest(f"{s3}/elsewhere")
