"""Copies in a folder that stands for an object store, and fetches from it; the same against a real S3 server is in tests/drills."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.checkpoint.fetch import assemble, fetch, fetch_for_resume, is_whole, split_resume_url
from surefoot.checkpoint.manifest import MANIFEST_NAME, checksum_bytes, manifest_bytes, read_manifest, sealed
from surefoot.checkpoint.object_store import ObjectStore, Patience, kind_of
from surefoot.checkpoint.remote import (
    RemoteSource,
    Throttle,
    copy_checkpoint,
    read_marker,
    remote_ids,
    remote_newest,
    retire_remote,
    unpublished,
)
from surefoot.checkpoint.sources import FolderSource, check_bytes
from surefoot.core.clock import ManualClock
from surefoot.core.errors import CheckpointError, ConfigError, Corrupt, Incomplete
from surefoot.core.records import Manifest, ManifestFile

MB = 1 << 20
CONTENT = {".metadata": b"where it lies", "__0_0.distcp": bytes(range(256)) * 40_000, "extras.json": b"{}"}

Put = Callable[..., Path]


def put_folder(root: Path, name: str = "s10-a1", *, content: dict[str, bytes] | None = None, ledger_seq: int = 1) -> Path:
    """A published folder with a right manifest; its files are anything."""
    files = content or CONTENT
    folder = root / name
    folder.mkdir(parents=True)
    for file_name, data in files.items():
        (folder / file_name).write_bytes(data)
    manifest = Manifest(
        format_version=1,
        id=name,
        run="test",
        step=10,
        attempt=1,
        generation=1,
        parent=None,
        time_utc="2026-01-01T00:00:00.000Z",
        loss=None,
        tokens=0,
        state_digest="",
        config_hashes={},
        data_hash="",
        code_version="0",
        topology={},
        environment={},
        ledger_seq=ledger_seq,
        ledger_hash="",
        cursor={},
        files=tuple(ManifestFile(name=key, num_bytes=len(data), xxh3_128=checksum_bytes(data)) for key, data in files.items()),
        tensors=(),
    )
    (folder / MANIFEST_NAME).write_bytes(manifest_bytes(sealed(manifest)))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


@pytest.fixture
def store(there: Path) -> ObjectStore:
    return ObjectStore.open(f"file://{there}")


def copied_folder(there: Path, name: str = "s10-a1") -> Path:
    (folder,) = there.glob(f"{name}.*/")
    return folder


def test_a_copy_holds_the_very_files_and_is_published_by_its_marker(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    folder = put_folder(tmp_path / "run")
    store.check()
    assert remote_ids(store) == []
    copied = copy_checkpoint(folder, store, writer="me")
    assert (copied.id, copied.ours, copied.num_files, copied.num_sent) == ("s10-a1", True, 4, 4)
    assert remote_ids(store) == ["s10-a1"]
    assert contents(copied_folder(there)) == contents(folder)
    assert json.loads((there / "s10-a1.json").read_bytes())["writer"] == "me"
    assert sorted(path.name for path in there.iterdir()) == sorted([copied_folder(there).name, "s10-a1.json"])


def test_a_second_copy_sends_nothing_and_knows_whose_the_first_was(tmp_path: Path, store: ObjectStore) -> None:
    folder = put_folder(tmp_path / "run")
    copy_checkpoint(folder, store, writer="me")
    again = copy_checkpoint(folder, store, writer="me")
    other = copy_checkpoint(folder, store, writer="other")
    assert (again.ours, again.num_sent, other.ours, other.num_sent) == (True, 0, False, 0)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", range(1, 13, 3))
def test_a_copy_that_ends_anywhere_is_not_published_and_goes_on_with_what_is_missing(
    tmp_path: Path, there: Path, store: ObjectStore, after: int
) -> None:
    folder = put_folder(tmp_path / "run")
    left = iter(range(after))

    def stop() -> None:
        if next(left, None) is None:
            raise Stopped

    with pytest.raises(Stopped):
        copy_checkpoint(folder, store, on_progress=stop)
    assert remote_ids(store) == []
    assert not (there / MANIFEST_NAME).exists()
    num_there = len([key for key in store.keys(under="") if not key.endswith("#1")])
    copied = copy_checkpoint(folder, store)
    assert copied.num_sent == copied.num_files - num_there
    assert contents(fetch(store, "s10-a1", into=tmp_path / "back")) == contents(folder)


def test_a_changed_object_is_found_and_sent_again(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    folder = put_folder(tmp_path / "run")
    copy_checkpoint(folder, store)
    for name, damage in (("__0_0.distcp", b"x" + CONTENT["__0_0.distcp"][1:]), ("extras.json", b"")):
        (copied_folder(there) / name).write_bytes(damage)
        file = next(file for file in read_manifest(folder).files if file.name == name)
        problem = check_bytes(file, RemoteSource(store, "s10-a1"))
        assert problem is not None
        with pytest.raises(Corrupt, match=f"{name} is whole nowhere"):
            fetch(store, "s10-a1", into=tmp_path / "back")
        assert copy_checkpoint(folder, store).num_sent == 1
    assert contents(fetch(store, "s10-a1", into=tmp_path / "back")) == contents(folder)


@pytest.mark.parametrize("damage", ["flipped", "gone", "longer"])
def test_a_source_that_is_not_its_manifest_is_not_published(tmp_path: Path, store: ObjectStore, damage: str) -> None:
    folder = put_folder(tmp_path / "run")
    file = folder / "__0_0.distcp"
    if damage == "gone":
        file.unlink()
    else:
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + b"\0" if damage == "flipped" else raw + b"\0")
    with pytest.raises(CheckpointError, match="cannot be copied") as caught:
        copy_checkpoint(folder, store)
    assert kind_of(caught.value) == "source"
    assert remote_ids(store) == []


def test_another_checkpoint_under_the_same_id_is_refused_by_name(tmp_path: Path, store: ObjectStore) -> None:
    copy_checkpoint(put_folder(tmp_path / "one"), store)
    with pytest.raises(CheckpointError, match="another checkpoint is published there as s10-a1") as caught:
        copy_checkpoint(put_folder(tmp_path / "two", content={"a": b"other"}), store)
    assert kind_of(caught.value) == "conflict"


def test_a_store_that_ignores_conditions_is_refused(there: Path) -> None:
    class Careless(ObjectStore):
        def create(self, key: str, data: bytes) -> bool:
            self.write(key, lambda: iter([data]), num_bytes=len(data))
            return True

    with pytest.raises(CheckpointError, match="overwrites where it was told to create"):
        Careless.open(f"file://{there}").check()
    assert list(there.iterdir()) == []


def test_a_folder_is_made_by_who_writes_and_only_in_a_place_that_is_there(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/typo", f"file://{tmp_path}/typo/s1-a1"):
        with pytest.raises(CheckpointError, match="there is no such folder") as caught:
            fetch_for_resume(url, tmp_path / "run")
        assert kind_of(caught.value) == "bucket-missing"
    with pytest.raises(CheckpointError, match="there is no such folder"):
        ObjectStore.open(f"file://{tmp_path}/not/mounted").check()
    assert list(tmp_path.iterdir()) == []
    ObjectStore.open(f"file://{tmp_path}/new").check()
    assert (tmp_path / "new").is_dir()


def test_a_retired_copy_is_unpublished_first_and_then_gone(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    copied = copy_checkpoint(put_folder(tmp_path / "run"), store)
    assert retire_remote(store, "s10-a1", manifest_hash="another") == {"s10-a1.json": "it is another checkpoint's by now"}
    assert remote_ids(store) == ["s10-a1"]
    assert retire_remote(store, "s10-a1", manifest_hash=copied.manifest_hash) == {}
    assert list(there.iterdir()) == []
    assert retire_remote(store, "s10-a1") == {}


def test_what_cannot_be_deleted_never_keeps_the_rest(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    copied = copy_checkpoint(put_folder(tmp_path / "run"), store)
    stuck = copied_folder(there) / "__0_0.distcp"
    stuck.unlink()
    stuck.mkdir()
    (stuck / "in the way").touch()
    impatient = ObjectStore.open(f"file://{there}", patience=Patience(num_tries=1))
    assert impatient.delete_all([f"{copied_folder(there).name}/__0_0.distcp", "s10-a1.json"]).keys() == {
        f"{copied_folder(there).name}/__0_0.distcp"
    }
    assert remote_ids(store) == []
    assert unpublished(store) == [("s10-a1", copied.manifest_hash[:16])]


def test_the_newest_was_saved_last_and_a_damaged_one_is_passed_over(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    with pytest.raises(Incomplete, match="no checkpoint is published there"):
        remote_newest(store)
    for name, ledger_seq in (("s30-a1", 3), ("s20-a2", 5), ("s10-a3", 8)):
        copy_checkpoint(put_folder(tmp_path / "run", name, ledger_seq=ledger_seq), store)
    assert remote_ids(store) == ["s10-a3", "s20-a2", "s30-a1"]
    assert remote_newest(store) == "s10-a3"
    (copied_folder(there, "s10-a3") / MANIFEST_NAME).write_bytes(b"{}")
    assert remote_newest(store) == "s20-a2"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version":9}', b'{"format_version":1,"id":"s11-a1"}'])
def test_a_marker_that_cannot_be_read_is_named(there: Path, store: ObjectStore, content: bytes) -> None:
    (there / "s10-a1.json").write_bytes(content)
    with pytest.raises(Corrupt, match="no marker that can be read"):
        read_marker(store, "s10-a1")


def test_a_fetch_that_was_interrupted_goes_on(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    folder = put_folder(tmp_path / "run")
    copy_checkpoint(folder, store)
    hidden = tmp_path / "back" / ".s10-a1.g0.writing"
    hidden.mkdir(parents=True)
    shutil.copy(folder / "__0_0.distcp", hidden)
    (hidden / ".metadata").write_bytes(b"where it")  # cut off
    (hidden / "stray").write_bytes(b"from something else")
    (copied_folder(there) / "__0_0.distcp").unlink()  # so it cannot have been fetched again
    assert contents(fetch(store, "s10-a1", into=tmp_path / "back")) == contents(folder)
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["s10-a1"]


def test_a_whole_local_one_is_left_alone_and_a_damaged_one_mended_file_by_file(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    root = tmp_path / "run"
    folder = put_folder(root)
    as_it_was = contents(folder)
    copy_checkpoint(folder, store)
    untouched = (folder / "__0_0.distcp").stat().st_mtime_ns
    assert fetch_for_resume(f"file://{there}", root) == folder
    assert (folder / "__0_0.distcp").stat().st_mtime_ns == untouched

    (copied_folder(there) / "__0_0.distcp").write_bytes(b"damaged there")
    for name in (".metadata", MANIFEST_NAME):
        (folder / name).write_bytes(b"damaged here")
        assert fetch_for_resume(f"file://{there}/s10-a1", root) == folder  # each file from where it is whole
        assert contents(folder) == as_it_was
    assert [path.name for path in root.iterdir()] == ["s10-a1"]


def test_a_file_is_taken_from_the_first_source_that_has_its_bytes(tmp_path: Path) -> None:
    folder = put_folder(tmp_path / "run")
    half, rest = tmp_path / "half", tmp_path / "rest"
    for copy, damaged in ((half, "extras.json"), (rest, ".metadata")):
        shutil.copytree(folder, copy)
        (copy / damaged).write_bytes(b"?" * len(CONTENT[damaged]))
    with FolderSource(half, name="half") as first, FolderSource(rest, name="rest") as second:
        back = assemble((folder / MANIFEST_NAME).read_bytes(), [first, second], into=tmp_path / "back")
        assert contents(back) == contents(folder)
        (rest / "extras.json").unlink()
        with pytest.raises(Corrupt, match=r"extras.json is whole nowhere: half: xxh3_128 .*; rest: it is not there"):
            assemble((folder / MANIFEST_NAME).read_bytes(), [first, second], into=tmp_path / "again")


def test_another_local_checkpoint_of_the_id_is_not_replaced(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    copy_checkpoint(put_folder(tmp_path / "other", content={"a": b"other"}), store)
    folder = put_folder(tmp_path / "run")
    as_it_was = contents(folder)
    with pytest.raises(CheckpointError, match="another checkpoint stands there under this id") as caught:
        fetch_for_resume(f"file://{there}", tmp_path / "run")
    assert kind_of(caught.value) == "conflict"
    assert contents(folder) == as_it_was


def test_a_copy_of_another_state_is_refused_by_name_before_anything_is_touched(tmp_path: Path, there: Path, store: ObjectStore) -> None:
    folder = put_folder(tmp_path / "run")
    copy_checkpoint(folder, store)
    (folder / MANIFEST_NAME).write_bytes(b"damaged here")
    as_it_was = contents(folder)
    with pytest.raises(Corrupt, match=r"s10-a1 there has state digest .*, the one that is wanted has sf1:other") as caught:
        fetch_for_resume(f"file://{there}/s10-a1", folder.parent, expected_state_digest="sf1:other")
    assert kind_of(caught.value) == "wrong-digest"
    assert contents(folder) == as_it_was
    assert [path.name for path in folder.parent.iterdir()] == ["s10-a1"]


@pytest.mark.parametrize("name", ["../escape", "/etc/escape", "..", "a/b", "manifest.json", ""])
def test_no_name_in_a_manifest_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = put_folder(tmp_path / "run")
    manifest = read_manifest(folder)
    odd = sealed(replace(manifest, files=(*manifest.files, ManifestFile(name=name, num_bytes=2, xxh3_128=checksum_bytes(b"{}")))))
    with FolderSource(folder) as source, pytest.raises(Corrupt, match="no name of a checkpoint or of a file"):
        assemble(manifest_bytes(odd), [source], into=tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put_folder(tmp_path / "run")
    copy_checkpoint(folder, store)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=MB))
    with pytest.raises(CheckpointError, match=r"needs 9\.8 MiB, 1\.0 MiB are free"):
        fetch(store, "s10-a1", into=tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_what_is_not_published_is_named_with_what_is(tmp_path: Path, store: ObjectStore) -> None:
    copy_checkpoint(put_folder(tmp_path / "run"), store)
    with pytest.raises(Incomplete, match="s99-a1 is not published there") as caught:
        fetch(store, "s99-a1", into=tmp_path)
    assert caught.value.hint == "published: s10-a1"


def test_a_remote_source_reads_in_any_pieces(tmp_path: Path, store: ObjectStore) -> None:
    data = os.urandom(17 * MB)  # more than one block
    folder = put_folder(tmp_path / "run", content={"large": data})
    copy_checkpoint(folder, store)
    source = RemoteSource(store, "s10-a1")
    (file,) = source.manifest.files
    assert source.has(file)
    assert not source.has(replace(file, xxh3_128="00"))
    assert check_bytes(file, source) is None
    across = memoryview(bytearray(MB))
    source.read_into(file, offset=16 * MB - 100, buffer=across)
    assert across == data[16 * MB - 100 : 17 * MB - 100]
    with pytest.raises(Incomplete, match="ends at byte"):
        source.read_into(file, offset=17 * MB - 10, buffer=across)


@pytest.mark.parametrize(
    ("url", "store_url", "checkpoint"),
    [
        ("s3://bucket/runs/a/s10-a1", "s3://bucket/runs/a", "s10-a1"),
        ("s3://bucket/s10-a1-r2/", "s3://bucket", "s10-a1-r2"),
        ("s3://bucket/runs/a", "s3://bucket/runs/a", None),
        ("file:///mnt/copies/s10-a1", "file:///mnt/copies", "s10-a1"),
        ("file:///mnt/copies", "file:///mnt/copies", None),
    ],
)
def test_a_url_names_a_store_or_one_checkpoint_in_it(url: str, store_url: str, checkpoint: str | None) -> None:
    found, name = split_resume_url(url)
    assert (str(found), name) == (store_url, checkpoint)


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/s1-a1", "gs://bucket/x", "nowhere", "s3://", "file:///s1-a1"])
def test_what_is_no_such_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch_for_resume(url, tmp_path)
    assert "hidden" not in str(caught.value)


def test_a_throttle_spreads_what_is_sent_and_saves_nothing_up() -> None:
    clock = ManualClock()
    throttle = Throttle(100, clock=clock)
    throttle.take(50)
    assert clock.now_s == 0.0
    throttle.take(100)
    assert clock.now_s == 0.5
    throttle.take(1)
    assert clock.now_s == 1.5
    clock.now_s = 60.0
    throttle.take(200)
    throttle.take(1)
    assert clock.now_s == 62.0
    Throttle(0, clock=clock).take(1 << 40)
    assert clock.now_s == 62.0


def test_is_whole_reads_the_bytes(tmp_path: Path) -> None:
    file = ManifestFile(name="a", num_bytes=3, xxh3_128=checksum_bytes(b"abc"))
    path = tmp_path / "a"
    assert not is_whole(path, file)
    for content, whole in ((b"abc", True), (b"abd", False), (b"ab", False)):
        path.write_bytes(content)
        assert is_whole(path, file) is whole


def test_a_file_that_nobody_wrote_is_mended_away(tmp_path: Path, store: ObjectStore) -> None:
    folder = put_folder(tmp_path / "run")
    copy_checkpoint(folder, store)
    (folder / "core.123").write_bytes(b"a dump")
    fetch(store, folder.name, into=folder.parent)
    assert not (folder / "core.123").exists()
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
