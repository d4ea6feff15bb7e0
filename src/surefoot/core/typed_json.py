"""Frozen records out of JSON that somebody else wrote: every field is checked against its annotation, so that nothing else comes in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")

_SHAPES: dict[type[Any], Mapping[str, tuple[Any, bool]]] = {}


def record_from_json(kind: type[R], content: object) -> R:
    """The record of class `kind` that `content` describes. Raises ValueError when a field is missing or of another type.

    Unknown fields, of a later version, are passed over. Numbers must be finite. Lists become tuples.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{kind.__name__} is an object, not {str(content)[:40]!r}")
    values = {}
    for name, (hint, is_needed) in _shape(kind).items():
        if name in content:
            values[name] = _checked(content[name], hint, where=f"{kind.__name__}.{name}")
        elif is_needed:
            raise ValueError(f"{kind.__name__} lacks {name}")
    return kind(**values)


def _shape(kind: type[Any]) -> Mapping[str, tuple[Any, bool]]:
    if kind not in _SHAPES:
        hints = get_type_hints(kind)
        _SHAPES[kind] = {
            item.name: (hints[item.name], item.default is MISSING and item.default_factory is MISSING) for item in fields(kind)
        }
    return _SHAPES[kind]


def _checked(value: Any, hint: Any, *, where: str) -> Any:
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint is Any or (hint in (str, int, bool, type(None)) and type(value) is hint):
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None and isinstance(hint, type):
        return _of_class(value, hint, where=where)
    if origin is Literal and value in arguments:
        return value
    if origin in (Union, UnionType):
        return _of_union(value, arguments, where=where)
    if origin is tuple and isinstance(value, list):
        inner = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(inner) == len(value):
            return tuple(_checked(item, one, where=where) for item, one in zip(value, inner, strict=True))
    if origin is not None and isinstance(value, dict) and issubclass(origin, Mapping):
        return {str(key): _checked(item, arguments[1], where=where) for key, item in value.items()}
    raise ValueError(f"{where} is {str(value)[:40]!r}, not {hint}")


def _of_class(value: Any, hint: type[Any], *, where: str) -> Any:
    if is_dataclass(hint):
        return record_from_json(hint, value)
    if issubclass(hint, Enum):
        return hint(value)
    raise ValueError(f"{where} is {str(value)[:40]!r}, not {hint.__name__}")


def _of_union(value: Any, arguments: tuple[Any, ...], *, where: str) -> Any:
    for hint in arguments:
        try:
            return _checked(value, hint, where=where)
        except ValueError:
            continue
    raise ValueError(f"{where} is {str(value)[:40]!r}, not one of {len(arguments)} kinds")
