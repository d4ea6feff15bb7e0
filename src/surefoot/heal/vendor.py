"""The file for whoever sold the machine: which device, its serials and counters, what the kernel said, and why we suspect it. Pure.

Formats are those of `nvidia-smi -q -x` (DTD 11 to 13) and of the kernel log's NVRM lines. What a host does not have is said, not left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final
from xml.etree import ElementTree

_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
_STAMP: Final = re.compile(r"\[\s*([^\]]+?)\s*\]|(\d{4}-\d\d-\d\dT[\d:.,]+(?:[+-]\d\d:\d\d|Z)?)")
_NAMES: Final = {"product_name": "product", "serial": "serial", "uuid": "uuid", "vbios_version": "vbios", "board_part_number": "board_part"}
_COUNTED: Final = ("ecc_errors", "retired_pages", "remapped_rows")
_MAX_LINES: Final = 200


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. `counters` by dotted name, those that the device does not have left out."""

    index: int
    pci: str
    names: Mapping[str, str]
    counters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Xid:
    """A fault that the driver told the kernel log. `time` is as the log has it."""

    number: int
    pci: str
    text: str
    time: str


@dataclass(frozen=True, slots=True)
class VendorFile:
    """`local_rank` and `uuid` are what the run itself said at its start; `missing` says what could not be read here, and why."""

    run: str
    rank: int
    host: str
    written_utc: str
    reason: str
    driver: Mapping[str, str] = field(default_factory=dict)
    device: Device | None = None
    xids: tuple[Xid, ...] = ()
    evidence: tuple[Mapping[str, Any], ...] = ()
    digests: tuple[Mapping[str, Any], ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    local_rank: int | None = None
    uuid: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def xids_in(lines: Iterable[str]) -> list[Xid]:
    """Of a kernel log (`dmesg`, journal, syslog), oldest first. An Xid line whose number is none is no Xid."""
    found = []
    for line in lines:
        if (match := _XID.search(line)) is not None:
            stamp = _STAMP.search(line[: match.start()])
            found.append(Xid(int(match[2]), match[1], (match[3] or "").strip(), (stamp[1] or stamp[2]) if stamp else ""))
    return found


def devices_in(xml: str) -> tuple[dict[str, str], list[Device]]:
    """(driver facts, devices in the order of their index) of `nvidia-smi -q -x`. Raises ValueError for what is no such document."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"no nvidia-smi document: {error}") from error
    driver = {name: text for name in ("driver_version", "cuda_version") if (text := _text(root.find(name)))}
    return driver, [_device(index, gpu) for index, gpu in enumerate(root.findall("gpu"))]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank ran: its number on `host`, and the device that it saw there."""

    host: str
    local_rank: int
    uuid: str


def seat_of(told: object, rank: int) -> Seat | None:
    """Of `rank`, by the `devices` that an attempt told at its start; None where it did not."""
    for host, ranks in told.items() if isinstance(told, Mapping) else ():
        seat = ranks.get(str(rank)) if isinstance(ranks, Mapping) else None
        if isinstance(seat, Sequence) and len(seat) == 2 and isinstance(seat[0], int):
            return Seat(str(host), seat[0], str(seat[1]))
    return None


def device_of(seat: Seat, devices: Sequence[Device]) -> Device | None:
    """By its UUID: what a process counts as its first device need not be the host's first."""
    return next((device for device in devices if seat.uuid and device.names.get("uuid", "").lower() == seat.uuid.lower()), None)


def of_device(xids: Sequence[Xid], device: Device | None) -> tuple[Xid, ...]:
    """Those of `device`, or all where it is not known which one it is; the newest when they are many."""
    mine = [xid for xid in xids if device is None or same_slot(xid.pci, device.pci)]
    return tuple(mine[-_MAX_LINES:])


def same_slot(one: str, other: str) -> bool:
    """PCI addresses are written with domains of 4 or 8 digits, and with or without the function."""
    return _slot(one) == _slot(other)


def markdown(file: VendorFile) -> str:
    """For a support ticket."""
    names = file.device.names if file.device else {}
    lines = [f"# Rank {file.rank} of {file.run} on {file.host}", "", file.reason or "No finding names this rank.", "", "## Device", ""]
    lines += [f"- {name}: {value}" for name, value in {**names, **file.driver}.items()]
    lines += (
        [f"- PCI address: {file.device.pci}, index {file.device.index}"] if file.device else ["- which GPU the rank had is not known here"]
    )
    lines += [f"- local rank {file.local_rank}, which saw {file.uuid}"] if file.local_rank is not None else []
    lines += ["", "## Counters that are not zero", ""]
    counted = {name: value for name, value in (file.device.counters if file.device else {}).items() if value not in ("0", "No")}
    lines += [f"- {name}: {value}" for name, value in counted.items()] or ["- none"]
    lines += ["", "## Xid lines of the kernel log", ""]
    lines += [f"- {xid.time} Xid {xid.number} at {xid.pci}: {xid.text}".replace("-  Xid", "- Xid") for xid in file.xids] or ["- none"]
    lines += ["", "## What the run found", ""]
    lines += [f"- step {one.get('step')}, {one.get('time_utc')}: {one.get('rule')}: {one.get('reason')}" for one in file.evidence] or [
        "- nothing"
    ]
    lines += ["", "## Digests of checkpoints before and after", ""]
    lines += [f"- {one.get('id')}: {one.get('state_digest')}" for one in file.digests] or ["- none"]
    lines += ["", "## Missing", ""]
    lines += [f"- {words}" for words in file.missing] or ["- nothing"]
    return "\n".join([*lines, "", f"Written {file.written_utc} by surefoot.", ""])


def _device(index: int, gpu: ElementTree.Element) -> Device:
    names = {ours: text for theirs, ours in _NAMES.items() if (text := _text(gpu.find(theirs)))}
    counters: dict[str, str] = {}
    for name in _COUNTED:
        if (element := gpu.find(name)) is not None:
            _count(element, name, counters)
    return Device(index, gpu.get("id", ""), names, counters)


def _count(element: ElementTree.Element, name: str, counters: dict[str, str]) -> None:
    for child in element:
        _count(child, f"{name}.{child.tag}", counters)
    if not len(element) and (text := _text(element)):
        counters[name] = text


def _text(element: ElementTree.Element | None) -> str:
    text = (element.text or "").strip() if element is not None else ""
    return "" if text in ("N/A", "[N/A]", "None") else text


def _slot(address: str) -> tuple[int, ...] | str:
    parts = re.split(r"[:.]", address)[:3]
    try:
        return tuple(int(part, 16) for part in parts)
    except ValueError:
        return address
