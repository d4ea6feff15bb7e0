"""TOML and overrides in, a checked RunConfig out, with the origin of every value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config.check import Refused, checked
from surefoot.config.document import Document, Given, given_by_file, given_by_overrides, lists_given, read_document, retired_in, show
from surefoot.config.names import explain_unknown_key, explain_value, nearest
from surefoot.config.presets import PRESETS
from surefoot.config.problems import Problem, as_error
from surefoot.config.rules import broken_rules, questionable
from surefoot.config.schema import Setting, sections, settings_of, table_lists
from surefoot.core.config_paths import absolute_path
from surefoot.core.identity import section_hashes
from surefoot.core.sections import RunConfig


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A config and what is known about it.

    `origins`: setting -> `file:line`, `override`, `preset` or `default`. `hashes`: section -> sha256. `path` (absolute) and `text`: the
    file itself. `warnings`: what is allowed but probably not meant, one sentence each.
    """

    config: RunConfig
    origins: Mapping[str, str]
    hashes: Mapping[str, str]
    path: Path
    text: str
    warnings: tuple[str, ...]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read the TOML at `path` (or the `config.toml` of a run folder), apply `section.key=value` overrides, check everything.

    Relative paths, in overrides too, are taken from the TOML's folder and come out absolute. Local. Raises ConfigError that names section,
    key, `file:line`, what was got and wanted, and the nearest valid name; further problems are in its value `others`.
    """
    document = read_document(Path(path))
    problems: list[Problem] = []
    given = given_by_file(document, problems)
    for section, settings in given_by_overrides(overrides, problems).items():
        given.setdefault(section, {}).update(settings)
    _apply_preset(given, problems)

    reader = _Reader(document=document, problems=problems, origins=dict.fromkeys(table_lists(), "default"))
    parts: dict[str, Any] = {name: reader.section(name, given=given.get(name, {})) for name in sections()}
    lists = lists_given(document, overrides)
    parts |= {name: reader.tables(name, table_lists()[name], told) for name, told in lists.items()}
    config = RunConfig(**parts)
    if problems:
        raise as_error(problems)
    broken = broken_rules(config)
    if broken:
        raise as_error([Problem(_where(name, given, lists, document), f"{name}: {what}", hint) for name, what, hint in broken])
    return LoadedConfig(
        config=config,
        origins=reader.origins,
        hashes=section_hashes(config),
        path=document.path,
        text=document.text,
        warnings=(*retired_in(document), *questionable(config)),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Builds sections, collecting origins and problems on the way."""

    document: Document
    problems: list[Problem]
    origins: dict[str, str]

    def section(self, name: str, *, given: Mapping[str, Given]) -> Any:
        values = {}
        for setting in settings_of(sections()[name]).values():
            path = f"{name}.{setting.key}"
            if setting.key not in given:
                self.origins[path] = "default"
                values[setting.key] = setting.default
            elif setting.item_section:
                values[setting.key] = self.tables(path, setting.item_section, given[setting.key])
            else:
                values[setting.key] = self._value(path, setting, given[setting.key])
        if name == "run" and not values["dir"]:
            values["dir"] = os.path.join(self.document.path.parent, "runs", str(values["name"]))
        return sections()[name](**values)

    def _value(self, path: str, setting: Setting, given: Given) -> Any:
        self.origins[path] = given.origin
        try:
            value = checked(setting, given.value)
        except Refused as wanted:
            hint = explain_value(path, given.value)
            self.problems.append(Problem(given.where, f"{path}: got {show(given.value)}, wanted {wanted}", hint))
            return setting.default
        if setting.is_path:
            folder = self.document.path.parent
            value = absolute_path(value, folder=folder) if isinstance(value, str) else tuple(absolute_path(v, folder=folder) for v in value)
        return value

    def tables(self, path: str, section: type, given: Given) -> tuple[Any, ...]:
        """The items of an array of tables such as `[[data.sources]]`."""
        self.origins[path] = given.origin
        if not isinstance(given.value, list) or not all(isinstance(item, dict) for item in given.value):
            self.problems.append(Problem(given.where, f"{path}: got {show(given.value)}, wanted a list of tables", f"write [[{path}]]"))
            return ()
        return tuple(self._table(f"{path}[{index}]", section, item, given) for index, item in enumerate(given.value))

    def _table(self, path: str, section: type, item: Mapping[str, Any], given: Given) -> Any:
        settings, values = settings_of(section), {}
        in_file = given.origin != "override"
        for key in item:
            if key not in settings:
                what, hint = explain_unknown_key(path.partition("[")[0], key, settings=settings)
                self.problems.append(Problem(self.document.where(f"{path}.{key}") if in_file else given.where, what, hint))
        for setting in settings.values():
            place = f"{path}.{setting.key}"
            if setting.key not in item:
                self.origins[place] = "default"
                values[setting.key] = setting.default
            else:
                origin = self.document.origin(place) if in_file else given.origin
                where = self.document.where(place) if in_file else given.where
                values[setting.key] = self._value(place, setting, Given(item[setting.key], origin, where))
        return section(**values)


def _apply_preset(given: dict[str, dict[str, Given]], problems: list[Problem]) -> None:
    """Fill the model sizes of a named preset in where the person gave none."""
    model = given.get("model", {})
    preset = model.get("preset")
    if preset is None or not isinstance(preset.value, str) or not preset.value:
        return
    sizes = PRESETS.get(preset.value)
    if sizes is None:
        close = nearest(preset.value, choices=PRESETS)
        hint = f"did you mean {close}?" if close else f"the presets are {', '.join(PRESETS)}"
        problems.append(Problem(preset.where, f'model.preset: there is no preset "{preset.value}"', hint))
        return
    for key, value in sizes.items():
        model.setdefault(key, Given(value, "preset", preset.where))


def _where(setting: str, given: Mapping[str, Mapping[str, Given]], lists: Mapping[str, Given], document: Document) -> str:
    """The place of a setting for messages; for one left at its default, the section's header."""
    section, _, key = setting.partition(".")
    listed = lists.get(section.partition("[")[0])
    found = given.get(section, {}).get(key) or (listed if listed and listed.origin == "override" else None)
    return found.where if found else document.where(setting)
