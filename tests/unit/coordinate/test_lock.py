from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from surefoot.coordinate.lock import RunLock
from surefoot.core import strict_json
from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.errors import ConfigError, PeerLost, SurefootError
from surefoot.core.holder import Holder, LockRecord, parse_lock, this_process

ELSEWHERE = Holder(host="elsewhere", boot_id="b", pid=77, pid_start_time=5, pid_namespace=1)


@dataclass
class BusyClock(ManualClock):
    """A clock during whose sleeps something else happens."""

    meanwhile: Callable[[], None] = field(default=lambda: None)

    def sleep(self, duration_s: float) -> None:
        super().sleep(duration_s)
        self.meanwhile()


def acquire(run_dir: Path, *, clock: ManualClock | None = None, job: str = "a", holder: Holder | None = None) -> RunLock:
    return RunLock.acquire(run_dir, job=job, clock=clock or ManualClock(), lease_s=30.0, holder=holder)


def leave_lock(run_dir: Path, holder: Holder, *, clock: ManualClock | None = None) -> LockRecord:
    record = LockRecord("old", holder, 4, (clock or ManualClock()).utc(), 30.0)
    (run_dir / "lock").write_text(strict_json.dumps(record.as_json()))
    return record


def dead_holder() -> Holder:
    here = this_process()
    return replace(here, pid_start_time=here.pid_start_time + 1)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_the_lock_names_its_owner_and_is_gone_after_release(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path, job="j1", clock=ManualClock(), lease_s=30.0, generation=2)
    raw = json.loads((tmp_path / "lock").read_text())
    assert (raw["job"], raw["host"], raw["pid"], raw["generation"]) == ("j1", os.uname().nodename, os.getpid(), 2)
    assert {"boot_id", "pid_start_time", "renewed_at"} <= set(raw)
    assert lock.taken_over is None
    lock.release()
    assert names(tmp_path) == []


def test_a_second_job_is_refused_with_host_and_pid(tmp_path: Path) -> None:
    with acquire(tmp_path):
        with pytest.raises(ConfigError, match=rf"live: process {os.getpid()} on host {os.uname().nodename}") as caught:
            acquire(tmp_path, job="b", clock=ManualClock(now_s=1e6))
        assert (caught.value.exit_code, caught.value.values["pid"]) == (2, os.getpid())
        assert names(tmp_path) == ["lock"]
    acquire(tmp_path, job="b").release()


def test_a_dead_process_is_taken_over_at_once(tmp_path: Path) -> None:
    old = leave_lock(tmp_path, dead_holder())
    clock = ManualClock()
    lock = acquire(tmp_path, clock=clock)
    assert clock.now_s == 0.0
    assert lock.taken_over is not None
    assert (lock.taken_over.record, lock.taken_over.former["job"]) == (old, "old")
    assert "is gone" in lock.taken_over.reason
    assert names(tmp_path) == ["lock"]


