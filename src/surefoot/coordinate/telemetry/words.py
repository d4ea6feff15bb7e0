"""Numbers as drivers and kernels print them: with a unit, as a word for "not known", or cut off. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z%/]*)\s*")
_SCALES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "kB": 1 << 10}

# What DCGM writes for "not there, not supported, not permitted": the top of each type and a few below it.
_SENTINELS_FROM = {"int32": 2147483632, "int64": 9223372036854775792, "float": 140737488355328.0}


def number(text: str | None) -> float | None:
    """The number that `text` begins with, whatever its unit; None for "N/A", "[Not Supported]", an empty or a broken one."""
    match = _NUMBER.fullmatch(text) if text is not None else None
    if match is None:
        return None
    value = float(match[1])
    return value if math.isfinite(value) else None


def count(text: str | None) -> int | None:
    """A counter: whole and not negative, else None. Exact beyond what a float holds."""
    match = _NUMBER.fullmatch(text) if text is not None else None
    if match is None or not match[1].lstrip("+").isdigit():
        return None
    return int(match[1])


def num_bytes(text: str | None) -> int | None:
    """A size with its unit, "80999 MiB"; None where the unit is not one of memory."""
    match = _NUMBER.fullmatch(text) if text is not None else None
    if match is None or match[2] not in _SCALES or match[1].startswith("-"):
        return None
    value = float(match[1]) * _SCALES[match[2]]
    return int(value) if math.isfinite(value) else None


def yes_or_no(text: str | None) -> bool | None:
    return {"yes": True, "enabled": True, "active": True, "no": False, "disabled": False, "not active": False}.get(
        (text or "").strip().lower()
    )


def total(counts: Iterable[int | None]) -> int | None:
    """The sum of those that are known; None when none is."""
    known = [value for value in counts if value is not None]
    return sum(known) if known else None


def is_blank(value: float) -> bool:
    """Whether it is one of the numbers with which DCGM says that there is none."""
    if value in (140737488355328.0, 140737488355329.0, 140737488355330.0, 140737488355331.0):
        return True
    return _SENTINELS_FROM["int32"] <= value <= 2147483647 or value >= _SENTINELS_FROM["int64"]
