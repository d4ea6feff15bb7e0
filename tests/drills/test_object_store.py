"""Checkpoints in a real S3 server, with faults on the way to it, killed copies, rivals, and no server at all."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.fetch import fetch, fetch_for_resume
from surefoot.checkpoint.manifest import MANIFEST_NAME, manifest_bytes, read_manifest, sealed
from surefoot.checkpoint.object_store import ObjectStore, Patience, kind_of
from surefoot.checkpoint.remote import (
    RemoteSource,
    copy_checkpoint,
    read_marker,
    remote_ids,
    remote_newest,
    retire_remote,
)
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.sources import check_bytes
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.clock import SystemClock
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry, Manifest
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.tensors.world import single_world
from tests.drills.s3_server import KEY, LIMIT_S, SECRET, Faults, until

HERE = Path(__file__).parent
QUICK = Patience(num_requests=4, request_limit_s=20.0, num_tries=6, wait_s=0.05, max_wait_s=0.5)


def make_checkpoint(root: Path, *, seed: int = 0, width: int = 8, name: str = "s10-a1", ledger_seq: int = 4) -> tuple[Path, nn.Module]:
    """A published checkpoint of a small model, and the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    draft = Manifest(
        format_version=1,
        id=name,
        run="drill",
        step=int(name[1 : name.index("-")]),
        attempt=1,
        generation=1,
        parent=None,
        time_utc="2026-01-01T00:00:00.000Z",
        loss=2.5,
        tokens=1000,
        state_digest="",
        config_hashes={},
        data_hash="",
        code_version="0",
        topology={},
        environment={},
        ledger_seq=ledger_seq,
        ledger_hash="",
        cursor={},
        files=(),
        tensors=(),
    )
    save(root, draft, state=collect(model, new_optimizer(model)), extras={"cursor": {"seed": seed}}, world=single_world())
    return root / name, model


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of about 24 MB: its image goes up in several parts."""
    return make_checkpoint(tmp_path_factory.mktemp("large"), width=280_000)[0]


def test_delete_here_fetch_load_and_every_digest_is_that_of_the_run(s3: str, tmp_path: Path) -> None:
    folder, model = make_checkpoint(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(folder)
    store = ObjectStore.open(s3, patience=QUICK)
    store.check()
    copied = copy_checkpoint(folder, store)
    assert copied.ours
    assert copied.num_sent == copied.num_files == 4
    shutil.rmtree(folder)

    back = fetch_for_resume(f"{s3}/s10-a1", tmp_path / "run" / "checkpoints")
    assert back == folder
    assert verify(back) == []
    torch.manual_seed(99)
    other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    load(back, state=collect(other, new_optimizer(other)), world=single_world(), expected_state_digest=manifest.state_digest)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_with_three_faults_in_ten_requests_every_copy_is_still_right(
    s3: str, faults: Faults, large: Path, tmp_path: Path, seed: int
) -> None:
    seen = faults(slow_down=0.1, reset=0.1, lost=0.1, seed=seed)
    store = ObjectStore.open(s3, patience=QUICK)
    copied = copy_checkpoint(large, store)
    assert copied.ours  # whatever was lost: the marker is ours, and we know it
    assert remote_ids(store) == ["s10-a1"]
    assert verify(fetch(store, "s10-a1", into=tmp_path)) == []
    assert len(seen()) >= 3


def test_a_marker_whose_answer_was_lost_is_not_taken_for_somebody_elses(s3: str, faults: Faults, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    assert copy_checkpoint(folder, ObjectStore.open(s3, patience=QUICK)).ours
    retire_marker_alone(s3)
    seen = faults(first=["PUT"])  # everything is there already, so the only PUT is the marker
    assert copy_checkpoint(folder, ObjectStore.open(s3, patience=QUICK)).ours
    assert seen() == ["lost PUT"]


def retire_marker_alone(url: str) -> None:
    assert ObjectStore.open(url).delete_all(["s10-a1.json"]) == {}


def test_a_copy_killed_in_the_middle_goes_on_where_it_was(s3: str, large: Path) -> None:
    store = ObjectStore.open(s3, patience=QUICK)
    command = [sys.executable, str(HERE / "toy_copy.py"), str(large), s3]
    with subprocess.Popen([*command, "8000000"], stdout=subprocess.PIPE) as slow:
        # .metadata comes first; the image takes three seconds
        until(lambda: any(key.endswith(".metadata") for key in store.keys(under="")), what="the first object")
        slow.send_signal(signal.SIGKILL)
        assert slow.wait() == -signal.SIGKILL
    assert remote_ids(store) == []
    assert not any(key.endswith(MANIFEST_NAME) for key in store.keys(under=""))

    again = json.loads(subprocess.run([*command, "0"], check=True, capture_output=True).stdout)
    assert again["ours"]
    assert 0 < again["num_sent"] < again["num_files"]
    assert remote_ids(store) == ["s10-a1"]


def test_of_two_writers_of_one_checkpoint_one_wins_and_the_other_knows(s3: str, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    together = threading.Barrier(2)
    ours: list[bool] = []

    def write() -> None:
        store = ObjectStore.open(s3, patience=QUICK)
        together.wait()
        ours.append(copy_checkpoint(folder, store).ours)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(ours) == [False, True]


def test_of_two_checkpoints_of_one_id_one_is_published_and_the_other_refused_by_name(s3: str, tmp_path: Path) -> None:
    first, second = (make_checkpoint(tmp_path / str(seed), seed=seed)[0] for seed in (1, 2))
    together = threading.Barrier(2)
    told: list[str] = []

    def write(folder: Path) -> None:
        store = ObjectStore.open(s3, patience=QUICK)
        together.wait()
        try:
            told.append(copy_checkpoint(folder, store).manifest_hash)
        except CheckpointError as error:
            told.append(kind_of(error))

    writers = [threading.Thread(target=write, args=(folder,)) for folder in (first, second)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    marker = read_marker(ObjectStore.open(s3), "s10-a1")
    assert marker is not None
    assert sorted(told) == sorted(["conflict", marker.manifest_hash])
    assert verify(fetch(s3, "s10-a1", into=tmp_path / "back")) == []  # nothing of the two is mixed


def test_a_bit_that_flips_on_the_way_back_is_found_before_anything_is_published(s3: str, faults: Faults, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    straight = ObjectStore.open(s3)
    faults(flip=1.0)
    with pytest.raises(CheckpointError, match="was read back as") as caught:
        copy_checkpoint(folder, ObjectStore.open(s3, patience=QUICK))
    assert kind_of(caught.value) == "damaged"
    assert remote_ids(straight) == []


def test_a_bit_that_flips_at_rest_is_found_by_a_fetch_and_mended_by_a_copy(s3: str, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "run")
    store = ObjectStore.open(s3, patience=QUICK)
    copy_checkpoint(folder, store)
    (key,) = (key for key in store.keys(under="") if key.endswith(".distcp"))
    raw = bytearray(store.read(key))
    raw[1000] ^= 1
    store.write(key, lambda: iter([bytes(raw)]), num_bytes=len(raw))

    file = next(file for file in read_manifest(folder).files if file.name.endswith(".distcp"))
    problem = check_bytes(file, RemoteSource(store, "s10-a1"))
    assert problem is not None
    assert (problem.kind, problem.file) == ("wrong-checksum", "__0_0.distcp")
    with pytest.raises(Corrupt, match=r"__0_0.distcp is whole nowhere: s3://.*xxh3_128"):
        fetch(store, "s10-a1", into=tmp_path / "back")
    assert not (tmp_path / "back" / "s10-a1").exists()

    store.write(key, lambda: iter([bytes(raw[:100])]), num_bytes=100)  # and one that is cut off
    with pytest.raises(Corrupt, match=r"__0_0.distcp is whole nowhere: .*shorter than it was"):
        fetch(store, "s10-a1", into=tmp_path / "back")

    assert copy_checkpoint(folder, store).num_sent == 1
    assert verify(fetch(store, "s10-a1", into=tmp_path / "back")) == []


def test_the_newest_is_the_one_saved_last_whatever_its_step(s3: str, tmp_path: Path) -> None:
    store = ObjectStore.open(s3, patience=QUICK)
    for name, ledger_seq in (("s30-a1", 10), ("s20-a2", 20)):
        copy_checkpoint(make_checkpoint(tmp_path, name=name, ledger_seq=ledger_seq)[0], store)
    assert remote_ids(store) == ["s20-a2", "s30-a1"]
    assert remote_newest(store) == "s20-a2"
    assert fetch_for_resume(s3, tmp_path / "back").name == "s20-a2"


def test_a_retired_copy_is_gone_and_one_of_another_run_is_not_touched(s3: str, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    store = ObjectStore.open(s3, patience=QUICK)
    copied = copy_checkpoint(folder, store)
    assert retire_remote(store, "s10-a1", manifest_hash="0" * 64) == {"s10-a1.json": "it is another checkpoint's by now"}
    assert remote_ids(store) == ["s10-a1"]
    assert retire_remote(store, "s10-a1", manifest_hash=copied.manifest_hash) == {}
    assert store.keys(under="") == {}
    assert retire_remote(store, "s10-a1", manifest_hash=copied.manifest_hash) == {}


@pytest.mark.parametrize(
    ("name", "value", "kind", "word"),
    [
        ("AWS_SECRET_ACCESS_KEY", "a-wrong-secret", "credentials", "not allowed"),
        ("AWS_ACCESS_KEY_ID", "a-wrong-key", "credentials", "not allowed"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "unreachable", "AWS_ENDPOINT_URL says where it is"),
    ],
)
def test_what_is_wrong_with_a_store_is_named_and_no_secret_said(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, kind: str, word: str
) -> None:
    folder, _ = make_checkpoint(tmp_path)
    monkeypatch.setenv(name, value)
    store = ObjectStore.open(s3, patience=Patience(num_requests=1, request_limit_s=5.0, num_tries=2, wait_s=0.01))
    with pytest.raises(CheckpointError) as caught:
        copy_checkpoint(folder, store)
    assert kind_of(caught.value) == kind
    assert word in str(caught.value)
    assert not any(secret in repr(caught.value) + repr(caught.value.values) for secret in (KEY, SECRET, "a-wrong-"))


def test_credentials_that_are_not_there_are_named_soon(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # where a machine in a cloud would find some
    with pytest.raises(CheckpointError) as caught:
        ObjectStore.open(s3, patience=Patience(num_requests=0, request_limit_s=5.0, num_tries=1)).check()
    assert kind_of(caught.value) == "credentials"


def test_a_missing_bucket_is_named(s3: str, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path)
    store = ObjectStore.open("s3://no-such-bucket/prefix", patience=QUICK)
    for attempt in (store.check, lambda: copy_checkpoint(folder, store), lambda: fetch_for_resume("s3://no-such-bucket/prefix", tmp_path)):
        with pytest.raises(CheckpointError, match="there is no bucket no-such-bucket") as caught:
            attempt()
        assert kind_of(caught.value) == "bucket-missing"


class Mirrored:
    """A run folder whose ledger the test writes, and the mirror that an agent would start beside it."""

    def __init__(self, run_dir: Path, *, url: str) -> None:
        self.run_dir = run_dir
        self.url = url
        run_dir.mkdir()
        (run_dir / "config.toml").write_text(f'[checkpoint]\ntiers = ["disk", "{url}"]\n')
        self._ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="agent")
        self._parent: str | None = None
        self.say(Event.RUN_CREATED)

    def say(self, event: Event, **fields: object) -> None:
        self._ledger.append(event, generation=1, attempt=1, step=0, fields=fields)

    def add(self, name: str) -> Path:
        """Commit a checkpoint and read it back."""
        folder, _ = make_checkpoint(self.run_dir / "checkpoints", name=name, ledger_seq=self._ledger.position()[0])
        self.say(Event.CHECKPOINT_COMMITTED, id=name, step=int(name[1 : name.index("-")]), attempt=1, parent=self._parent, num_bytes=1)
        self.say(Event.CHECKPOINT_VERIFIED, id=name)
        self._parent = name
        return folder

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = ["--control-fd", str(theirs.fileno()), "--agent-pid", str(os.getpid()), "--generation", "1"]
        command = [sys.executable, "-m", "surefoot.cli.mirror", "--run-dir", str(self.run_dir), "--tier", self.url, *own]
        with theirs, (self.run_dir / "mirror.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs.fileno(),))
        self._agent = ours

    def finish(self) -> int:
        """The agent hangs up: what is left is copied, then it leaves."""
        self._agent.close()
        return self._process.wait(LIMIT_S)

    def kill(self) -> None:
        self._agent.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def entries(self, event: Event) -> list[LedgerEntry]:
        return [entry for entry in read_ledger(self.run_dir / LEDGER_NAME) if entry.event == event]

    @property
    def log(self) -> str:
        return (self.run_dir / "mirror.log").read_text()


@pytest.fixture
def mirrored(s3: str, tmp_path: Path) -> Iterator[Mirrored]:
    beside = Mirrored(tmp_path / "run", url=s3)
    beside.start()
    yield beside
    beside.kill()


def test_the_mirror_copies_what_was_read_back_and_retires_what_went_from_disk(mirrored: Mirrored, s3: str, tmp_path: Path) -> None:
    mirrored.add("s10-a1")
    until(lambda: bool(mirrored.entries(Event.CHECKPOINT_COPIED)), what=f"the first copy; {mirrored.log}")
    mirrored.say(Event.CHECKPOINT_RETIRED, id="s10-a1")
    mirrored.add("s20-a1")
    assert mirrored.finish() == 0, mirrored.log

    copied = [entry.fields for entry in mirrored.entries(Event.CHECKPOINT_COPIED)]
    assert [(fields["id"], fields["tier"], fields["ours"]) for fields in copied] == [("s10-a1", s3, True), ("s20-a1", s3, True)]
    assert [entry.fields["id"] for entry in mirrored.entries(Event.CHECKPOINT_RETIRED) if entry.by == "mirror"] == ["s10-a1"]
    store = ObjectStore.open(s3)
    assert remote_ids(store) == ["s20-a1"]
    assert verify(fetch(store, "s20-a1", into=tmp_path / "back")) == []


def test_a_store_that_refuses_is_told_once_and_caught_up_with_later(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    beside = Mirrored(tmp_path / "run", url=s3)
    beside.add("s10-a1")
    beside.start()
    try:
        until(lambda: bool(beside.entries(Event.COPY_FAILED)), what=f"word of it; {beside.log}")
        assert beside.finish() == 0  # a run is never held up or failed by it
    finally:
        beside.kill()
    (failed,) = beside.entries(Event.COPY_FAILED)
    assert failed.fields["kind"] == "credentials"
    assert "a-wrong-secret" not in failed.reason + beside.log

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    beside.start()
    assert beside.finish() == 0, beside.log
    assert remote_ids(ObjectStore.open(s3)) == ["s10-a1"]


def test_a_manifest_that_is_not_the_published_one_is_refused(s3: str, tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path / "run")
    store = ObjectStore.open(s3, patience=QUICK)
    copy_checkpoint(folder, store)
    (key,) = (key for key in store.keys(under="") if key.endswith(MANIFEST_NAME))
    other = manifest_bytes(sealed(dataclasses.replace(read_manifest(folder), loss=0.1)))
    store.write(key, lambda: iter([other]), num_bytes=len(other))
    with pytest.raises(Corrupt, match="not the manifest that was published"):
        fetch(store, "s10-a1", into=tmp_path / "back")
