"""Keepers as real processes: what one node's ranks saved is still there when all processes of that node are gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import nn

from surefoot.checkpoint.keeper_client import KeeperClient, KeeperSource, fetch_from_keepers, give_share
from surefoot.checkpoint.keeper_wire import MIN_TOKEN_BYTES, TOKEN_ENV, TOKEN_FILE_ENV, run_token, write_token
from surefoot.checkpoint.kept import kept_key
from surefoot.checkpoint.manifest import checksum_bytes
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.sources import check_bytes
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, ConfigError, Incomplete, PeerLost
from surefoot.core.records import ManifestFile
from surefoot.tensors.world import single_world

HERE = Path(__file__).parent
RUN = "drill"
TOKEN = b"a token that only this run knows"
LIMIT_S = 90.0
MB = 1 << 20

Start = Callable[..., tuple[subprocess.Popen[bytes], KeeperClient]]


@pytest.fixture
def start_keeper(tmp_path: Path) -> Iterator[Start]:
    """start_keeper(budget_bytes=...) -> its process, and a client of generation 1."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*, budget_bytes: int = 64 * MB) -> tuple[subprocess.Popen[bytes], KeeperClient]:
        log = tmp_path / f"keeper-{len(started)}.log"
        with log.open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "toy_keeper.py"), RUN, str(budget_bytes)],
                env={**os.environ, TOKEN_ENV: TOKEN.decode()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
            )
        started.append(process)
        port = int(first_line(process.stdout, what=log.read_text))
        return process, KeeperClient("127.0.0.1", port, run=RUN, token=TOKEN, generation=1)

    yield start
    for process in started:
        end(process)


def first_line(stream: IO[bytes] | None, *, what: Callable[[], str]) -> str:
    assert stream is not None
    line = stream.readline().decode().strip()
    assert line, what()
    return line


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def test_the_state_of_a_dead_node_is_restored_from_the_keeper_of_another(start_keeper: Start, tmp_path: Path) -> None:
    keeper_a, client_a = start_keeper()
    _, client_b = start_keeper()
    root = tmp_path / "checkpoints"
    draft = {"format_version": 1, "id": "s10-a1", "run": RUN, "step": 10, "attempt": 1, "generation": 1, "parent": None}
    draft |= {"time_utc": "2026-01-01T00:00:00.000Z", "loss": 2.5, "tokens": 1000, "state_digest": "", "config_hashes": {}, "data_hash": ""}
    draft |= {"code_version": "0", "topology": {}, "environment": {}, "ledger_seq": 4, "ledger_hash": "", "cursor": {}, "hash": ""}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    nodes: list[subprocess.Popen[bytes]] = []
    logs = [tmp_path / f"node-{rank}.log" for rank in range(2)]
    # Rank 0 lives on node A, rank 1 on node B. Each gives its share to the other's keeper, and rank 1 to its own: that is B's memory tier.
    for rank, keepers in ((0, [client_b.port]), (1, [client_a.port, client_b.port])):
        wishes = {"root": str(root), "draft": draft, "keepers": keepers, "run": RUN}
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with logs[rank].open("wb") as err:
            nodes.append(
                subprocess.Popen(
                    [sys.executable, str(HERE / "toy_node.py"), json.dumps(wishes)],
                    env={**os.environ, **place, TOKEN_ENV: TOKEN.decode(), "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=err,
                )
            )
    try:
        digests = [first_line(node.stdout, what=log.read_text) for node, log in zip(nodes, logs, strict=True)]
        assert digests[0] == digests[1]
        for process in (nodes[0], keeper_a):  # all of node A
            process.send_signal(signal.SIGKILL)
            process.wait()
        shutil.rmtree(root)

        assert client_b.complete_ranks("s10-a1") == [0, 1]
        back = fetch_from_keepers([client_a, client_b], "s10-a1", into=tmp_path / "back")
    finally:
        for node in nodes:
            end(node)
    assert verify(back) == []
    torch.manual_seed(99)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    load(back, state=collect(model, optimizer), world=single_world(), expected_state_digest=digests[0])


def test_the_files_of_a_keeper_are_one_more_source_of_a_restore(start_keeper: Start) -> None:
    _, keeper = start_keeper()
    data = os.urandom(3 * MB)
    give_share(keeper, "s1-a1", rank=3, files={"__3_0.distcp": memoryview(data)})
    source = KeeperSource(keeper, "s1-a1")
    file = ManifestFile(name="__3_0.distcp", num_bytes=len(data), xxh3_128=checksum_bytes(data))
    assert source.name == f"keeper 127.0.0.1:{keeper.port}"
    assert source.has(file)
    assert check_bytes(file, source) is None
    assert not source.has(replace(file, xxh3_128="00"))
    assert not KeeperSource(keeper, "s2-a1").has(file)


def test_put_get_list_drop_over_the_wire(start_keeper: Start) -> None:
    _, keeper = start_keeper()
    data = os.urandom(5 * MB + 7)
    keeper.put("key", memoryview(data))
    keeper.put("empty", memoryview(b""))
    assert bytes(keeper.get("key")) == data
    assert bytes(keeper.get("empty")) == b""
    part = bytearray(1000)
    keeper.read_into("key", offset=MB, buffer=memoryview(part))
    assert part == data[MB : MB + 1000]
    assert keeper.keys() == ["empty", "key"]
    keeper.drop("key")
    with pytest.raises(Incomplete, match="nothing is kept"):
        keeper.get("key")
    with pytest.raises(Incomplete):
        keeper.read_into("empty", offset=0, buffer=memoryview(part))


def test_who_lacks_the_token_or_means_another_run_can_do_nothing(start_keeper: Start) -> None:
    _, keeper = start_keeper()
    keeper.put("key", memoryview(b"secret bytes"))
    for stranger in (replace(keeper, token=b"x" * 32), replace(keeper, run="other")):
        with pytest.raises(CheckpointError, match="does not know the token") as caught:
            stranger.put("key", memoryview(b"x"))
        assert caught.value.values["kind"] == "credentials"
        with pytest.raises(CheckpointError, match="does not know the token"):
            stranger.get("key")
    assert bytes(keeper.get("key")) == b"secret bytes"


@pytest.mark.parametrize(
    "spoken", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"\0" * 64, b"\1" * 65536], ids=["nothing", "http", "zeros", "much"]
)
def test_strangers_who_say_anything_end_their_own_connection_only(start_keeper: Start, spoken: bytes) -> None:
    process, keeper = start_keeper()
    # It may hang up before it has read all of it.
    with suppress(OSError), socket.create_connection((keeper.host, keeper.port), timeout=20) as stranger:
        stranger.sendall(spoken)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    keeper.put("key", memoryview(b"x"))
    assert process.poll() is None


