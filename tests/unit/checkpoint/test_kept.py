from __future__ import annotations

import pytest
import xxhash

from surefoot.checkpoint.kept import KEPT_COMPLETE, KeptBytes, kept_key
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete, PeerLost

MB = 1 << 20


def image(number: int, *, num_bytes: int = MB) -> memoryview:
    return memoryview(bytes([number]) * num_bytes)


def share(kept: KeptBytes, step: int, *, rank: int = 0, generation: int = 1, complete: bool = True, num_bytes: int = MB) -> str:
    """Put one rank's image of a checkpoint; its key."""
    key, data = kept_key(f"s{step}-a1", rank=rank, name=f"__{rank}_0.distcp"), image(step % 256, num_bytes=num_bytes)
    with kept.receiving(key, num_bytes=num_bytes, generation=generation) as buffer:
        buffer[:] = data
    if complete:
        checksum = xxhash.xxh3_128(data).hexdigest()
        kept.complete(f"s{step}-a1", rank=rank, files={f"__{rank}_0.distcp": checksum}, generation=generation)
    return key


def test_what_was_put_is_got_listed_and_dropped() -> None:
    kept = KeptBytes(budget_bytes=10 * MB)
    kept.put("anything", memoryview(b"some bytes"))
    kept.put("empty", memoryview(b""))
    assert bytes(kept.get("anything")) == b"some bytes"
    assert bytes(kept.get("empty")) == b""
    assert kept.keys() == ["anything", "empty"]
    assert kept.listing()["anything"] == (10, xxhash.xxh3_128(b"some bytes").hexdigest())
    kept.drop("anything")
    kept.drop("anything")
    assert kept.keys() == ["empty"]
    with pytest.raises(Incomplete, match="anything"):
        kept.get("anything")


def test_what_is_kept_cannot_be_written_to() -> None:
    kept = KeptBytes(budget_bytes=MB)
    kept.put("key", memoryview(b"bytes"))
    with pytest.raises(TypeError):
        kept.get("key")[0] = 1


def test_a_range_that_never_came_whole_is_not_kept_and_takes_no_room() -> None:
    kept = KeptBytes(budget_bytes=2 * MB)
    kept.put("key", memoryview(b"old"))
    with pytest.raises(ConnectionError), kept.receiving("key", num_bytes=MB, generation=0):
        raise ConnectionError("hung up")
    with pytest.raises(Corrupt, match="was meant"), kept.receiving("key", num_bytes=3, generation=0, xxh3_128="00") as buffer:
        buffer[:] = b"new"
    assert bytes(kept.get("key")) == b"old"
    assert kept.used_bytes == 3


def test_more_than_the_budget_is_refused_with_the_numbers() -> None:
    kept = KeptBytes(budget_bytes=3 * MB)
    share(kept, 1, num_bytes=2 * MB)
    with pytest.raises(CheckpointError, match=r"2\.0 MiB wanted, 2\.0 MiB of 3\.0 MiB in use, 0 B of them could go") as caught:
        share(kept, 1, rank=1, num_bytes=2 * MB)
    assert caught.value.values["kind"] == "budget"
    assert kept.used_bytes == 2 * MB


def test_room_on_its_way_in_is_taken() -> None:
    kept = KeptBytes(budget_bytes=3 * MB)
    with kept.receiving("first", num_bytes=2 * MB, generation=0), pytest.raises(CheckpointError, match="no room"):
        kept.put("second", image(1, num_bytes=2 * MB))


@pytest.mark.parametrize("num_bytes", [-1, -(1 << 40)])
def test_a_negative_length_makes_no_room(num_bytes: int) -> None:
    kept = KeptBytes(budget_bytes=MB)
    with pytest.raises(CheckpointError, match="-"), kept.receiving("key", num_bytes=num_bytes, generation=0):
        pass
    assert kept.used_bytes == 0


def test_an_older_generation_is_refused_and_what_the_newer_one_put_stays() -> None:
    kept = KeptBytes(budget_bytes=10 * MB)
    share(kept, 1, generation=2)
    with pytest.raises(PeerLost, match="generation 1 writes to a keeper that is at generation 2"):
        share(kept, 2, generation=1)
    with pytest.raises(PeerLost):
        kept.fence(1)
    assert len(kept.keys()) == 1


def test_a_writer_that_was_fenced_while_its_bytes_came_is_refused_at_the_end() -> None:
    kept = KeptBytes(budget_bytes=10 * MB)
    with pytest.raises(PeerLost), kept.receiving("key", num_bytes=1, generation=1):
        kept.fence(2)
    assert kept.keys() == []


def test_a_rank_keeps_its_newest_complete_ones_and_the_others_theirs() -> None:
    kept = KeptBytes(budget_bytes=100 * MB)
    other = share(kept, 1, rank=1)
    keys = [share(kept, step) for step in range(1, 6)]
    assert kept.keys() == sorted([*keys[-KEPT_COMPLETE:], other])
    assert kept.complete_ranks("s1-a1") == [1]


def test_nothing_goes_for_one_that_is_not_complete() -> None:
    kept = KeptBytes(budget_bytes=100 * MB)
    keys = [share(kept, 1), share(kept, 2), share(kept, 3, complete=False), share(kept, 4, complete=False)]
    assert kept.keys() == keys


def test_under_pressure_the_older_complete_one_goes_and_never_the_newest() -> None:
    kept = KeptBytes(budget_bytes=2 * MB)
    share(kept, 1)
    second = share(kept, 2)
    third = share(kept, 3, complete=False)
    assert kept.keys() == [second, third]
    with pytest.raises(CheckpointError, match="0 B of them could go"):
        share(kept, 4)
    assert kept.keys() == [second, third]


def test_what_a_fenced_writer_left_unfinished_makes_room() -> None:
    kept = KeptBytes(budget_bytes=2 * MB)
    first = share(kept, 1)
    share(kept, 2, complete=False)
    third = share(kept, 3, generation=2, complete=False)
    assert kept.keys() == [first, third]


def test_a_share_is_complete_only_with_the_very_bytes_that_are_kept() -> None:
    kept = KeptBytes(budget_bytes=10 * MB)
    share(kept, 1, complete=False)
    for files in ({"__0_0.distcp": "00"}, {"other": "00"}, {}):
        with pytest.raises(Incomplete):
            kept.complete("s1-a1", rank=0, files=files, generation=1)
    assert kept.complete_ranks("s1-a1") == []
    share(kept, 1)
    assert kept.complete_ranks("s1-a1") == [0]
    share(kept, 1, complete=False)  # its bytes change: it must be said again
    assert kept.complete_ranks("s1-a1") == []
