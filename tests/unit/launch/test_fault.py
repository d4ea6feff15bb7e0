"""An ending in the words of the ledger, the parts of a recovery, and what the machine counted."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.coordinate.beats import Beat
from surefoot.coordinate.causes import Cause
from surefoot.coordinate.culprit import Culprit
from surefoot.coordinate.witness import Alarm
from surefoot.core.records import Phase
from surefoot.launch.ending import Ending
from surefoot.launch.fault import fault_of, loss_fields
from surefoot.launch.host_facts import HostWatch, num_oom_kills
from surefoot.launch.recovery_split import RecoverySplit, begin_split, detected_after_s
from surefoot.launch.wire import RankExit

KILLED = Ending(
    "failed",
    "rank 1 was killed by SIGKILL",
    what="rank",
    culprit=RankExit(1, 1, 100, None, signal.SIGKILL, 9.9),
    verdict=Culprit((1,), Cause.KILLED, "certain", "longer words", nodes=("here",)),
    detected_mono_s=10.0,
)


def test_a_plain_death_is_told_in_the_words_of_its_exit() -> None:
    fault = fault_of(KILLED, step=7, step_known=True)
    assert (fault.rank, fault.signal, fault.reason, fault.cause) == (1, signal.SIGKILL, "rank 1 was killed by SIGKILL", "killed")
    assert fault.nodes == ()  # its node is not lost
    fields = loss_fields(KILLED, fault)
    assert (fields["detected_s"], fields["ranks"], fields["nodes"], fields["confidence"]) == (0.1, [1], ["here"], "certain")


def test_where_the_verdict_knows_more_its_words_count() -> None:
    verdict = Culprit((1,), Cause.HOST_OOM, "certain", "the kernel killed rank 1", fingerprint="host-oom")
    fault = fault_of(replace(KILLED, verdict=verdict), step=7, step_known=False)
    assert (fault.reason, fault.fingerprint, fault.step_known) == ("the kernel killed rank 1", "host-oom", False)


def test_a_victims_exit_is_not_the_culprits() -> None:
    verdict = Culprit((2,), Cause.STOPPED, "certain", "rank 2 is stopped")
    fault = fault_of(replace(KILLED, verdict=verdict), step=7, step_known=True)
    assert (fault.rank, fault.signal, fault.reason) == (2, None, "rank 2 is stopped")


def test_a_lost_nursery_has_its_own_code_and_no_verdict() -> None:
    fault = fault_of(Ending("failed", "the nursery is gone", what="nursery", nursery_code=-9), step=0, step_known=False)
    assert (fault.what, fault.rank, fault.signal, fault.cause) == ("nursery", None, 9, "")
    assert "cause" not in loss_fields(Ending("failed", "the nursery is gone", what="nursery"), fault)


def test_a_silence_was_there_before_it_was_known() -> None:
    alarm = Alarm("silent", (1,), "quiet", 10.0, age_s=4.0)
    assert detected_after_s(replace(KILLED, alarm=alarm, culprit=None)) == 4.0
    assert begin_split(replace(KILLED, kind="left"), stopped_s=11.0) is None


def beat(rank: int, phase: Phase, step: int, at_s: float, *, restored: bool) -> Beat:
    return Beat(rank, 1, 2, phase, step, 0, 0, at_s, restored, 1)


def test_the_parts_of_a_recovery_follow_the_slowest_rank_and_add_up() -> None:
    split = begin_split(KILLED, stopped_s=10.5)
    assert split is not None
    assert not split.take([beat(0, Phase.START, 0, 10.6, restored=False), beat(1, Phase.RESTORE, 0, 11.0, restored=False)])
    assert not split.take([beat(0, Phase.RESTORE, 0, 11.5, restored=False), beat(1, Phase.RESTORE, 5, 12.0, restored=True)])
    assert not split.take([beat(0, Phase.STEP, 5, 12.5, restored=True), beat(1, Phase.STEP, 5, 12.4, restored=True)])
    assert split.take([beat(0, Phase.STEP, 6, 13.0, restored=True), beat(1, Phase.STEP, 5, 12.4, restored=True)])
    assert split.as_json() == pytest.approx(
        {"detect_s": 0.1, "stop_s": 0.5, "rendezvous_s": 1.0, "load_s": 1.0, "verify_s": 0.0, "first_step_s": 0.5, "total_s": 3.1}
    )


def test_a_recovery_is_not_over_before_a_step_is_done() -> None:
    split = RecoverySplit(0.0, 0.1, 0.2)
    assert not any(split.take([beat(0, Phase.STEP, 5, at_s, restored=True)]) for at_s in (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("groups", "path", "text"),
    [
        ("0::/job", "cgroup/job/memory.events", "max 0\noom 3\noom_kill 2\n"),
        ("5:memory:/job\n1:cpu:/job", "cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ("0::/elsewhere", "proc/vmstat", "pgfault 9\noom_kill 2\n"),
    ],
)
def test_kills_for_lack_of_memory_are_counted_by_the_own_group_or_the_machine(tmp_path: Path, groups: str, path: str, text: str) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert num_oom_kills(cgroups=tmp_path / "cgroup", proc=tmp_path / "proc") == 2
    (tmp_path / path).unlink()
    assert num_oom_kills(cgroups=tmp_path / "cgroup", proc=tmp_path / "proc") == 0


def test_what_came_before_explains_nothing() -> None:
    facts = HostWatch().facts(asked_to_leave=True)
    assert (facts.num_oom_kills, facts.oom_pids, facts.xids, facts.asked_to_leave) == (0, frozenset(), (), True)
