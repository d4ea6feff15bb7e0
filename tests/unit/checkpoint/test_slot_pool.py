"""Which slot is filled next, and how many there may be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.checkpoint.memory_limit import MemoryLimit, memory_limit, slots_that_fit
from surefoot.checkpoint.slot import PAGE_BYTES, Slot, SlotHeader
from surefoot.checkpoint.slot_pool import SlotPool, close_all, slots_handed_over
from surefoot.core.clock import ManualClock
from surefoot.core.errors import ConfigError, SurefootError

HEADER = SlotHeader(run="r", id="s1-a1", step=1, attempt=1, generation=1, rank=0, world_size=1, file="__0_0.distcp", image_bytes=PAGE_BYTES)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool.create(rank=0, num_slots=2)
    yield pool
    pool.close()


def fill(pool: SlotPool) -> Slot:
    slot = pool.free()
    assert slot is not None
    pool.take(slot).claim(HEADER)
    slot.staged({})
    slot.begin_upload()
    return slot


def test_a_slot_is_not_free_before_its_upload_ended(pool: SlotPool) -> None:
    first, second = fill(pool), fill(pool)
    assert {first.number, second.number} == {0, 1}
    assert pool.free() is None
    second.committed(image_xxh3_128="", host="")
    assert pool.free() is second


def test_the_newest_commit_stays_in_memory_as_long_as_there_is_another_slot(pool: SlotPool) -> None:
    numbers = []
    for _ in range(4):
        slot = fill(pool)
        slot.committed(image_xxh3_128="", host="")
        numbers.append(slot.number)
    assert numbers == [0, 1, 0, 1]


def test_a_failed_one_is_taken_before_a_commit_is_given_up(pool: SlotPool) -> None:
    fill(pool).committed(image_xxh3_128="", host="")
    failed = fill(pool)
    failed.reset()
    assert pool.free() is failed


def test_waiting_for_a_slot_is_bounded(pool: SlotPool) -> None:
    fill(pool), fill(pool)
    clock = ManualClock()
    assert pool.wait_free(limit_s=5.0, clock=clock) is None
    assert 5.0 <= clock.monotonic_s() < 6.0


def test_fewer_slots_are_used_from_now_on(pool: SlotPool) -> None:
    pool.keep(1)
    fill(pool)
    assert pool.free() is None
    pool.keep(0)
    assert len(pool.slots) == 1


@pytest.fixture
def handed_over() -> Iterator[dict[str, str]]:
    """The environment of a rank: four slots of two ranks. The agent keeps its own descriptors of them."""
    made = [Slot.create(rank=rank, number=number) for rank in range(2) for number in range(2)]
    places = [(slot.rank, slot.number, f"SUREFOOT_SLOT_{slot.rank}_{slot.number}") for slot in made]
    names = {name: str(os.dup(slot.fd)) for slot, (*_, name) in zip(made, places, strict=True)}
    yield {"SUREFOOT_SLOTS": json.dumps(places), **names}
    close_all(made)


def files_of(handed_over: dict[str, str]) -> list[os.stat_result]:
    return [os.fstat(int(value)) for name, value in handed_over.items() if name != "SUREFOOT_SLOTS"]


def count_descriptors(files: list[os.stat_result]) -> int:
    """How many descriptors of this process lead to these files, those of mappings too."""
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]  # the one of this listing is gone
    return sum(any(os.path.samestat(entry.stat(), file) for file in files) for entry in entries)


def test_slots_of_an_agent_are_found_by_their_names(handed_over: dict[str, str]) -> None:
    found = slots_handed_over(handed_over)
    assert [(slot.rank, slot.number) for slot in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert slots_handed_over({}) == []
    close_all(found)


def test_when_slots_are_closed_no_descriptor_of_them_stays_open(handed_over: dict[str, str]) -> None:
    files = files_of(handed_over)
    before = count_descriptors(files)
    found = slots_handed_over(handed_over)
    close_all(found[2:])  # the siblings', after the restore
    assert count_descriptors(files[2:]) == before // 2 - 2
    close_all(found[:2])
    assert count_descriptors(files) == before - len(found)


def test_no_child_is_handed_what_the_rank_took_over(handed_over: dict[str, str]) -> None:
    found = slots_handed_over(handed_over)
    assert list(handed_over) == ["SUREFOOT_SLOTS"]
    assert not any(os.get_inheritable(slot.fd) for slot in found)
    close_all(found)


def test_a_second_call_says_that_they_are_taken(handed_over: dict[str, str]) -> None:
    files = files_of(handed_over)
    found = slots_handed_over(handed_over)
    before = count_descriptors(files)
    with pytest.raises(SurefootError, match="slot 0 of rank 0 is not to be had: it was taken over already"):
        slots_handed_over(handed_over)
    assert count_descriptors(files) == before
    close_all(found)


# --- memory ---


def test_as_many_slots_as_fit() -> None:
    limit = MemoryLimit(1000, "a test")
    assert slots_that_fit(100, wanted=2, local_ranks=2, fraction=0.5, limit=limit) == 2
    assert slots_that_fit(100, wanted=4, local_ranks=2, fraction=0.5, limit=limit) == 2
    assert slots_that_fit(240, wanted=2, local_ranks=2, fraction=0.5, limit=limit) == 1


def test_not_even_one_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="a test") as caught:
        slots_that_fit(300, wanted=2, local_ranks=2, fraction=0.5, limit=MemoryLimit(1000, "a test"))
    assert caught.value.values == {"slot_bytes": 300, "local_ranks": 2, "room_bytes": 500}


def machine(tmp_path: Path, cgroup: str) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:        10 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, groups


def test_the_machine_is_the_limit_where_no_group_says_less(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/\n")
    assert memory_limit(proc=proc, cgroup=groups) == MemoryLimit(1_024_000, "this machine's memory")
    (groups / "memory.max").write_text("max\n")
    assert memory_limit(proc=proc, cgroup=groups).num_bytes == 1_024_000


def test_a_group_above_may_be_the_limit(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/job/rank\n")
    (groups / "job" / "rank").mkdir(parents=True)
    (groups / "job" / "rank" / "memory.max").write_text("max\n")
    (groups / "job" / "memory.max").write_text("5000\n")
    assert memory_limit(proc=proc, cgroup=groups) == MemoryLimit(5000, str(groups / "job" / "memory.max"))


def test_inside_a_container_the_mount_is_its_own_group(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/of/the/host\n")
    (groups / "memory.max").write_text("7000\n")
    assert memory_limit(proc=proc, cgroup=groups).num_bytes == 7000


def test_the_first_version_of_groups_is_read_too(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "9:cpu,memory:/job\n0::/\n")
    (groups / "memory" / "job").mkdir(parents=True)
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (groups / "memory" / "job" / "memory.limit_in_bytes").write_text("6000\n")
    assert memory_limit(proc=proc, cgroup=groups).num_bytes == 6000


def test_this_machine_has_some() -> None:
    assert memory_limit().num_bytes > 1 << 20
