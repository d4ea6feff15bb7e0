"""Ports of InfiniBand and RoCE adapters out of the files under /sys/class/infiniband, by their relative paths. Pure.

The counters that `perfquery` prints are there too, wider and without a management datagram. `counters` are those of the port, `hw_counters`
those of the adapter's transport (retransmissions, time-outs).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from surefoot.coordinate.telemetry.records import PortSample
from surefoot.coordinate.telemetry.words import count

_PORT_FILE = re.compile(r"(?:^|/)(?P<device>[^/]+)/ports/(?P<port>\d+)/(?P<name>state|phys_state|rate|link_layer|(?:hw_)?counters/[^/]+)$")
_OPERSTATE = re.compile(r"^(?P<parent>.*)/net/(?P<interface>[^/]+)/operstate$")
_DEVICE = re.compile(r"^(?P<parent>.*)/infiniband/(?P<device>[^/]+)/ports/")
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*Gb/sec")
# Intervals and other settings that stand among the counters.
_NO_COUNTERS = {"lifespan"}


@dataclass(frozen=True, slots=True)
class PortFault:
    """A port that is not as it should be. `wanted_gbps` is what its equals on the node have."""

    id: str
    kind: Literal["down", "slow"]
    reason: str
    rate_gbps: float | None = None
    wanted_gbps: float | None = None


def parse_ports(files: Mapping[str, str]) -> tuple[PortSample, ...]:
    """`files` are contents by path; whatever stands before "DEVICE/ports/N/" is passed over. In the order of device and port."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for path, text in files.items():
        if (match := _PORT_FILE.search(path)) is not None:
            found.setdefault((match["device"], int(match["port"])), {})[match["name"]] = text
    interfaces = _interfaces(files)
    return tuple(
        _port(f"{device}/{port}", said, interface_state=interfaces.get((device, port))) for (device, port), said in sorted(found.items())
    )


def port_faults(
    ports: Iterable[PortSample], *, wanted_gbps: float | None = None, unused: frozenset[str] = frozenset()
) -> tuple[PortFault, ...]:
    """Ports that are down or slower than `wanted_gbps`; where nobody says what is wanted, than the fastest of the same link layer.

    A port whose state is not known is no fault; nor is a network interface that is down where none of its layer is up, since programs
    use the port without one. `unused` ports (nothing is plugged in on purpose) are passed over; so is a node where no
    port at all is up and nobody wanted one.
    """
    watched = [port for port in ports if port.id not in unused]
    if wanted_gbps is None and not any(port.state == "ACTIVE" for port in watched):
        return ()
    fastest: dict[str | None, float] = {}
    for port in watched:
        if port.state == "ACTIVE" and port.rate_gbps is not None:
            fastest[port.link_layer] = max(fastest.get(port.link_layer, 0.0), port.rate_gbps)
    with_interface = {port.link_layer for port in watched if port.interface_state == "up"}
    faults = (
        _fault(port, wanted_gbps=wanted_gbps or fastest.get(port.link_layer), needs_interface=port.link_layer in with_interface)
        for port in watched
    )
    return tuple(fault for fault in faults if fault is not None)


def _fault(port: PortSample, *, wanted_gbps: float | None, needs_interface: bool) -> PortFault | None:
    if port.state is not None and port.state != "ACTIVE":
        words = f"port {port.id} is {port.state}, its link {port.physical_state or 'unknown'}"
        return PortFault(port.id, "down", words, port.rate_gbps, wanted_gbps)
    if port.physical_state not in (None, "LinkUp"):
        return PortFault(port.id, "down", f"the link of port {port.id} is {port.physical_state}", port.rate_gbps, wanted_gbps)
    if needs_interface and port.interface_state == "down":
        return PortFault(port.id, "down", f"the network interface of port {port.id} is down", port.rate_gbps, wanted_gbps)
    if port.rate_gbps is not None and wanted_gbps is not None and port.rate_gbps < wanted_gbps:
        words = f"port {port.id} runs at {port.rate_gbps:g} Gbit/s, {wanted_gbps:g} are wanted"
        return PortFault(port.id, "slow", words, port.rate_gbps, wanted_gbps)
    return None


def _interfaces(files: Mapping[str, str]) -> dict[tuple[str, int], str]:
    """The state of the network interface by device and port. It stands beside the adapter, or below its link `device`."""
    parents = {match["parent"]: match["device"] for path in files if (match := _DEVICE.match(path)) is not None}
    found = {}
    for path, text in files.items():
        if (match := _OPERSTATE.match(path)) is None:
            continue
        parent = match["parent"]
        device = parents.get(parent) or (parent.rpartition("/device")[0].rpartition("/")[2] if parent.endswith("/device") else "")
        index = count(files.get(f"{parent}/net/{match['interface']}/dev_port", "0").strip())
        if device and index is not None:
            found[device, index + 1] = text.strip()
    return found


def _port(id: str, said: Mapping[str, str], *, interface_state: str | None) -> PortSample:
    rate = _RATE.match(said.get("rate", ""))
    counters = {}
    for name, text in said.items():
        kind, _, counter = name.partition("/")
        value = count(text.strip())
        if counter and value is not None and counter not in _NO_COUNTERS:
            counters[counter if kind == "counters" else f"hw.{counter}"] = value
    return PortSample(
        id=id,
        state=_state(said.get("state")),
        physical_state=_state(said.get("phys_state")),
        rate_gbps=float(rate[1]) if rate else None,
        link_layer=_word(said.get("link_layer")),
        interface_state=interface_state,
        counters=counters,
    )


def _state(text: str | None) -> str | None:
    """The word of "4: ACTIVE"."""
    number, _, word = (text or "").strip().partition(":")
    return word.strip() or None if number.isdigit() else None


def _word(text: str | None) -> str | None:
    return (text or "").strip() or None
