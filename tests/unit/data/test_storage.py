from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError, DataError
from surefoot.data.object_storage import ObjectStorage, coalesced
from surefoot.data.storage import ByteRange, LocalStorage, is_remote, open_storage, read_file

DATA = bytes(range(256)) * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.tok").write_bytes(DATA)
    (tmp_path / "top").write_bytes(b"top")
    return tmp_path


def test_a_path_decides_what_is_read(folder: Path) -> None:
    for path in (folder, str(folder), f"file://{folder}", Path(f"file://{folder}")):
        assert read_file(path, "top") == b"top"
        assert not is_remote(path)
    for url in ("s3://bucket/prefix", "http://127.0.0.1:1/prefix", "https://host/prefix"):
        storage = open_storage(Path(url))
        assert isinstance(storage, ObjectStorage)
        assert storage.place == url
        assert is_remote(url)
        storage.close()


def test_ranges_are_what_stands_there(folder: Path) -> None:
    storage = LocalStorage(folder)
    wanted = [ByteRange("a/0.tok", 5, 7), ByteRange("top", 0, 3), ByteRange("a/0.tok", len(DATA) - 4, 100), ByteRange("top", 9, 2)]
    assert [bytes(data) for data in storage.ranges(wanted)] == [DATA[5:12], b"top", DATA[-4:], b""]
    assert storage.joined(wanted) == DATA[5:12] + b"top" + DATA[-4:]
    assert [storage.again(one) for one in wanted] == [DATA[5:12], b"top", DATA[-4:], b""]
    assert storage.num_bytes(["top", "a/0.tok"]) == [3, len(DATA)]
    assert list(storage.ranges([])) == []
    storage.close()


def test_what_is_missing_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="cannot open the folder") as caught:
        open_storage(folder / "absent")
    assert caught.value.values["kind"] == "missing"
    storage = LocalStorage(folder)
    for ask in (
        lambda: storage.read("a/1.tok"),
        lambda: storage.num_bytes(["top", "a/1.tok"]),
        lambda: list(storage.ranges([ByteRange("a/1.tok", 0, 1)])),
        lambda: storage.joined([ByteRange("a/1.tok", 0, 1)]),
        lambda: storage.again(ByteRange("a/1.tok", 0, 1)),
    ):
        with pytest.raises(DataError, match=r"a/1\.tok: cannot open 1\.tok: No such file") as caught:
            ask()
        assert caught.value.values["kind"] == "missing"
    storage.close()


def test_a_device_that_fails_is_a_short_read_and_then_an_error(folder: Path) -> None:
    (folder / "a" / "dir").mkdir()  # reading a folder is an error of the kernel
    storage = LocalStorage(folder)
    assert [bytes(data) for data in storage.ranges([ByteRange("a/dir", 0, 4)])] == [b""]
    assert storage.joined([ByteRange("a/dir", 0, 4)]) == b""
    with pytest.raises(DataError, match=r"a/dir: reading 4 bytes at 0 failed twice: Is a directory"):
        storage.again(ByteRange("a/dir", 0, 4))
    storage.close()


def test_a_second_fetch_asks_the_disk(folder: Path) -> None:
    """A page that lies in memory is not what a second fetch returns: it sees what another descriptor wrote past the cache."""
    path = folder / "a" / "0.tok"
    path.write_bytes(bytes(8192))
    storage = LocalStorage(folder)
    one = ByteRange("a/0.tok", 4096, 10)
    assert storage.again(one) == bytes(10)
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
    assert storage.again(one) == b"new" + bytes(7)
    storage.close()


class Ranged(SimpleHTTPRequestHandler):
    """A folder over HTTP, with ranges."""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        data, status = path.read_bytes(), 200
        if wanted := self.headers["Range"]:
            first, last = wanted.removeprefix("bytes=").split("-")
            span, data, status = f"bytes {first}-{last}/{len(data)}", data[int(first) : int(last) + 1], 206
            if not data:
                return self.send_error(416)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 206:
            self.send_header("Content-Range", span)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def http(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranged, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_ranges_over_http(http: str) -> None:
    storage = open_storage(http)
    wanted = [ByteRange("a/0.tok", 5, 7), ByteRange("a/0.tok", 20, 9), ByteRange("top", 0, 3)]
    assert [bytes(data) for data in storage.ranges(wanted)] == [DATA[5:12], DATA[20:29], b"top"]
    assert storage.joined(wanted) == DATA[5:12] + DATA[20:29] + b"top"
    assert storage.again(wanted[0]) == DATA[5:12]
    assert storage.num_bytes(["top", "a/0.tok"]) == [3, len(DATA)]
    assert storage.read("top") == b"top"
    with pytest.raises(DataError, match=r"nothing there: reading a/1\.tok") as caught:
        storage.read("a/1.tok")
    assert caught.value.values["kind"] == "missing"
    storage.close()


def test_bad_urls_are_refused_before_anything_is_asked() -> None:
    for url, match in {"s3://": "names no bucket", "s3://UP/x": "is no name of a bucket", "s3://key@bucket/x": "credentials"}.items():
        with pytest.raises(ConfigError, match=match) as caught:
            open_storage(url)
        assert "key@" not in str(caught.value)


def ranges(*spans: tuple[str, int, int]) -> list[ByteRange]:
    return [ByteRange(*span) for span in spans]


def test_neighbours_go_into_one_request() -> None:
    wanted = ranges(("a", 0, 10), ("a", 10, 10), ("a", 25, 5), ("a", 36, 4), ("b", 40, 1), ("b", 40, 1), ("b", 30, 1))
    groups = coalesced(wanted, gap_bytes=5, max_bytes=100)
    assert groups == [wanted[:3], wanted[3:4], wanted[4:6], wanted[6:]]
    assert [one for group in groups for one in group] == wanted


def test_a_request_is_bounded_and_a_range_never_cut() -> None:
    wanted = ranges(("a", 0, 60), ("a", 60, 60), ("a", 120, 200), ("a", 320, 1))
    assert coalesced(wanted, gap_bytes=5, max_bytes=120) == [wanted[:2], wanted[2:3], wanted[3:]]
    assert coalesced([], gap_bytes=5, max_bytes=120) == []
