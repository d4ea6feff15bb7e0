"""Slots: who may leave which state, what a killed writer leaves behind, and memory that only grows."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from surefoot.checkpoint.slot import PAGE_BYTES, Slot, SlotHeader, SlotState
from surefoot.core.errors import CheckpointError, Corrupt, SurefootError

HEADER = SlotHeader(
    run="r", id="s5-a1", step=5, attempt=1, generation=2, rank=3, world_size=4, file="__3_0.distcp", image_bytes=2 * PAGE_BYTES
)
RANK_AREA, UPLOADER_AREA = 128, 2304


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot.create(rank=3, number=1)
    yield slot
    slot.close()


def fill(slot: Slot, header: SlotHeader = HEADER, byte: int = 7) -> None:
    image = slot.claim(header)
    image[:] = bytes([byte]) * len(image)
    slot.staged({"parts": [byte]})


def scribble(slot: Slot, offset: int, data: bytes) -> None:
    """As a process does that is killed while it writes there."""
    with mmap.mmap(slot.fd, PAGE_BYTES) as page:
        page[offset : offset + len(data)] = data


def test_a_fresh_slot_is_free_and_holds_nothing(slot: Slot) -> None:
    assert slot.state() is SlotState.FREE
    assert slot.header() is None
    assert bytes(slot.image()) == b""
    with pytest.raises(Corrupt, match="nothing is staged"):
        slot.index()


def test_another_process_sees_what_was_staged_and_the_rank_sees_what_became_of_it(slot: Slot) -> None:
    other = Slot.open(slot.fd, rank=3, number=1)
    fill(slot)
    assert other.state() is SlotState.STAGED
    header = other.header()
    assert header is not None
    assert replace(header, index_bytes=0, index_xxh3_128="", serial=0) == HEADER
    assert bytes(other.image()) == bytes([7]) * HEADER.image_bytes
    assert other.index() == {"parts": [7]}
    other.begin_upload()
    other.committed(image_xxh3_128="ab" * 16, host="here")
    seen = slot.header()
    assert slot.state() is SlotState.COMMITTED
    assert seen is not None
    assert (seen.image_xxh3_128, seen.host) == ("ab" * 16, "here")
    other.close()


def test_a_slot_is_never_taken_from_its_uploader(slot: Slot) -> None:
    fill(slot)
    with pytest.raises(SurefootError, match="slot 1 of rank 3: it is staged"):
        slot.claim(HEADER)
    slot.begin_upload()
    with pytest.raises(SurefootError, match="slot 1 of rank 3: it is uploading"):
        slot.claim(HEADER)
    slot.failed(CheckpointError("no room", where="disk", hint="free some", free_bytes=3))
    header = slot.header()
    assert header is not None
    assert header.error == "disk: no room — free some"
    assert header.told["values"] == {"free_bytes": 3}
    assert slot.state() is SlotState.FAILED
    slot.claim(HEADER)
    with pytest.raises(SurefootError, match="it is staging, not staged"):
        slot.begin_upload()


def test_what_was_said_about_an_earlier_save_is_forgotten(slot: Slot) -> None:
    fill(slot)
    slot.cancel()
    assert slot.cancelled
    slot.failed(CheckpointError("given up" * 500))
    first = slot.header()
    assert first is not None
    assert first.error.startswith("given up")
    fill(slot, replace(HEADER, id="s6-a1", step=6))
    second = slot.header()
    assert second is not None
    assert (second.id, second.error, second.serial) == ("s6-a1", "", first.serial + 1)
    assert not slot.cancelled


def test_what_storage_gave_back_is_said_of_the_save_that_it_was(slot: Slot) -> None:
    fill(slot)
    slot.begin_upload()
    slot.committed(image_xxh3_128="ab" * 16, host="here")
    slot.read_back(serial=1, well=True)
    first = slot.header()
    assert first is not None
    assert (first.read_back, first.image_xxh3_128) == ("verified", "ab" * 16)
    slot.claim(HEADER)
    slot.read_back(serial=1, well=False)
    second = slot.header()
    assert second is not None
    assert second.read_back == ""


def test_abandoned_staging_says_why(slot: Slot) -> None:
    slot.claim(HEADER)
    slot.abandon(CheckpointError("torn"))
    header = slot.header()
    assert header is not None
    assert (slot.state(), header.error) == (SlotState.FAILED, "torn")


@pytest.mark.parametrize("mark", ["x", "\N{SNOWMAN}", "\0"], ids=["ascii", "long in bytes", "escaped"])
def test_an_error_of_any_length_fits(slot: Slot, mark: str) -> None:
    """A rank or an uploader that cannot say what went wrong would leave the slot in its hands for good."""
    error = CheckpointError(mark * 1000, where=mark * 1000, hint=mark * 1000, **{f"value_{index}": mark * 90 for index in range(9)})
    slot.claim(replace(HEADER, run="r" * 200))
    slot.abandon(error)
    fill(slot)
    slot.failed(error)
    header = slot.header()
    assert header is not None
    assert header.told["code"] == error.code
    assert header.told["what"].startswith(mark * 10)
    assert header.error.startswith(mark * 10)


def test_memory_grows_and_is_mapped_once(slot: Slot) -> None:
    small, large = replace(HEADER, image_bytes=PAGE_BYTES), replace(HEADER, image_bytes=64 * PAGE_BYTES)
    fill(slot, large)
    size = os.fstat(slot.fd).st_size
    slot.reset()
    fill(slot, small, byte=1)
    slot.reset()
    fill(slot, large, byte=2)
    assert os.fstat(slot.fd).st_size == size
    assert bytes(slot.image()) == bytes([2]) * large.image_bytes


def test_a_reader_with_an_older_mapping_sees_the_larger_image(slot: Slot) -> None:
    other = Slot.open(slot.fd, rank=3, number=1)
    fill(slot)
    assert len(other.image()) == HEADER.image_bytes
    slot.reset()
    fill(slot, replace(HEADER, image_bytes=128 * PAGE_BYTES), byte=9)
    assert bytes(other.image()) == bytes([9]) * 128 * PAGE_BYTES
    assert other.index() == {"parts": [9]}
    other.close()


def test_a_torn_header_is_none_and_the_slot_can_be_used_again(slot: Slot) -> None:
    slot.claim(HEADER)
    scribble(slot, RANK_AREA + 40, b"torn")
    assert slot.state() is SlotState.STAGING
    assert slot.header() is None
    assert bytes(slot.image()) == b""
    slot.reset()
    fill(slot)
    header = slot.header()
    assert header is not None
    assert header.serial == 2


def test_a_torn_word_of_the_uploader_leaves_what_the_rank_said(slot: Slot) -> None:
    fill(slot)
    slot.begin_upload()
    slot.committed(image_xxh3_128="ab" * 16, host="here")
    scribble(slot, UPLOADER_AREA + 20, b"torn")
    header = slot.header()
    assert header is not None
    assert (header.id, header.image_xxh3_128) == ("s5-a1", "")


def test_an_index_that_changed_is_refused(slot: Slot) -> None:
    fill(slot)
    os.pwrite(slot.fd, b"X", PAGE_BYTES + HEADER.image_bytes + 2)
    with pytest.raises(Corrupt, match="not what the rank wrote"):
        slot.index()


def test_a_header_that_announces_more_than_there_is_is_refused(slot: Slot) -> None:
    fill(slot)
    os.ftruncate(slot.fd, PAGE_BYTES)
    other = Slot.open(slot.fd, rank=3, number=1)
    with pytest.raises(Corrupt, match="announced"):
        other.image()
    other.close()


def test_the_slot_of_another_rank_is_refused(slot: Slot) -> None:
    with pytest.raises(SurefootError, match="not slot 1 of rank 0"):
        Slot.open(slot.fd, rank=0, number=1)
    with pytest.raises(SurefootError, match="no slot behind"):
        Slot.open(10_000, rank=0, number=0)


def test_bare_memory_of_an_agent_becomes_a_slot_in_whoever_comes_first() -> None:
    fd = os.memfd_create("bare")
    first, second = Slot.open(fd, rank=0, number=0), Slot.open(fd, rank=0, number=0)
    fill(first, replace(HEADER, rank=0))
    assert second.index() == {"parts": [7]}
    for slot in (first, second):
        slot.close()
    os.close(fd)


def test_bytes_survive_the_death_of_the_rank(slot: Slot) -> None:
    program = f"""
import os, signal
from surefoot.checkpoint.slot import Slot, SlotHeader
slot = Slot.open({slot.fd}, rank=3, number=1)
image = slot.claim({HEADER!r})
image[:] = bytes([7]) * len(image)
slot.staged({{"parts": [7]}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], pass_fds=[slot.fd], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert slot.state() is SlotState.STAGED
    assert slot.index() == {"parts": [7]}
    assert bytes(slot.image()) == bytes([7]) * HEADER.image_bytes
