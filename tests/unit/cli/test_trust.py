"""What the end of a run says about its last checkpoint: no more than the ledger knows."""

from __future__ import annotations

import pytest

from surefoot.cli.trust import how_far_trusted
from surefoot.core.records import CheckpointRef, Rung


@pytest.mark.parametrize(
    ("rung", "read_back", "damaged", "word", "verb"),
    [
        (Rung.COMMITTED, False, False, "committed: ", "verify"),
        (Rung.COMMITTED, True, False, "read back: ", "prove"),
        (Rung.LOADABLE, False, False, "loadable: ", "prove"),
        (Rung.LOADABLE, True, False, "loadable: ", "prove"),
        (Rung.PROVEN, True, False, "proven: ", "verify"),
        (Rung.COMMITTED, True, True, "damaged, ", "verify"),
        (Rung.PROVEN, True, True, "damaged, ", "verify"),
    ],
)
def test_the_most_that_is_known_and_the_command_that_goes_further(rung: Rung, read_back: bool, damaged: bool, word: str, verb: str) -> None:
    ref = CheckpointRef("s10-a1", 10, 1, None, "sf1:0", 100, rung=rung, read_back=read_back, damaged=damaged)
    line = how_far_trusted(ref, command="surefoot", run="runs/short")
    assert line.startswith(f"s10-a1 is {word}")
    assert f"`surefoot checkpoint {verb} runs/short`" in line
    assert "\n" not in line
