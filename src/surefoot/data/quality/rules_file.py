"""Rules in a file: thresholds of the catalogue that are changed, and rules of one's own. Only what a person accepted is used.

```toml
format_version = 1

[[rule]]
id = "zlib-ratio"           # of the catalogue: what is given here replaces what stands there
threshold = 6.0
accepted = true

[[rule]]
id = "link-farm"            # one's own
measure = "phrases"
phrases = ["cheap pills here", "click the best offer"]
threshold = 1.0
action = "drop"
accepted = false
```
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, get_args

from surefoot.core.config_text import toml_value
from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.data.quality.measures import MEASURES
from surefoot.data.quality.rules import CATALOGUE, OF_A_FILE, Action, Fires, Rule, RuleSet, by_id

FILE_FORMAT: Final = 1
_RULE_KEYS: Final = {item.name: item for item in fields(Rule)}
_ABOUT_KEYS: Final = ("accepted", "accepted_by", "accepted_utc")


@dataclass(frozen=True, slots=True)
class FiledRule:
    """A rule as its file has it. `measured` is what was found when it was proposed: numbers by name, told and never read back."""

    rule: Rule
    accepted: bool = False
    accepted_by: str = ""
    accepted_utc: str = ""
    measured: Mapping[str, float | int | str] = field(default_factory=dict)


def rule_set(path: str | Path | None = None) -> RuleSet:
    """The catalogue, with the accepted rules of the file at `path` over it and beside it. Raises ConfigError for what is no rules file."""
    rules = dict(by_id(CATALOGUE))
    for filed in read_rules(path) if path else ():
        if filed.accepted:
            rules[filed.rule.id] = filed.rule
    return RuleSet(tuple(rules.values()))


def read_rules(path: str | Path) -> list[FiledRule]:
    """Every rule of the file, accepted or not. Raises ConfigError naming the rule and the key."""
    where = str(path)
    try:
        value = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read the rules: {error.strerror}", where=where, hint="`surefoot data rules propose` writes one"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", where=where, hint="mend the file") from error
    if value.get("format_version") != FILE_FORMAT:
        raise ConfigError(f"format_version is {value.get('format_version')}, wanted {FILE_FORMAT}", where=where, hint="add it to the file")
    filed = [_filed(table, where=f"{where}: [[rule]] {number}") for number, table in enumerate(value.get("rule", []), start=1)]
    ids = [one.rule.id for one in filed]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ConfigError(f"two rules are called {twice[0]!r}", where=where, hint="give each an id of its own")
    return filed


def write_rules(path: Path, filed: Sequence[FiledRule], *, about: Sequence[str] = ()) -> None:
    """`about` are lines of comment at the top."""
    lines = [*(f"# {line}" for line in about), f"format_version = {FILE_FORMAT}"]
    for one in filed:
        lines += ["", "[[rule]]", *_rule_lines(one)]
        if one.measured:
            lines += ["[rule.measured]", *(f"{key} = {toml_value(value)}" for key, value in one.measured.items())]
    try:
        write_atomic(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path), hint="name a file in a folder that is there") from error


def accept(filed: Sequence[FiledRule], *, ids: Collection[str], by: str, utc: str, where: str) -> list[FiledRule]:
    """The same rules with those of `ids` accepted, all of them when none is named. What was accepted before stays as it was."""
    known = {one.rule.id for one in filed}
    if unknown := sorted(set(ids) - known):
        raise ConfigError(f"no rule {unknown[0]!r}", where=where, hint=f"it holds {', '.join(sorted(known)) or 'none'}")
    wanted = set(ids) or known
    return [
        replace(one, accepted=True, accepted_by=by, accepted_utc=utc) if one.rule.id in wanted and not one.accepted else one
        for one in filed
    ]


def _filed(table: Mapping[str, Any], *, where: str) -> FiledRule:
    given = dict(table)
    about = {key: given.pop(key) for key in _ABOUT_KEYS if key in given}
    measured = given.pop("measured", {})
    name = given.get("id")
    if not isinstance(name, str) or not name:
        raise ConfigError("a rule without an id", where=where, hint='give it one: id = "link-farm"')
    where = f"{where} ({name})"
    if unknown := sorted(set(given) - set(_RULE_KEYS)):
        raise ConfigError(f"no key {unknown[0]!r}", where=where, hint=f"there are {', '.join([*_RULE_KEYS, *_ABOUT_KEYS])}")
    base = by_id(CATALOGUE).get(name)
    values = {key: _value(key, value, where=where) for key, value in given.items()}
    if base is None and (missing := [key for key in ("measure", "threshold") if key not in values]):
        raise ConfigError(
            f"no rule of the catalogue, and no {missing[0]}", where=where, hint="`surefoot data rules list` shows the catalogue"
        )
    rule = replace(base, **values) if base is not None else Rule(**values)
    _check(rule, where=where)
    if not isinstance(about.get("accepted", False), bool):
        raise ConfigError(f"accepted is {about['accepted']!r}", where=where, hint="wanted true or false")
    return FiledRule(rule=rule, measured=measured, **about)


def _value(key: str, value: Any, *, where: str) -> Any:
    """`value` as the field `key` of Rule has it."""
    default = _RULE_KEYS[key].default
    kind = float if key == "threshold" else str if default is MISSING else type(default)
    if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    wanted = {tuple: "a list of texts", float: "a number"}.get(kind, f"a {kind.__name__}")
    raise ConfigError(f"{key} is {value!r}", where=where, hint=f"wanted {wanted}", got=value)


def _check(rule: Rule, *, where: str) -> None:
    for key, value, allowed in (
        ("measure", rule.measure, (*MEASURES, *OF_A_FILE)),
        ("action", rule.action, get_args(Action)),
        ("fires", rule.fires, get_args(Fires)),
    ):
        if value not in allowed:
            raise ConfigError(f"{key} is {value!r}", where=where, hint=f"wanted one of {', '.join(allowed)}", got=value)
    if rule.measure == "phrases" and not rule.phrases:
        raise ConfigError("no phrases to look for", where=where, hint="list them under phrases")
    if rule.measure == "unit" and not rule.unit:
        raise ConfigError("no unit to look for", where=where, hint="give the text that is repeated as unit")


def _rule_lines(one: FiledRule) -> list[str]:
    base = by_id(CATALOGUE).get(one.rule.id)
    values = {key: getattr(one.rule, key) for key in _RULE_KEYS}
    usual = {key: item.default if base is None else getattr(base, key) for key, item in _RULE_KEYS.items()}
    kept = {key: value for key, value in values.items() if key == "id" or value != usual[key]}
    lines = [f"{key} = {toml_value(value)}" for key, value in kept.items()]
    lines.append(f"accepted = {toml_value(one.accepted)}")
    if one.accepted:
        lines += [f"accepted_by = {toml_value(one.accepted_by)}", f"accepted_utc = {toml_value(one.accepted_utc)}"]
    return lines
