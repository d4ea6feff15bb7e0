"""A node's samples on disk: JSON lines in segments under `telemetry/NODE/`, the oldest segment deleted when they grow too large.

JSON lines because a node differs from the next in accelerators, ports and disks, because a line that a crash tore harms no other line, and
because the writer then imports nothing that costs memory beside the ranks. The price is size.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from surefoot.coordinate.telemetry.records import NodeSample
from surefoot.core import strict_json

FOLDER: Final = "telemetry"
FORMAT: Final = 1
_SEGMENTS: Final = 8
_NAME = re.compile(r"(?P<number>\d{8})\.jsonl")


class TelemetryLog:
    """Appends the samples of one node. One writer; what a crash left half is ended by the next line."""

    def __init__(self, run_dir: Path, *, node: str, max_bytes: int) -> None:
        self._folder = run_dir / FOLDER / safe_name(node)
        self._segment_bytes = max(1, max_bytes // _SEGMENTS)
        self._folder.mkdir(parents=True, exist_ok=True)
        segments = _segments(self._folder)
        self._number = _number(segments[-1]) if segments else 1
        self._torn = bool(segments) and _is_torn(segments[-1])

    def append(self, sample: NodeSample) -> None:
        """Not fsynced: what a crash of the machine takes with it is a sample. Raises OSError."""
        line = strict_json.dumps({"format_version": FORMAT, **_known(strict_json.plain(sample))}) + "\n"
        path = self._folder / f"{self._number:08}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}" if self._torn else line)
        self._torn = False
        if path.stat().st_size >= self._segment_bytes:
            self._number += 1
            for old in _segments(self._folder)[: -(_SEGMENTS - 1)]:
                old.unlink(missing_ok=True)


def nodes_of(run_dir: Path) -> list[str]:
    """The nodes that wrote samples, by name."""
    folder = run_dir / FOLDER
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def read_samples(run_dir: Path, node: str, *, newest: int | None = None) -> list[dict[str, Any]]:
    """As they were written, oldest first; unknown figures are left out. Lines that are no sample of a known format are passed over."""
    found: list[dict[str, Any]] = []
    for segment in reversed(_segments(run_dir / FOLDER / safe_name(node))):
        found = [*_lines(segment), *found]
        if newest is not None and len(found) >= newest:
            break
    return found if newest is None else found[max(0, len(found) - newest) :]


def samples_at(run_dir: Path, node: str, *, first_step: int, last_step: int) -> list[dict[str, Any]]:
    """Those taken while the run stood between two steps, in every attempt."""
    return [sample for sample in read_samples(run_dir, node) if first_step <= (sample.get("step") or -1) <= last_step]


def safe_name(node: str) -> str:
    """A node's name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", node).lstrip(".") or "node"


def _known(value: Any) -> Any:
    """Without what nobody said: most parts lack most figures."""
    if isinstance(value, dict):
        return {name: _known(inner) for name, inner in value.items() if inner is not None and inner != {} and inner != ""}
    return [_known(inner) for inner in value] if isinstance(value, list) else value


def _segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.is_dir() else []


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return  # deleted since as the oldest
    for line in text.splitlines():
        try:
            sample = strict_json.loads(line)
        except ValueError:
            continue
        if isinstance(sample, dict) and sample.get("format_version") == FORMAT:
            yield sample
