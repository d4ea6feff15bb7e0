"""The agent's memory for the ranks: named, handed on, gone when closed."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from surefoot.core.errors import ConfigError
from surefoot.core.strict_json import loads
from surefoot.launch.slots import SlotMemory


def test_each_slot_of_each_rank_is_memory_of_its_own() -> None:
    memory = SlotMemory.create(num_ranks=2, num_slots=3)
    try:
        assert [(slot.rank, slot.number) for slot in memory.slots] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
        assert len({os.fstat(fd).st_ino for fd in memory.fds}) == 6
        assert {os.fstat(fd).st_size for fd in memory.fds} == {0}
        assert not any(os.get_inheritable(fd) for fd in memory.fds)
    finally:
        memory.close()
    for fd in memory.fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_ranks_and_children_learn_which_is_which() -> None:
    memory = SlotMemory.create(num_ranks=1, num_slots=2)
    try:
        table = loads(memory.rank_env()["SUREFOOT_SLOTS"])
        assert table == [[0, 0, "SUREFOOT_SLOT_0_0"], [0, 1, "SUREFOOT_SLOT_0_1"]]
        assert memory.rank_fds(first=3) == {"SUREFOOT_SLOT_0_0": 3, "SUREFOOT_SLOT_0_1": 4}
        child = memory.child_env()
        assert loads(child["SUREFOOT_SLOTS"]) == table
        assert tuple(int(child[variable]) for _, _, variable in table) == memory.fds
    finally:
        memory.close()


def test_more_than_can_be_handed_on_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="128 ranks with 2 slots each: one machine can hand on 250") as caught:
        SlotMemory.create(num_ranks=128, num_slots=2)
    assert caught.value.where == "[checkpoint] num_slots"


def test_a_slot_knows_its_variable() -> None:
    memory = SlotMemory.create(num_ranks=1, num_slots=1)
    (slot,) = memory.slots
    assert replace(slot, rank=12, number=3).variable == "SUREFOOT_SLOT_12_3"
    memory.close()
