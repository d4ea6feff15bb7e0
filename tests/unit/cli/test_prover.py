"""Which load the prover has done next: a pure decision over the lineage."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from surefoot.cli.prover import OTHER_TOPOLOGY_EVERY, Prover, Task, next_task
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, Rung
from surefoot.observe.ledger import Ledger, read_ledger
from surefoot.observe.lineage import Lineage

Tried = Counter[tuple[str, bool]]


def ref(step: int, rung: Rung = Rung.COMMITTED) -> CheckpointRef:
    return CheckpointRef(f"s{step}-a1", step, 1, None, "sf1:0", 100, rung=rung)


def lineage(*refs: CheckpointRef, retired: Sequence[str] = (), off_line: Sequence[str] = ()) -> Lineage:
    return Lineage(refs=refs, line=tuple(ref.id for ref in refs if ref.id not in off_line), retired=frozenset(retired))


def test_nothing_is_committed() -> None:
    assert next_task(lineage(), tried=Tried()) is None


def test_the_newest_comes_first_then_those_before_it() -> None:
    refs = [ref(10), ref(20), ref(30)]
    assert next_task(lineage(*refs), tried=Tried()) == Task(refs[2])
    refs[2] = replace(refs[2], rung=Rung.LOADABLE)
    assert next_task(lineage(*refs), tried=Tried()) == Task(refs[1])
    assert next_task(lineage(*refs, retired=["s20-a1"]), tried=Tried()) == Task(refs[0])


@pytest.mark.parametrize("rung", [Rung.LOADABLE, Rung.PROVEN])
def test_what_somebody_loaded_is_not_loaded_again(rung: Rung) -> None:
    refs = [ref(10, Rung.PROVEN), ref(20, rung)]
    assert next_task(lineage(*refs), tried=Tried()) is None


def test_what_is_damaged_is_left_alone() -> None:
    bad = replace(ref(20), damaged=True)
    assert next_task(lineage(ref(10, Rung.PROVEN), bad), tried=Tried()) is None
    assert next_task(lineage(bad), tried=Tried()) is None


def test_another_topology_is_due_when_none_was_proven_yet() -> None:
    refs = [ref(10, Rung.LOADABLE), ref(20, Rung.LOADABLE)]
    assert next_task(lineage(*refs), tried=Tried()) == Task(refs[1], turn=0)


@pytest.mark.parametrize("is_due", [False, True])
def test_another_topology_is_due_every_few_commits(is_due: bool) -> None:
    num_since = OTHER_TOPOLOGY_EVERY if is_due else OTHER_TOPOLOGY_EVERY - 1
    refs = [ref(10, Rung.PROVEN), *(ref(20 + index, Rung.LOADABLE) for index in range(num_since))]
    task = next_task(lineage(*refs), tried=Tried())
    assert task == (Task(refs[-1], turn=1) if is_due else None)


def test_a_proof_counts_after_it_was_retired() -> None:
    refs = [ref(10, Rung.PROVEN), ref(20, Rung.LOADABLE)]
    assert next_task(lineage(*refs, retired=["s10-a1"]), tried=Tried()) is None


def test_a_load_that_comes_to_nothing_is_tried_twice() -> None:
    one = lineage(ref(10), ref(20))
    assert next_task(one, tried=Tried({("s20-a1", False): 1})) == Task(ref(20))
    assert next_task(one, tried=Tried({("s20-a1", False): 2})) == Task(ref(10))
    loaded = lineage(ref(10, Rung.LOADABLE))
    assert next_task(loaded, tried=Tried({("s10-a1", True): 2})) is None


def test_a_branch_given_up_is_nobodys_to_load() -> None:
    assert next_task(lineage(ref(10, Rung.PROVEN), ref(20), off_line=["s20-a1"]), tried=Tried()) is None


def test_at_the_end_only_the_newest_is_waited_for() -> None:
    refs = [ref(10), ref(20)]
    assert next_task(lineage(*refs), tried=Tried(), only_newest=True) == Task(refs[1])
    assert next_task(lineage(refs[0], ref(20, Rung.LOADABLE)), tried=Tried(), only_newest=True) is None


# --- what the log says ---


def loaders() -> list[psutil.Process]:
    """Clean processes that this one has started to load a checkpoint."""
    living = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in living if "surefoot.checkpoint.prove_rank" in child.cmdline()]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_retired", [True, False])
def test_a_retirement_is_one_quiet_line_and_any_other_loss_a_warning_without_absolute_paths(
    is_retired: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint goes while a clean process that is to load it is still importing torch."""
    caplog.set_level(logging.INFO)
    ledger = Ledger(tmp_path / "ledger.jsonl", clock=SystemClock(), by="test")
    fields = {"id": "s10-a1", "step": 10, "attempt": 1, "parent": None, "state_digest": "sf1:0", "num_bytes": 1}
    ledger.append(Event.CHECKPOINT_COMMITTED, generation=1, attempt=1, step=10, fields=fields)
    folder = tmp_path / "checkpoints" / "s10-a1"
    folder.mkdir(parents=True)
    looking = threading.Thread(target=Prover(tmp_path).look)
    looking.start()
    give_up_s = time.monotonic() + 60.0
    while not loaders():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    if is_retired:
        ledger.append(Event.CHECKPOINT_RETIRED, generation=1, attempt=1, step=20, fields={"id": "s10-a1"})
    folder.rmdir()
    looking.join()
    (said,) = caplog.records
    assert said.getMessage().startswith("checkpoint s10-a1 was retired" if is_retired else "checkpoint s10-a1: checkpoints/s10-a1: ")
    assert said.levelno == (logging.INFO if is_retired else logging.WARNING)
    assert str(tmp_path) not in said.getMessage()
    assert not [entry for entry in read_ledger(ledger.path) if entry.event == Event.CHECKPOINT_DAMAGED]
