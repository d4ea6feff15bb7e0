from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core import strict_json
from surefoot.core.clock import ManualClock
from surefoot.core.holder import LockRecord, this_process
from surefoot.observe.live import LiveRecord, RankLive, is_held, read_live, read_lock, write_live

RECORD = LiveRecord(
    pid=10,
    host="h",
    generation=2,
    attempt=3,
    phase="step",
    step=40,
    ranks=(RankLive(rank=0, pid=11, phase="step", step=40, age_s=0.25), RankLive(rank=1, pid=12, phase="save", step=39, age_s=1.0)),
    updated_utc="2026-01-01T00:00:00.000Z",
    num_restarts=1,
)


def lock_record(**given: object) -> LockRecord:
    clock = ManualClock()
    values: dict[str, object] = {"job": "j", "holder": this_process(), "generation": 1, "renewed_at": clock.utc(), "lease_s": 30.0}
    return LockRecord(**{**values, **given})  # type: ignore[arg-type]  # values are given by name


def test_a_record_reads_back(tmp_path: Path) -> None:
    write_live(tmp_path, RECORD)
    assert read_live(tmp_path) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["live.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"format_version": 2}', b'{"format_version": 1, "pid": "x"}', b"\xff\xfe"])
def test_a_damaged_record_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "live.json").write_bytes(content)
    assert read_live(tmp_path) is None


def test_a_missing_record_is_none(tmp_path: Path) -> None:
    assert read_live(tmp_path) is None
    assert read_lock(tmp_path) is None


def test_the_lock_reads_back(tmp_path: Path) -> None:
    record = lock_record()
    (tmp_path / "lock").write_text(strict_json.dumps(record.as_json()))
    assert read_lock(tmp_path) == record


def test_a_lock_of_a_live_process_is_held_however_old() -> None:
    assert is_held(lock_record(), clock=ManualClock(now_s=1e6))


def test_a_lock_of_a_dead_process_is_not_held() -> None:
    here = this_process()
    assert not is_held(lock_record(holder=replace(here, pid_start_time=here.pid_start_time + 1)), clock=ManualClock())


def test_a_lock_of_another_host_is_held_for_its_lease() -> None:
    record = lock_record(holder=replace(this_process(), host="elsewhere"))
    assert is_held(record, clock=ManualClock(now_s=30.0))
    assert not is_held(record, clock=ManualClock(now_s=30.5))


def test_no_lock_is_not_held() -> None:
    assert not is_held(None, clock=ManualClock())
    assert os.getpid() == this_process().pid
