"""Logs: kept generations, last lines, and an echo that neither loses a line nor blocks anybody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.launch.logs import Echo, generation_logs, last_lines, logging_aside, open_generation, rank_paths
from surefoot.launch.trim import trim


def test_only_the_last_generations_are_kept(tmp_path: Path) -> None:
    for generation in range(1, 13):
        open_generation(tmp_path, generation, keep=10)
        rank_paths(tmp_path, generation, 0)[0].write_text("x")
    (tmp_path / "logs" / "notes").mkdir()
    open_generation(tmp_path, 13, keep=10)
    assert not generation_logs(tmp_path, 3).exists()
    assert generation_logs(tmp_path, 4).exists()
    assert (tmp_path / "logs" / "notes").exists()


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(path) == []
    path.write_bytes(b"old\n" * 10_000 + b"one\n\xfftwo\n")
    assert last_lines(path, num_lines=2) == ["one", "\ufffdtwo"]


def test_echo_follows_files_in_order(tmp_path: Path) -> None:
    lines: list[str] = []
    echo = Echo(lines.append)
    first, second = tmp_path / "first", tmp_path / "second"
    echo.follow(first)
    with first.open("a") as file:
        file.write("a\nb")
        file.flush()
        echo.catch_up(limit_s=10.0)
        assert lines == ["a"]
        file.write("c\nunfinished")
    echo.follow(second)
    second.write_text("d\n")
    echo.close(limit_s=10.0)
    assert lines == ["a", "bc", "unfinished", "d"]


def test_echo_goes_on_in_a_file_that_was_cut(tmp_path: Path) -> None:
    lines: list[str] = []
    echo = Echo(lines.append)
    log = tmp_path / "log"
    echo.follow(log)
    with log.open("a", buffering=1) as file:
        file.write("a\nb\nc")
        echo.catch_up(limit_s=10.0)
        assert trim(log, max_bytes=1)
        file.write("d\ne\n")
        echo.catch_up(limit_s=10.0)
    echo.close(limit_s=10.0)
    assert lines == ["a", "b", "cd", "e"]


def test_echo_keeps_no_endless_line(tmp_path: Path) -> None:
    lines: list[str] = []
    echo = Echo(lines.append)
    (tmp_path / "log").write_text("50% \r" * 20_000)
    echo.follow(tmp_path / "log")
    echo.catch_up(limit_s=10.0)
    echo.catch_up(limit_s=10.0)
    assert [len(line) for line in lines] == [100_000]
    echo.close(limit_s=10.0)


def test_echo_gives_up_when_the_console_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    echo = Echo(broken)
    (tmp_path / "log").write_text("a\n")
    with caplog.at_level(logging.WARNING):
        echo.follow(tmp_path / "log")
        echo.close(limit_s=10.0)
    assert "the console is gone" in caplog.text
    echo.catch_up(limit_s=1000.0)  # returns: nobody is left to wait for


def test_echo_does_not_wait_for_a_stuck_console(tmp_path: Path) -> None:
    unstick = threading.Event()
    echo = Echo(lambda _: _wait(unstick))
    (tmp_path / "log").write_text("a\n")
    echo.follow(tmp_path / "log")
    echo.catch_up(limit_s=0.05)
    echo.close(limit_s=0.05)
    unstick.set()
    echo.close(limit_s=10.0)


class StuckConsole(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.unstick = threading.Event()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.unstick.wait()
        self.written.append(record.getMessage())


@pytest.fixture
def stuck_console() -> Iterator[StuckConsole]:
    root = logging.getLogger()
    console = StuckConsole()
    root.addHandler(console)
    yield console
    root.removeHandler(console)
    console.unstick.set()


def test_who_logs_does_not_wait_for_a_stuck_console(stuck_console: StuckConsole) -> None:
    before = list(logging.getLogger().handlers)
    with logging_aside(limit_s=0.05):
        logging.getLogger("surefoot.launch").warning("restart %d", 1)
        assert stuck_console.written == []
    assert logging.getLogger().handlers == before


def test_what_was_logged_is_written_before_it_ends(stuck_console: StuckConsole) -> None:
    stuck_console.unstick.set()
    with logging_aside(limit_s=10.0):
        logging.getLogger("surefoot.launch").warning("restart %d", 1)
        logging.getLogger("surefoot.launch").warning("restart %d", 2)
    assert stuck_console.written == ["restart 1", "restart 2"]


def _wait(event: threading.Event) -> None:
    event.wait()
