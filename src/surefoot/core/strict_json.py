"""JSON that every reader accepts: no NaN, no Infinity, one canonical byte form for hashing.

A non-finite float becomes null, and its path is listed under the key `nonfinite` of the outermost object, so nothing is lost silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any


def plain(value: object) -> Any:
    """`value` as JSON types; non-finite floats become null and are flagged on the outermost object."""
    nonfinite: dict[str, str] = {}
    result = _plain(value, "", nonfinite)
    if nonfinite and isinstance(result, dict):
        result["nonfinite"] = nonfinite
    return result


def dumps(value: object, *, indent: int | None = None) -> str:
    """Strict JSON text for people and files."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def canonical(value: object) -> bytes:
    """The one byte form that hashes are taken over: sorted keys, no spaces, UTF-8."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def loads(text: str | bytes) -> Any:
    """Parse strict JSON; NaN and Infinity, and what is nested too deep to be read, are refused with ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _plain(value: object, path: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[path] = repr(value)
        return None
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}" if path else str(key), nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item, f"{path}[{index}]", nonfinite) for index, item in enumerate(items)]
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} at {path or 'the top'} has no JSON form")
