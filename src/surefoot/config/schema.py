"""What may stand in the TOML: the sections and settings that `core.sections` declares, in a form that can be searched and described."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from surefoot.core.sections import RunConfig

# Named in the specification, not built yet: these deserve a better answer than "unknown".
NOT_IN_THIS_RELEASE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of one section: its Python type, default, and the metadata of `core.sections.setting`."""

    key: str
    type: Any
    default: Any
    why: str
    unit: str
    low: float | None
    high: float | None
    since: int
    is_path: bool
    is_table: bool
    counts: bool

    @property
    def item_section(self) -> type | None:
        """The section class of the items when this is an array of tables such as `[[data.sources]]`."""
        return _item_section(self.type)


def settings_of(section: type) -> Mapping[str, Setting]:
    """The settings of a section class by key, in the order of their declaration."""
    return _settings(section)


@cache
def _settings(section: type) -> Mapping[str, Setting]:
    types = get_type_hints(section)
    result = {}
    for item in fields(section):
        if item.default is MISSING:
            raise TypeError(f"{section.__name__}.{item.name} has no default")
        result[item.name] = Setting(key=item.name, type=types[item.name], default=item.default, **item.metadata)
    return result


@cache
def sections() -> Mapping[str, type]:
    """The section classes of RunConfig by name, in the order of their declaration."""
    return {name: kind for name, kind in _parts().items() if isinstance(kind, type)}


@cache
def table_lists() -> Mapping[str, type]:
    """What stands at the top level as an array of tables, `[[stage]]`: the section class of the items by name."""
    return {name: section for name, kind in _parts().items() if (section := _item_section(kind))}


@cache
def _parts() -> Mapping[str, Any]:
    types = get_type_hints(RunConfig)
    return {item.name: types[item.name] for item in fields(RunConfig)}


def _item_section(kind: Any) -> type | None:
    arguments = get_args(kind)
    return arguments[0] if arguments and is_dataclass(arguments[0]) and isinstance(arguments[0], type) else None


def sections_with(key: str) -> list[str]:
    """The names of all sections that have a setting `key`."""
    return [name for name, section in sections().items() if key in settings_of(section)]


def every_setting() -> Iterator[tuple[str, Setting]]:
    for name, section in sections().items():
        for setting in settings_of(section).values():
            yield name, setting


def describe_type(kind: Any) -> str:
    """A type in a reader's words: 'an integer', 'one of "fp32", "bf16"'."""
    simple = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if kind in simple:
        return simple[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        choices = ", ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in arguments)
        return f"one of {choices}" if len(arguments) > 1 else f"only {choices}"
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        item = arguments[0]
        if is_dataclass(item):
            return "a list of tables"
        plural = {int: "integers", float: "numbers", str: "strings"}
        return f"a list of {plural[item]}" if item in plural else f"a list, each item {describe_type(item)}"
    if origin is tuple:
        names = ", ".join(describe_type(argument).removeprefix("an ").removeprefix("a ") for argument in arguments)
        return f"[{names}]"
    if origin is UnionType:
        return " or ".join(describe_type(argument) for argument in arguments)
    raise TypeError(f"no words for settings of type {kind}")


def describe_wanted(setting: Setting) -> str:
    """What a setting accepts, bounds and unit included: 'an integer of at least 1 (steps)'."""
    if setting.is_table:
        (pair, *_) = get_args(setting.type)
        if get_args(pair)[1] is str:
            return 'a table of words by name, such as { loss_n_sigma = "alert" }'
        return "a table of numbers by name, such as { web = 7, code = 3 }"
    if get_origin(setting.type) is Union:  # a number with its bounds, or a word
        number, *others = get_args(setting.type)
        words_of_others = (describe_type(other).removeprefix("only ") for other in others)
        return " or ".join((describe_wanted(replace(setting, type=number)), *words_of_others))
    words = describe_type(setting.type)
    if setting.low is not None and setting.high is not None:
        words += f" from {setting.low:g} to {setting.high:g}" if setting.low != setting.high else f": only {setting.low:g}"
    elif setting.low is not None:
        words += f" of at least {setting.low:g}"
    elif setting.high is not None:
        words += f" of at most {setting.high:g}"
    return f"{words} ({setting.unit})" if setting.unit else words
