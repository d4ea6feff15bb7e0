"""Log files stay small while their writers go on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.launch.logs import nursery_log, open_generation, rank_paths
from surefoot.launch.trim import LogTrimmer, trim


def test_a_small_file_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 100)
    assert not trim(log, max_bytes=100)
    assert not trim(tmp_path / "none", max_bytes=100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def test_a_writer_goes_on_at_the_new_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # as a rank opens it
    os.write(fd, b"old" + b"x" * 100)
    assert trim(log, max_bytes=100)
    assert (tmp_path / "log.1").read_bytes() == b"x" * 100
    os.write(fd, b"new")
    os.close(fd)
    assert log.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_there_is_one_older_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for letter in (b"a", b"b"):
        log.write_bytes(letter * 101)
        assert trim(log, max_bytes=100)
    assert (tmp_path / "log.1").read_bytes() == b"b" * 100
    assert log.read_bytes() == b""


def test_a_part_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 101)
    (tmp_path / ".log.1.tmp").mkdir()  # as good as a full disk
    with pytest.raises(OSError, match="directory"):
        trim(log, max_bytes=100)
    assert log.read_bytes() == b"x" * 101


def test_the_files_of_the_generation_and_of_the_nursery_are_trimmed(tmp_path: Path) -> None:
    open_generation(tmp_path, 4, keep=1)
    logs = [*rank_paths(tmp_path, 4, 0)[:2], *rank_paths(tmp_path, 4, 1)[:2], nursery_log(tmp_path)]
    trimmer = LogTrimmer(tmp_path, max_bytes=100, interval_s=0.01)
    trimmer.follow(4)
    for log in logs:
        log.write_bytes(b"x" * 1000)
    until(lambda: all(log.stat().st_size == 0 for log in logs))
    trimmer.close()
    assert all(log.with_name(f"{log.name}.1").stat().st_size == 100 for log in logs)


def test_trouble_is_said_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_generation(tmp_path, 1, keep=1)
    log, in_the_way = nursery_log(tmp_path), tmp_path / "logs" / ".nursery.log.1.tmp"
    in_the_way.mkdir()
    log.write_bytes(b"x" * 1000)
    with caplog.at_level(logging.WARNING):
        trimmer = LogTrimmer(tmp_path, max_bytes=100, interval_s=0.01)
        until(lambda: "goes on growing" in caplog.text)
        in_the_way.rmdir()
        until(lambda: log.stat().st_size == 0)
        trimmer.close()
    assert caplog.text.count("goes on growing") == 1


def until(look: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30.0
    while not look():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
