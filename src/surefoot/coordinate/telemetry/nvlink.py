"""NVLinks out of `nvidia-smi nvlink --status`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from surefoot.coordinate.telemetry.records import GpuSample

_GPU = re.compile(r"^GPU \d+: .*\(UUID: (?P<uuid>[^)\s]+)\)")
_LINK = re.compile(r"^\s+Link (?P<link>\d+): (?P<state>.+?)\s*$")


@dataclass(frozen=True, slots=True)
class NvLinks:
    """The links of one accelerator by number: bytes per second in GB, None for one that does not carry data."""

    uuid: str
    links: tuple[tuple[int, float | None], ...]


def parse_nvlink_status(text: str | bytes) -> tuple[NvLinks, ...]:
    words = text.decode(errors="replace") if isinstance(text, bytes) else text
    found: dict[str, list[tuple[int, float | None]]] = {}
    links: list[tuple[int, float | None]] | None = None
    for line in words.splitlines():
        if (gpu := _GPU.match(line)) is not None:
            links = found.setdefault(gpu["uuid"], [])
        elif links is not None and (link := _LINK.match(line)) is not None:
            speed = re.match(r"(\d+(?:\.\d+)?) GB/s", link["state"])
            if speed is not None or "inactive" in link["state"].lower():
                links.append((int(link["link"]), float(speed[1]) if speed else None))
    return tuple(NvLinks(uuid, tuple(found[uuid])) for uuid in found)


def with_nvlinks(gpus: Iterable[GpuSample], status: Iterable[NvLinks]) -> tuple[GpuSample, ...]:
    """The samples with the number of their links and of those that are up, where the status names them."""
    by_uuid = {one.uuid: one.links for one in status if one.links}
    return tuple(
        replace(gpu, nvlinks=len(links), nvlinks_up=sum(speed is not None for _, speed in links))
        if (links := by_uuid.get(gpu.uuid)) is not None
        else gpu
        for gpu in gpus
    )