@pytest.mark.parametrize(
    ("holder", "why"),
    [
        (ELSEWHERE, "cannot be seen from here"),
        (replace(this_process(), boot_id="before"), "this host was restarted, or another one has its name"),
        (replace(this_process(), pid_namespace=1), "in another container"),
    ],
)
def test_a_silent_owner_that_cannot_be_seen_is_taken_over_after_lease_and_fence_time(
    tmp_path: Path, holder: Holder, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_lock(tmp_path, holder)
    clock = ManualClock(now_s=20.0)
    lock = acquire(tmp_path, clock=clock)
    assert clock.now_s == pytest.approx(80.5)
    assert lock.taken_over is not None
    assert "its lease is 30 s" in lock.taken_over.reason
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert why in said
    assert "two leases, 60 s" in said


@pytest.mark.parametrize("ahead_s", [-1e6, -61.0, 61.0, 1e6])
def test_clocks_that_differ_change_nothing(tmp_path: Path, ahead_s: float) -> None:
    """Ours is ahead of the owner's by so much, as hosts' clocks are: only what we have watched ourselves counts."""
    leave_lock(tmp_path, ELSEWHERE, clock=ManualClock(now_s=1e6))
    clock = ManualClock(now_s=1e6 + ahead_s)
    acquire(tmp_path, clock=clock)
    assert clock.now_s - (1e6 + ahead_s) == pytest.approx(60.5)


@pytest.mark.parametrize("holder", [ELSEWHERE, replace(this_process(), boot_id="of a machine of the same name")])
@pytest.mark.parametrize("ahead_s", [0.0, 61.0])
def test_an_owner_elsewhere_that_renews_is_live(tmp_path: Path, holder: Holder, ahead_s: float) -> None:
    """However far our clock is ahead of its own."""
    theirs_clock, clock = ManualClock(), BusyClock(now_s=ahead_s)
    theirs = acquire(tmp_path, clock=theirs_clock, job="theirs", holder=holder)

    def go_on() -> None:
        theirs_clock.sleep(0.5)
        theirs.renew()

    clock.meanwhile = go_on
    with pytest.raises(ConfigError, match=f"process {holder.pid} on host {holder.host}"):
        acquire(tmp_path, clock=clock)
    assert clock.now_s - ahead_s < 10.0


def test_an_owner_elsewhere_that_leaves_is_not_taken_over(tmp_path: Path) -> None:
    clock = BusyClock()
    theirs = acquire(tmp_path, clock=clock, job="theirs", holder=ELSEWHERE)
    clock.meanwhile = theirs.release
    mine = acquire(tmp_path, clock=clock)
    assert mine.taken_over is None


def test_another_job_that_was_faster_is_live(tmp_path: Path) -> None:
    clock = BusyClock(now_s=20.0)
    leave_lock(tmp_path, ELSEWHERE)

    def overtake() -> None:
        if 60.0 < clock.now_s < 61.0:
            leave_lock(tmp_path, replace(ELSEWHERE, host="third"), clock=clock)

    clock.meanwhile = overtake
    with pytest.raises(ConfigError, match="on host third"):
        acquire(tmp_path, clock=clock)


def test_an_unreadable_lock_is_taken_over_after_the_wait(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("{")
    clock = ManualClock()
    lock = acquire(tmp_path, clock=clock)
    assert clock.now_s == pytest.approx(60.5)
    assert lock.taken_over is not None
    assert lock.taken_over.former == {}


def test_renewing_moves_the_time_but_only_a_few_times_per_lease(tmp_path: Path) -> None:
    clock = ManualClock()
    lock = acquire(tmp_path, clock=clock)
    seen = set()
    for _ in range(60):
        clock.sleep(1.0)
        lock.renew()
        seen.add((tmp_path / "lock").read_text())
    assert 10 <= len(seen) <= 13
    lock.renew(generation=9)
    record = parse_lock((tmp_path / "lock").read_bytes())
    assert record is not None
    assert (record.generation, record.renewed_at) == (9, clock.utc())
    assert names(tmp_path) == ["lock"]


def test_an_owner_that_was_thought_dead_learns_it_when_it_renews(tmp_path: Path) -> None:
    clock = ManualClock()
    old = acquire(tmp_path, clock=clock, job="old", holder=ELSEWHERE)
    clock.sleep(61.0)
    new = acquire(tmp_path, clock=clock, job="new")
    with pytest.raises(PeerLost, match=r"no longer ours.*job new") as caught:
        old.renew()
    assert caught.value.exit_code == 75
    old.release()
    assert parse_lock((tmp_path / "lock").read_bytes()) == new.record


def test_a_lock_that_was_deleted_is_no_longer_ours(tmp_path: Path) -> None:
    clock = ManualClock()
    lock = acquire(tmp_path, clock=clock)
    (tmp_path / "lock").unlink()
    clock.sleep(10.0)
    with pytest.raises(PeerLost, match="no longer ours"):
        lock.renew()


def test_what_a_killed_process_left_of_a_swap_is_tidied_up(tmp_path: Path) -> None:
    dead = dead_holder()
    claim = json.dumps([dead.host, dead.boot_id, dead.pid, dead.pid_start_time, dead.pid_namespace])
    for name in ("lock.claim-free", "lock.claim-0123456789abcdef"):
        (tmp_path / name).write_text(claim)
    clock = ManualClock()
    acquire(tmp_path, clock=clock)
    assert clock.now_s == 0.0
    assert names(tmp_path) == ["lock"]


@pytest.mark.parametrize("claim", ["", json.dumps(["elsewhere", "b", 7, 8, 9])])
def test_a_claim_that_nobody_here_can_judge_holds_things_up_for_a_bounded_time(tmp_path: Path, claim: str) -> None:
    (tmp_path / "lock.claim-free").write_text(claim)
    clock = ManualClock()
    acquire(tmp_path, clock=clock)
    assert 10.0 <= clock.now_s <= 11.0


def test_a_lock_that_cannot_be_written_stays_ours(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    before = lock.record
    pid = os.fork()
    if pid == 0:
        # Not even the claim can be written: as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        lock.renew(generation=5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names(tmp_path) == ["lock"]
    assert parse_lock((tmp_path / "lock").read_bytes()) == before
    lock.renew(generation=5)
    assert lock.record.generation == 5


def test_a_missing_folder_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SurefootError, match="could not write the lock"):
        acquire(tmp_path / "gone")


RACER = """
import sys
from pathlib import Path
from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import SystemClock
from surefoot.core.errors import ConfigError
for line in sys.stdin:
    run_dir = Path(line.strip())
    while not (run_dir / "go").exists():
        pass
    try:
        lock = RunLock.acquire(run_dir, job=sys.argv[1], clock=SystemClock(), lease_s=30.0)
        print("won", flush=True)
    except ConfigError:
        print("refused", flush=True)
"""


@pytest.mark.parametrize("state", ["stale", "free", "stale with a dead claim"])
def test_of_two_processes_that_race_exactly_one_wins(tmp_path: Path, state: str) -> None:
    dead = dead_holder()
    claim = json.dumps([dead.host, dead.boot_id, dead.pid, dead.pid_start_time, dead.pid_namespace])
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, f"racer{number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    try:
        for number in range(20):
            run_dir = tmp_path / f"round{number}"
            run_dir.mkdir()
            if state != "free":
                leave_lock(run_dir, dead, clock=ManualClock(now_s=number))
            if "claim" in state:
                (run_dir / claim_name((run_dir / "lock").read_bytes())).write_text(claim)
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(f"{run_dir}\n")
                racer.stdin.flush()
            (run_dir / "go").touch()
            answers = []
            for racer in racers:
                assert racer.stdout is not None
                answers.append(racer.stdout.readline().strip())
            assert sorted(answers) == ["refused", "won"]
            winner = parse_lock((run_dir / "lock").read_bytes())
            assert winner is not None
            assert winner.job == f"racer{answers.index('won')}"
            assert names(run_dir) == ["go", "lock"]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def claim_name(content: bytes) -> str:
    return f"lock.claim-{hashlib.sha256(content).hexdigest()[:16]}"


def test_a_killed_owner_is_taken_over_by_the_next_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from surefoot.coordinate.lock import RunLock; from surefoot.core.clock import SystemClock\n"
    )
    script += "RunLock.acquire(Path(sys.argv[1]), job='a', clock=SystemClock(), lease_s=30.0); print('held', flush=True); sys.stdin.read()"
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {owner.pid}"):
        RunLock.acquire(tmp_path, job="b", clock=SystemClock(), lease_s=30.0)
    owner.kill()
    owner.communicate()
    lock = RunLock.acquire(tmp_path, job="b", clock=SystemClock(), lease_s=30.0)
    assert lock.taken_over is not None
    assert lock.taken_over.former["pid"] == owner.pid
