"""One value against one setting. pydantic decides in its strict mode (no bool for an integer, integers do for floats, never nan or inf)."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from surefoot.config.schema import Setting, describe_wanted

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_INT64 = 1 << 63


class Refused(ValueError):
    """The value does not suit the setting; the message says what was wanted."""


def checked(setting: Setting, value: Any) -> Any:
    """`value` as the setting's exact type: lists become tuples, tables pairs, integers floats where those are declared. Raises Refused."""
    if isinstance(value, int) and abs(value) >= _INT64:
        raise Refused(f"{describe_wanted(setting)}, in 64 bits")
    if setting.is_table:
        value = tuple(value.items()) if isinstance(value, dict) else None
    try:
        return _adapter(setting).validate_python(_as_tuples(value))
    except ValidationError:
        raise Refused(describe_wanted(setting)) from None


@cache
def _adapter(setting: Setting) -> TypeAdapter[Any]:
    kind: Any = setting.type
    if get_origin(kind) is Union:  # numbers or a word: the bounds are those of the numbers
        kind = Union[tuple(part if get_origin(part) is Literal else _bounded(part, setting) for part in get_args(kind))]  # noqa: UP007
    elif setting.low is not None or setting.high is not None:
        kind = _bounded(kind, setting)
    elif get_origin(kind) is Literal:
        return TypeAdapter(kind)
    return TypeAdapter(kind, config=_STRICT)


def _bounded(kind: Any, setting: Setting) -> Any:
    return Annotated[kind, Field(ge=setting.low, le=setting.high)]


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
