"""The uploader: from staged slots to a published folder, whoever dies or fails on the way."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from surefoot.checkpoint.commit import prepare, take
from surefoot.checkpoint.manifest import MANIFEST_NAME, read_manifest
from surefoot.checkpoint.save_plan import SavePlans, part_of, plan_save
from surefoot.checkpoint.scratch import free_bytes, part_name, write_image
from surefoot.checkpoint.slot import PAGE_BYTES, Slot, SlotState
from surefoot.checkpoint.staging import Snapshot
from surefoot.checkpoint.state import LiveState
from surefoot.checkpoint.upload import Committed, NotCommitted, ReadBack, Uploader
from surefoot.checkpoint.verify import verify
from surefoot.core.clock import ManualClock
from surefoot.core.errors import CheckpointError, SurefootError
from surefoot.core.records import Manifest
from surefoot.tensors.world import World

Draft = Callable[..., Manifest]


class Ranks:
    """Two ranks of one job, each with its slots, staged by hand: rank 1 holds the second tensor."""

    def __init__(self, make_draft: Draft, world: World) -> None:
        self.slots = [Slot.create(rank=rank, number=0) for rank in range(2)]
        self._draft = make_draft
        self._world = world

    def stage(self, rank: int, name: str = "s10-a1", *, slot: Slot | None = None) -> None:
        state = LiveState({f"model.{number}": torch.full((50, 50), float(number)) for number in range(2)})
        work = prepare(self._draft(name), state=state, extras={"cursor": {}}, world=self._world, plans=SavePlans(), reason="a test")
        held = [[f"model.{number}", f"rng/rank_{number:05d}"] for number in range(2)]
        tensors = {**work.tensors, "rng/rank_00001": work.tensors["rng/rank_00000"]}
        parts = [[part for key in keys if (part := part_of(key, tensors[key]))] for keys in held]
        planned = plan_save(parts, rank=rank)
        rest = {
            **work.rest,
            "draft": {**work.rest["draft"], "topology": {"world_size": 2}},
            "metadata": _base64(planned.metadata),
            "tensors": planned.tensors,
            "stored": planned.stored,
        }
        header = replace(work.header, rank=rank, world_size=2, file=planned.image.file, image_bytes=planned.image.num_bytes)
        keys = frozenset(tensors)
        mine = replace(work, header=header, planned=planned, tensors=tensors, at_once=keys, rest=rest if rank == 0 else {"job_bytes": 1})
        snapshot = Snapshot(slot or self.slots[rank], mine)
        snapshot.begin()
        snapshot.run()
        assert snapshot.error is None

    def stage_all(self, name: str = "s10-a1") -> None:
        for rank in range(2):
            self.stage(rank, name)

    @property
    def states(self) -> list[SlotState]:
        return [slot.state() for slot in self.slots]


def _base64(raw: bytes) -> str:
    import base64

    return base64.b64encode(raw).decode()


@pytest.fixture
def ranks(make_draft: Draft, world: World) -> Iterator[Ranks]:
    ranks = Ranks(make_draft, world)
    yield ranks
    for slot in ranks.slots:
        slot.close()


class Told:
    def __init__(self) -> None:
        self.committed: list[Committed] = []
        self.read_back: list[ReadBack] = []
        self.failed: list[NotCommitted] = []
        self.states: list[list[SlotState]] = []


def uploader_of(
    root: Path, slots: list[Slot], told: Told | None = None, *, limit_s: float = 60.0, clock: ManualClock | None = None
) -> Uploader:
    told = told or Told()
    return Uploader(
        root,
        slots,
        limit_s=limit_s,
        on_committed=told.committed.append,
        on_read_back=told.read_back.append,
        on_failed=told.failed.append,
        clock=clock,
        host="node-a",
    )


def work_off(uploader: Uploader, *, max_steps: int = 50) -> None:
    for _ in range(max_steps):
        if not uploader.step():
            return
    raise AssertionError("it never came to rest")


def test_two_ranks_become_one_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    told = Told()
    ranks.stage_all()
    work_off(uploader_of(tmp_path, ranks.slots, told))
    assert ranks.states == [SlotState.COMMITTED] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["s10-a1"]
    assert verify(tmp_path / "s10-a1") == []
    (committed,), (read_back,) = told.committed, told.read_back
    assert (committed.reason, committed.manifest.id, committed.host) == ("a test", "s10-a1", "node-a")
    assert read_back.problems == ()
    files = {file.name: file for file in read_manifest(tmp_path / "s10-a1").files}
    assert [(files[name].rank, files[name].host) for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")] == [
        (0, "node-a"),
        (1, "node-a"),
        (-1, ""),
    ]
    for slot in ranks.slots:
        header = slot.header()
        assert header is not None
        assert header.image_xxh3_128 == files[header.file].xxh3_128
        assert bytes(slot.image()) == (tmp_path / "s10-a1" / header.file).read_bytes()
    read_back_words = [header.read_back for slot in ranks.slots if (header := slot.header())]
    assert read_back_words == ["verified", ""]


def test_uploaders_of_two_hosts_meet_in_the_folder(tmp_path: Path, ranks: Ranks) -> None:
    leader, other = uploader_of(tmp_path, ranks.slots[:1]), uploader_of(tmp_path, ranks.slots[1:])
    ranks.stage(1)
    assert not other.step()  # there is no folder yet
    ranks.stage(0)
    work_off(leader)
    assert ranks.states == [SlotState.UPLOADING] * 2  # one part is missing
    work_off(other)
    work_off(leader)
    assert ranks.states == [SlotState.COMMITTED, SlotState.UPLOADING]
    work_off(other)
    assert ranks.states == [SlotState.COMMITTED] * 2
    assert verify(tmp_path / "s10-a1") == []


def test_the_commit_is_told_before_the_rank_can_see_it(tmp_path: Path, ranks: Ranks) -> None:
    seen: list[SlotState] = []
    ranks.stage_all()
    uploader = Uploader(tmp_path, ranks.slots, limit_s=60, on_committed=lambda _: seen.append(ranks.slots[0].state()))
    work_off(uploader)
    assert seen == [SlotState.UPLOADING]


def test_a_listener_that_fails_takes_nothing_back(tmp_path: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    def full(_: Committed) -> None:
        raise SurefootError("the ledger is full")

    ranks.stage_all()
    work_off(Uploader(tmp_path, ranks.slots, limit_s=60, on_committed=full))
    assert ranks.states == [SlotState.COMMITTED] * 2
    assert "the ledger is full" in caplog.text


def test_the_parent_is_what_was_committed_meanwhile(tmp_path: Path, make_draft: Draft, world: World) -> None:
    slots = [Slot.create(rank=0, number=number) for number in range(2)]
    for slot, name in zip(slots, ("s10-a1", "s11-a1"), strict=True):
        state = LiveState({"model.a": torch.zeros(3)})
        assert take(slot, prepare(make_draft(name), state=state, extras={}, world=world, plans=SavePlans())) is None
    work_off(uploader_of(tmp_path, slots))
    assert read_manifest(tmp_path / "s10-a1").parent is None
    assert read_manifest(tmp_path / "s11-a1").parent == "s10-a1"
    for slot in slots:
        slot.close()


# --- failures ---


def error_of(slot: Slot) -> str:
    header = slot.header()
    assert header is not None
    return header.error


def test_a_cancelled_save_leaves_nothing(tmp_path: Path, ranks: Ranks) -> None:
    told = Told()
    uploader = uploader_of(tmp_path, ranks.slots, told)
    ranks.stage(0)
    work_off(uploader)
    assert len(list(tmp_path.iterdir())) == 1
    ranks.slots[0].cancel()
    work_off(uploader)
    assert ranks.states[0] is SlotState.FAILED
    assert "given up" in error_of(ranks.slots[0])
    assert list(tmp_path.iterdir()) == []
    assert [ended.header.id for ended in told.failed] == ["s10-a1"]
    ranks.slots[0].reset()
    ranks.stage_all("s11-a1")
    work_off(uploader)
    assert verify(tmp_path / "s11-a1") == []


def test_the_other_side_gives_up_when_the_leader_did(tmp_path: Path, ranks: Ranks) -> None:
    leader, other = uploader_of(tmp_path, ranks.slots[:1]), uploader_of(tmp_path, ranks.slots[1:])
    ranks.stage_all()
    for uploader in (leader, other):
        uploader.step()
        uploader.step()
    ranks.slots[0].cancel()
    leader.step()
    work_off(other)
    assert ranks.states == [SlotState.FAILED] * 2
    assert "given up by rank 0" in error_of(ranks.slots[1])
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_whole_within_the_limit_has_failed(tmp_path: Path, ranks: Ranks) -> None:
    clock = ManualClock()
    uploader = uploader_of(tmp_path, ranks.slots, limit_s=60, clock=clock)
    ranks.stage(0)
    work_off(uploader)
    clock.sleep(61)
    work_off(uploader)
    assert ranks.states[0] is SlotState.FAILED
    assert "the parts of ranks [1] are not there after 60 s" in error_of(ranks.slots[0])
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_the_leader_took_is_not_withdrawn(tmp_path: Path, ranks: Ranks) -> None:
    """Its limit is over while the leader, on slow storage, is in the middle of the commit: what is published then must be whole."""
    clock = ManualClock()
    leader, other = uploader_of(tmp_path, ranks.slots[:1]), uploader_of(tmp_path, ranks.slots[1:], clock=clock)
    ranks.stage_all()
    for uploader in (leader, other):
        uploader.step()
        uploader.step()
    scratch = tmp_path / ".s10-a1.g1.writing"
    (scratch / part_name(1)).rename(tmp_path / "taken")  # what a commit begins with
    clock.sleep(61)
    work_off(other)
    assert ranks.states[1] is SlotState.FAILED
    assert (scratch / "__1_0.distcp").is_file()


def test_a_part_that_was_withdrawn_is_in_no_commit(tmp_path: Path, ranks: Ranks) -> None:
    clock = ManualClock()
    leader, other = uploader_of(tmp_path, ranks.slots[:1]), uploader_of(tmp_path, ranks.slots[1:], clock=clock)
    ranks.stage_all()
    for uploader in (leader, other):
        uploader.step()
        uploader.step()
    clock.sleep(61)
    work_off(other)
    work_off(leader)
    assert ranks.states == [SlotState.UPLOADING, SlotState.FAILED]
    assert [entry.name for entry in tmp_path.iterdir()] == [".s10-a1.g1.writing"]
    assert not (tmp_path / ".s10-a1.g1.writing" / "__1_0.distcp").exists()


def test_one_side_without_the_folder_of_the_other_says_what_it_needs(tmp_path: Path, ranks: Ranks) -> None:
    clock = ManualClock()
    uploader = uploader_of(tmp_path, ranks.slots[1:], clock=clock)
    ranks.stage(1)
    assert not uploader.step()
    clock.sleep(61)
    work_off(uploader)
    assert "checkpoints need a shared file system" in error_of(ranks.slots[1])


def test_a_rank_that_wrote_less_than_was_planned_is_named(tmp_path: Path, ranks: Ranks) -> None:
    uploader = uploader_of(tmp_path, ranks.slots[:1])
    other = uploader_of(tmp_path, ranks.slots[1:])
    ranks.stage_all()
    uploader.step()
    uploader.step()
    other.step()
    other.step()
    record = tmp_path / ".s10-a1.g1.writing" / part_name(1)
    record.write_text(record.read_text().replace('["model.1",', '["model.0",'))
    work_off(uploader)
    assert "rank 1 did not write what was planned" in error_of(ranks.slots[0])
    assert not (tmp_path / "s10-a1").exists()


def test_a_record_of_another_save_is_refused(tmp_path: Path, ranks: Ranks) -> None:
    uploader = uploader_of(tmp_path, ranks.slots)
    ranks.stage(0)
    work_off(uploader)
    scratch = tmp_path / ".s10-a1.g1.writing"
    (scratch / part_name(1)).write_text((scratch / part_name(0)).read_text())
    work_off(uploader)
    assert ranks.states[0] is SlotState.FAILED
    assert "it speaks of" in error_of(ranks.slots[0])


def test_a_disk_without_room_is_said_with_numbers_and_the_next_save_works(tmp_path: Path, ranks: Ranks) -> None:
    """The folder of the checkpoints is a file: whatever the system says reaches the rank."""
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    told = Told()
    uploader = uploader_of(root, ranks.slots, told)
    ranks.stage_all()
    work_off(uploader)
    assert ranks.states == [SlotState.FAILED] * 2
    assert "File exists" in error_of(ranks.slots[0])
    assert "(rank 0)" in error_of(ranks.slots[1])
    header = ranks.slots[0].header()
    assert header is not None
    assert header.told["values"]["errno"] == errno.EEXIST
    root.unlink()
    ranks.stage_all("s11-a1")
    work_off(uploader)
    assert verify(root / "s11-a1") == []
    assert len(told.failed) == 1


def test_a_disk_that_fills_up_while_a_part_is_written(tmp_path: Path, ranks: Ranks) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs: the full-disk test was NOT run")
    try:
        leader, other = uploader_of(disk, ranks.slots[:1]), uploader_of(disk, ranks.slots[1:])
        ranks.stage_all()
        assert leader.step()  # the folder is made, the room was seen
        (disk / "others").write_bytes(bytes(free_bytes(disk) - 8192))
        work_off(leader)
        work_off(other)
        assert ranks.states == [SlotState.FAILED, SlotState.UPLOADING]  # it never saw the folder: its rank hears of it and cancels
        ranks.slots[1].cancel()
        work_off(other)
        assert ranks.states == [SlotState.FAILED] * 2
        assert "No space left on device" in error_of(ranks.slots[0])
        assert [entry.name for entry in disk.iterdir()] == ["others"]
        (disk / "others").unlink()
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True, capture_output=True)
        ranks.stage_all("s11-a1")
        work_off(leader)
        work_off(other)
        work_off(leader)
        work_off(other)
        assert verify(disk / "s11-a1") == []
    finally:
        subprocess.run(["umount", str(disk)], capture_output=True)


def test_bytes_that_change_on_the_disk_are_found_when_they_are_read_back(tmp_path: Path, ranks: Ranks) -> None:
    told = Told()
    uploader = uploader_of(tmp_path, ranks.slots, told)
    ranks.stage_all()
    while not told.committed:
        uploader.step()
    file = tmp_path / "s10-a1" / "__1_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 1
    file.write_bytes(raw)
    work_off(uploader)
    assert [(problem.kind, problem.file) for problem in told.read_back[0].problems] == [("wrong-checksum", "__1_0.distcp")]
    header = ranks.slots[0].header()
    assert header is not None
    assert header.read_back == "damaged"


# --- deaths ---


def test_a_fresh_uploader_goes_on_where_a_killed_one_was(tmp_path: Path, ranks: Ranks) -> None:
    killed = uploader_of(tmp_path, ranks.slots)
    ranks.stage_all()
    for _ in range(2):
        killed.step()
    assert ranks.states == [SlotState.UPLOADING] * 2
    fresh = Told()
    work_off(uploader_of(tmp_path, ranks.slots, fresh))
    assert ranks.states == [SlotState.COMMITTED] * 2
    assert verify(tmp_path / "s10-a1") == []
    assert len(fresh.committed) == 1


def test_a_part_that_was_told_of_is_there_at_any_time(tmp_path: Path, ranks: Ranks) -> None:
    """The leader of another host may commit while a fresh uploader writes again what a killed one had written."""
    leader, killed = uploader_of(tmp_path, ranks.slots[:1]), uploader_of(tmp_path, ranks.slots[1:])
    ranks.stage_all()
    for uploader in (leader, killed):
        uploader.step()
        uploader.step()
    image, seen = tmp_path / ".s10-a1.g1.writing" / "__1_0.distcp", tmp_path / "seen"
    os.link(image, seen)
    fresh = uploader_of(tmp_path, ranks.slots[1:])
    fresh.step()
    fresh.step()
    assert image.samefile(seen)
    seen.unlink()
    work_off(leader)
    work_off(fresh)
    assert ranks.states == [SlotState.COMMITTED] * 2
    assert verify(tmp_path / "s10-a1") == []


def test_a_fresh_uploader_withdraws_only_what_the_leader_did_not_take(tmp_path: Path, ranks: Ranks) -> None:
    leader, killed = uploader_of(tmp_path, ranks.slots[:1]), uploader_of(tmp_path, ranks.slots[1:])
    ranks.stage_all()
    for uploader in (leader, killed):
        uploader.step()
        uploader.step()
    scratch = tmp_path / ".s10-a1.g1.writing"
    (scratch / part_name(1)).rename(tmp_path / "taken")  # what a commit begins with
    ranks.slots[1].cancel()
    work_off(uploader_of(tmp_path, ranks.slots[1:]))
    assert ranks.states[1] is SlotState.FAILED
    assert (scratch / "__1_0.distcp").is_file()


def test_one_killed_after_the_rename_is_believed(tmp_path: Path, ranks: Ranks) -> None:
    ranks.stage_all()
    for slot in ranks.slots:
        slot.begin_upload()
    copies = [Slot.create(rank=rank, number=0) for rank in range(2)]
    for rank, copy in enumerate(copies):
        ranks.stage(rank, slot=copy)
    work_off(uploader_of(tmp_path, copies))
    told = Told()
    work_off(uploader_of(tmp_path, ranks.slots, told))
    assert ranks.states == [SlotState.COMMITTED] * 2
    assert "its writer died" in told.committed[0].reason
    header = ranks.slots[1].header()
    assert header is not None
    assert header.image_xxh3_128 == {file.name: file for file in read_manifest(tmp_path / "s10-a1").files}["__1_0.distcp"].xxh3_128
    for copy in copies:
        copy.close()


def test_what_dead_ranks_staged_whole_is_committed_and_the_rest_freed(tmp_path: Path, ranks: Ranks) -> None:
    second = [Slot.create(rank=rank, number=1) for rank in range(2)]
    ranks.stage_all()
    ranks.stage(0, "s11-a1", slot=second[0])
    header = second[0].header()
    assert header is not None
    second[1].claim(replace(header, rank=1, image_bytes=PAGE_BYTES))
    uploader = uploader_of(tmp_path, [*ranks.slots, *second])
    failures = uploader.drain(limit_s=60, ranks_are_gone=True)
    assert failures == [
        "slot 1 of rank 1 was still being filled for s11-a1",
        "s11-a1, slot 1 of rank 0: s11-a1: ranks [1] died before their parts were staged",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["s10-a1"]
    assert [slot.state() for slot in second] == [SlotState.FAILED, SlotState.FREE]
    for slot in second:
        slot.close()


def test_draining_ends_within_its_limit(tmp_path: Path, ranks: Ranks) -> None:
    clock = ManualClock()
    ranks.stage(0)
    failures = uploader_of(tmp_path, ranks.slots[:1], clock=clock).drain(limit_s=5.0, ranks_are_gone=True)
    assert len(failures) == 1
    assert "before the time was up" in failures[0]
    assert clock.monotonic_s() < 6.0
    assert list(tmp_path.iterdir()) == []


def test_draining_begins_nothing_after_its_limit(tmp_path: Path, ranks: Ranks) -> None:
    clock = ManualClock()
    second = [Slot.create(rank=rank, number=1) for rank in range(2)]
    ranks.stage_all()
    for rank, slot in enumerate(second):
        ranks.stage(rank, "s11-a1", slot=slot)
    slow = Uploader(tmp_path, [*ranks.slots, *second], limit_s=600, on_committed=lambda _: clock.sleep(10), clock=clock)
    failures = slow.drain(limit_s=5.0, ranks_are_gone=True)
    assert len(failures) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["s10-a1"]
    assert [slot.state() for slot in second] == [SlotState.FAILED] * 2
    for slot in second:
        slot.close()


def test_ranks_need_not_wait_until_storage_gave_it_back(tmp_path: Path, ranks: Ranks) -> None:
    told = Told()
    ranks.stage_all()
    uploader = uploader_of(tmp_path, ranks.slots, told)
    assert uploader.drain(limit_s=60, ranks_are_gone=True, read_back=False) == []
    assert (len(told.committed), told.read_back) == (1, [])
    work_off(uploader)
    assert [found.problems for found in told.read_back] == [()]


# --- the image on storage ---


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_pages", [0, 1, 5000])
def test_an_image_is_written_as_it_is(tmp_path: Path, direct: bool, num_pages: int) -> None:
    slot = Slot.create(rank=0, number=0)
    slot.reserve(num_pages * PAGE_BYTES + 1)
    image = memoryview(bytearray(os.urandom(num_pages * PAGE_BYTES)))
    assert write_image(tmp_path / "file", image, direct=direct) == xxhash.xxh3_128_hexdigest(image)
    assert (tmp_path / "file").read_bytes() == image
    slot.close()


def test_a_file_system_without_direct_writes_takes_it_too() -> None:
    """Memory file systems refuse the flag, or the write, depending on the kernel."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no memory file system here: the fallback was NOT tested")
    path = folder / f"surefoot-test-{os.getpid()}"
    image = memoryview(bytearray(os.urandom(3 * PAGE_BYTES)))
    try:
        write_image(path, image)
        assert path.read_bytes() == image
    finally:
        path.unlink(missing_ok=True)


def test_a_file_is_never_written_twice(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(FileExistsError):
        write_image(tmp_path / "file", memoryview(b""))


def test_an_existing_checkpoint_is_never_touched(tmp_path: Path, ranks: Ranks) -> None:
    ranks.stage_all()
    uploader = uploader_of(tmp_path, ranks.slots)
    work_off(uploader)
    before = {file.name: file.read_bytes() for file in (tmp_path / "s10-a1").iterdir()}
    ranks.stage_all()
    work_off(uploader)
    assert ranks.states == [SlotState.FAILED] * 2
    assert "exists already" in error_of(ranks.slots[0])
    assert {file.name: file.read_bytes() for file in (tmp_path / "s10-a1").iterdir()} == before
    assert (tmp_path / "s10-a1" / MANIFEST_NAME).is_file()


def test_a_save_that_the_rank_calls_by_another_name_is_refused(tmp_path: Path, make_draft: Draft, world: World) -> None:
    with pytest.raises(CheckpointError, match="checkpoint id"):
        prepare(make_draft("latest"), state=LiveState({}), extras={}, world=world, plans=SavePlans())
