from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core import strict_json
from surefoot.core.holder import Holder, LockRecord, is_alive, parse_lock, this_process


def holder_of(pid: int) -> Holder:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return replace(this_process(), pid=pid, pid_start_time=int(stat[stat.rindex(")") + 2 :].split()[19]))


def test_this_process_is_alive() -> None:
    assert is_alive(this_process(), seen_from=this_process()) is True


def test_a_process_is_dead_as_soon_as_it_has_ended_even_before_its_parent_looked() -> None:
    child = subprocess.Popen(["sleep", "60"])
    holder = holder_of(child.pid)
    assert is_alive(holder, seen_from=this_process()) is True
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        pass
    assert is_alive(holder, seen_from=this_process()) is False
    child.wait()
    assert is_alive(holder, seen_from=this_process()) is False


def test_another_process_with_the_same_pid_is_not_the_holder() -> None:
    here = this_process()
    assert is_alive(replace(here, pid_start_time=here.pid_start_time - 1), seen_from=here) is False


@pytest.mark.parametrize(
    "where", [{"host": "elsewhere"}, {"host": "elsewhere", "boot_id": "another"}, {"boot_id": "another"}, {"pid_namespace": 1}]
)
def test_what_cannot_be_seen_from_here_is_unknown(where: dict[str, object]) -> None:
    here = this_process()
    assert is_alive(replace(here, **where), seen_from=here) is None  # type: ignore[arg-type]  # values are given by name


def test_a_lock_record_reads_back() -> None:
    record = LockRecord("job", this_process(), 3, "2026-01-01T00:00:00.000Z", 30.0)
    assert parse_lock(strict_json.dumps(record.as_json()).encode()) == record
    assert record.age_s("2026-01-01T00:00:10.500Z") == pytest.approx(10.5)
    assert record.age_s("2025-12-31T00:00:00.000Z") == 0.0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b"null"])
def test_what_is_no_lock_record_is_none(content: bytes) -> None:
    assert parse_lock(content) is None


def test_a_lock_record_with_a_broken_time_is_none() -> None:
    record = LockRecord("job", this_process(), 3, "yesterday", 30.0)
    assert parse_lock(strict_json.dumps(record.as_json()).encode()) is None
