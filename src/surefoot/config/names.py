"""What a person probably meant by a name that does not exist."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches

from surefoot.config.schema import NOT_IN_THIS_RELEASE, every_setting, sections, sections_with, settings_of, table_lists

_FLOAT8 = ("float8", "fp8")


def nearest(name: str, *, choices: Iterable[str]) -> str | None:
    """The valid name closest to `name`, or None when nothing is close."""
    matches = get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return matches[0] if matches else None


def explain_unknown_section(name: str) -> tuple[str, str]:
    """(what, hint) for a top-level name that is no section."""
    if name in NOT_IN_THIS_RELEASE:
        return f"[{name}] is not in this release", "remove it"
    owners = _owners(name)
    if owners:
        return f'key "{name}" stands outside its section', f"{name} belongs in {_list_sections(owners)}"
    close = nearest(name, choices=[*sections(), *table_lists()])
    hint = f"did you mean {_list_sections([close])}?" if close else f"the sections are {', '.join([*sections(), *table_lists()])}"
    return f"there is no section [{name}]", hint


def explain_unknown_key(section: str, key: str, *, settings: Iterable[str] | None = None) -> tuple[str, str]:
    """(what, hint) for a key that its section lacks: misspelled, misplaced, or not built yet. `settings` when it is not a plain section."""
    known = list(settings_of(sections()[section]) if settings is None else settings)
    what = f'{_list_sections([section])} has no key "{key}"'
    if f"{section}.{key}" in NOT_IN_THIS_RELEASE:
        return f"{section}.{key} is not in this release", "remove it"
    owners = _owners(key)
    if owners:
        return what, f"{key} belongs in {_list_sections(owners)}"
    close = nearest(key, choices=known)
    if close:
        return what, f"did you mean {close}?"
    elsewhere = nearest(key, choices={setting.key for _, setting in every_setting()})
    if elsewhere:
        return what, f"did you mean {elsewhere} in {_list_sections(sections_with(elsewhere))}?"
    return what, f"its keys are {', '.join(known)}" if known else "it has no settings in this release"


def explain_value(path: str, value: object) -> str:
    """A hint for a value that its setting does not take; empty where what was wanted says it all."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan and inf are refused everywhere"
    if path == "train.precision" and isinstance(value, str) and value.lower() in _FLOAT8:
        return "float8 is not in this release: each product needs scales for its operands, which would be state; docs/precision.md"
    if path == "launch.isolation" and value == "auto":
        return "no node is taken out without a person in this release: `surefoot drain NODE --isolate --yes`; docs/isolation.md"
    return ""


def _owners(key: str) -> list[str]:
    """The sections that have `key`; where none has, the lists of tables that do."""
    return sections_with(key) or [name for name, section in table_lists().items() if key in settings_of(section)]


def _list_sections(names: list[str]) -> str:
    return " or ".join(f"[[{name}]]" if name in table_lists() or "." in name else f"[{name}]" for name in names)
