"""What a node is called, where others reach it, and which interface that is. Facts of this machine; no setting of the run."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NODE_NAME = "SUREFOOT_NODE_NAME"
NODE_ADDRESS = "SUREFOOT_NODE_ADDRESS"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """`node` is of this boot, so a machine that was restarted is another node; `machine` stays."""

    node: str
    machine: str
    name: str
    address: str


def identity_here(environment: Mapping[str, str], *, towards: tuple[str, int] | None = None) -> NodeIdentity:
    """This machine as a node. Its address is the one from which it reaches `towards`, the coordinator; where there is none, what its name
    resolves to. The environment may say otherwise, and must where several nodes share a machine."""
    named = environment.get(NODE_NAME, "")
    machine = named or _read("/etc/machine-id")[:12] or socket.gethostname()
    node = f"{machine}-{_read('/proc/sys/kernel/random/boot_id')[:8]}"
    return NodeIdentity(node, machine, named or socket.gethostname(), environment.get(NODE_ADDRESS) or _address(towards))


def interface_of(address: str) -> str:
    """The name of the interface that has `address`; empty when none has."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _address(towards: tuple[str, int] | None) -> str:
    try:
        if towards is None:
            return socket.gethostbyname(socket.gethostname())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(towards)  # sends nothing: the kernel says which way it would go
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return os.environ.get("HOSTNAME", "")