def test_an_older_generation_is_fenced(start_keeper: Start) -> None:
    _, old = start_keeper()
    new = replace(old, generation=2)
    old.put("key", memoryview(b"old"))
    new.fence()
    with pytest.raises(PeerLost, match="generation 1 writes to a keeper that is at generation 2"):
        old.put("key", memoryview(b"late"))
    with pytest.raises(PeerLost, match="generation 1"):
        old.drop("key")
    assert bytes(new.get("key")) == b"old"


def test_what_exceeds_the_budget_is_refused_before_a_byte_of_it_is_sent(start_keeper: Start) -> None:
    process, keeper = start_keeper(budget_bytes=8 * MB)
    keeper.put("key", memoryview(bytes(6 * MB)))
    with pytest.raises(CheckpointError, match=r"3\.0 MiB wanted, 6\.0 MiB of 8\.0 MiB in use") as caught:
        keeper.put("more", memoryview(bytes(3 * MB)))
    assert caught.value.values["kind"] == "budget"
    assert caught.value.values["budget_bytes"] == 8 * MB
    assert process.poll() is None


def test_a_writer_killed_in_the_middle_leaves_the_old_range_and_all_the_room(start_keeper: Start, tmp_path: Path) -> None:
    _, keeper = start_keeper(budget_bytes=70 * MB)
    key = kept_key("s1-a1", rank=0, name="image")
    keeper.put(key, memoryview(b"old"))
    script = (
        "import sys, hashlib\n"
        "from surefoot.checkpoint.keeper_client import KeeperClient\n"
        "from surefoot.checkpoint import keeper_wire\n"
        f"client = KeeperClient('127.0.0.1', {keeper.port}, run={RUN!r}, token={TOKEN!r}, generation=1)\n"
        "data = memoryview(bytearray(64 << 20))\n"
        "print('ready', flush=True)\n"
        f"while True: client.put({key!r} + '.new', data)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.05)  # anywhere in a put: every moment must do
        writer.kill()
    give_up_s = time.monotonic() + LIMIT_S
    while True:
        keeper.drop(f"{key}.new")
        try:
            keeper.put("all", memoryview(bytes(69 * MB)))
            break
        except CheckpointError:
            assert time.monotonic() < give_up_s, "room was never given back"
            time.sleep(0.05)
    assert bytes(keeper.get(key)) == b"old"


def test_a_keeper_that_is_gone_is_named_soon(start_keeper: Start) -> None:
    process, keeper = start_keeper()
    process.kill()
    process.wait()
    with pytest.raises(CheckpointError, match="does not answer") as caught:
        keeper.keys()
    assert caught.value.values["kind"] == "unreachable"


def test_many_writers_at_once_are_all_served_right(start_keeper: Start) -> None:
    _, keeper = start_keeper()
    wrong: list[int] = []

    def write(number: int) -> None:
        data = bytes([number]) * MB
        keeper.put(f"key {number}", memoryview(data))
        if bytes(keeper.get(f"key {number}")) != data:
            wrong.append(number)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert wrong == []
    assert len(keeper.keys()) == 16


def test_a_token_comes_from_the_environment_or_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = write_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(token) >= MIN_TOKEN_BYTES
    assert run_token({TOKEN_FILE_ENV: str(path)}) == token
    assert run_token({TOKEN_ENV: TOKEN.decode()}) == TOKEN
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read the token: mode 0640"):
        run_token({TOKEN_FILE_ENV: str(path)})
    for given, word in (
        ({}, "no token"),
        ({TOKEN_ENV: "short"}, "at least 16"),
        ({TOKEN_FILE_ENV: str(tmp_path / "no")}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=word):
            run_token(given)
    with pytest.raises(FileExistsError):
        write_token(path)
