"""The control file: what people append to it, and what a run makes of whatever is in it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.core.clock import ManualClock, SystemClock
from surefoot.core.errors import ConfigError
from surefoot.observe.control import CONTROL_NAME, MAX_LINE_BYTES, ControlTail, NoOrder, Order, append_order, parse_order

CLOCK = ManualClock()


def order(verb: str = "save", *, reason: str = "", **fields: object) -> Order:
    return Order(verb, "ada@here", "job", CLOCK.utc(), reason, fields)


def tail(folder: Path) -> ControlTail:
    return ControlTail(folder, clock=CLOCK, look_every_s=0.0)


def add(folder: Path, text: bytes) -> None:
    with (folder / CONTROL_NAME).open("ab") as file:
        file.write(text)


def test_what_is_appended_is_seen_once_and_in_its_order(tmp_path: Path) -> None:
    look = tail(tmp_path)
    assert look.news() == []
    first, second = order(), order("pause", reason="ä\nb", limit_s=3.5)
    append_order(tmp_path, first, clock=CLOCK)
    assert look.news() == [first]
    append_order(tmp_path, second, clock=CLOCK)
    assert look.news() == [second]
    assert look.news() == []
    assert tail(tmp_path).news() == [first, second]


def test_it_looks_no_more_often_than_it_was_told(tmp_path: Path) -> None:
    clock = ManualClock()
    look = ControlTail(tmp_path, clock=clock, look_every_s=1.0)
    assert look.news() == []
    append_order(tmp_path, order(), clock=clock)
    clock.sleep(0.9)
    assert look.news() == []
    assert len(look.news(now=True)) == 1
    append_order(tmp_path, order(), clock=clock)
    clock.sleep(1.5)
    assert len(look.news()) == 1


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    look, before, after = tail(tmp_path), order(), order("stop")
    append_order(tmp_path, before, clock=CLOCK)
    add(tmp_path, b'{"version": 1, "verb": "st')
    assert look.news() == [before]
    append_order(tmp_path, after, clock=CLOCK)
    torn, told = look.news()
    assert isinstance(torn, NoOrder)
    assert torn.id.startswith("line-")
    assert "cut off" in torn.what
    assert told == after
    assert tail(tmp_path).news()[1] == torn  # the same bytes have the same id


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"verb": "halt"}, "there is no order 'halt', there are stop, save"),
        ({"version": 2}, "its version is 2, this release reads up to 1"),
        ({"version": True}, "its version is True"),
        ({"by": 7}, "by cannot be read"),
        ({"fields": []}, "its id or its fields cannot be read"),
    ],
)
def test_a_line_that_means_nothing_is_named_by_what_it_says_it_is(changed: dict[str, object], words: str) -> None:
    whole = {"version": 1, "verb": "save", "by": "ada@here", "job": "job", "time_utc": "", "reason": "", "fields": {}, "id": "x1"}
    assert isinstance(parse_order(json.dumps(whole).encode()), Order)
    told = parse_order(json.dumps(whole | changed).encode())
    assert isinstance(told, NoOrder)
    assert words in told.what
    assert told.id == "x1"


@pytest.mark.parametrize("line", [b"[1]", b"null", b"\xff\xfe", b"[" * 4000, b'{"version": NaN}', b"rm -rf"])
def test_what_somebody_else_wrote_is_no_order(line: bytes, tmp_path: Path) -> None:
    add(tmp_path, line + b"\n\n \n")
    (told,) = tail(tmp_path).news()
    assert isinstance(told, NoOrder)


def test_a_line_without_end_is_told_once_and_passed_over(tmp_path: Path) -> None:
    look, whole = tail(tmp_path), order()
    add(tmp_path, b"x" * (3 << 20))
    (told,) = look.news()
    assert isinstance(told, NoOrder)
    assert f"longer than {MAX_LINE_BYTES} bytes" in told.what
    assert [look.news() for _ in range(3)] == [[], [], []]
    add(tmp_path, b"y\n")
    append_order(tmp_path, whole, clock=CLOCK)
    assert look.news() == [whole]


def test_a_line_that_is_not_finished_yet_is_left_for_later(tmp_path: Path) -> None:
    look, whole = tail(tmp_path), order()
    append_order(tmp_path, whole, clock=CLOCK)
    line = (tmp_path / CONTROL_NAME).read_bytes()
    (tmp_path / CONTROL_NAME).write_bytes(line[:20])
    assert look.news() == []
    add(tmp_path, line[20:])
    assert look.news() == [whole]


def test_a_file_that_was_put_in_its_place_is_read_anew(tmp_path: Path) -> None:
    look, first, second = tail(tmp_path), order(reason="long " * 9), order()
    append_order(tmp_path, first, clock=CLOCK)
    assert look.news() == [first]
    (tmp_path / CONTROL_NAME).unlink()
    append_order(tmp_path, second, clock=CLOCK)
    assert look.news() == [second]


def test_what_takes_more_than_a_line_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes 5\d+ bytes, a line of the control file at most 4096"):
        append_order(tmp_path, order(reason="x" * 5000), clock=CLOCK)
    assert not (tmp_path / CONTROL_NAME).exists()


def test_what_is_no_file_takes_no_order_and_stops_no_look(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / CONTROL_NAME)
    with pytest.raises(ConfigError, match="it is no file"):
        append_order(tmp_path, order(), clock=CLOCK)
    assert tail(tmp_path).news() == []


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_who_may_write_into_the_folder_may_give_orders(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    append_order(tmp_path, order(), clock=CLOCK)
    made = (tmp_path / CONTROL_NAME).stat()
    assert stat.S_IMODE(made.st_mode) & 0o022 == mode & 0o022
    assert not made.st_mode & 0o111


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the order cannot be written: No such file"):
        append_order(tmp_path / "absent", order(), clock=CLOCK)


_WRITER = """
import sys
from pathlib import Path
from surefoot.core.clock import SystemClock
from surefoot.observe.control import Order, append_order
for number in range(40):
    append_order(Path(sys.argv[1]), Order("save", sys.argv[2], "job", "", "r" * (37 * number), {}), clock=SystemClock())
"""


def test_orders_of_several_processes_at_once_all_arrive_whole(tmp_path: Path) -> None:
    who = ("ada", "bob", "eve")
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), name]) for name in who]
    look, seen = ControlTail(tmp_path, clock=SystemClock(), look_every_s=0.0), []
    while any(writer.poll() is None for writer in writers):
        seen += look.news()
    seen += look.news()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert all(isinstance(found, Order) for found in seen)
    for name in who:
        assert [len(found.reason) for found in seen if isinstance(found, Order) and found.by == name] == [37 * n for n in range(40)]
