"""The identity of a config: which settings count, their hash per section, and what differs between two configs.

A new world size, folder or version never refuses a resume by itself. So paths are left out (the data manifest's hash stands for them), a
preset's name too (its sizes stand for it), and settings newer than config version 1 count only away from their defaults.

Stages are hashed where there are any, but refuse no resume: those to come may change, and for those behind it the data cursor stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from surefoot.core.functions import source_sha256
from surefoot.core.hashing import sha256_json
from surefoot.core.sections import HASHED_SECTIONS, RunConfig
from surefoot.core.stages import in_order

SettingChange = tuple[str, str, object, object]

STAGES = "stage"

FIXED = {("run", "seed"), ("data", "seq_len")}
"""(section, key) of what the order of samples hangs on: no cursor of the run would fit another value, so nobody can accept one."""


def section_hashes(config: RunConfig) -> dict[str, str]:
    """sha256 over canonical JSON per section: `run` (its seed alone), every one of HASHED_SECTIONS, and `stage` where there is one."""
    return {name: sha256_json(values) for name, values in hashed_values(config).items()}


def code_hashes(config: RunConfig) -> dict[str, str]:
    """`code`: sha256 over the sources of the factories that the config names; empty when it names none that can be found here."""
    sources = {name: source_sha256(name) for name in (config.model.factory, config.optimizer.factory) if name}
    return {"code": sha256_json(sources)} if any(sources.values()) else {}


def hashed_values(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What the hashes are taken over."""
    result: dict[str, dict[str, Any]] = {"run": {"seed": config.run.seed}}
    for name in HASHED_SECTIONS:
        result[name] = values_of(getattr(config, name))
    result["model"].pop("preset", None)
    if config.stage:
        result[STAGES] = {STAGES: [values_of(stage) for stage in in_order(config.stage)]}
    return result


def other_sections(made_under: Mapping[str, str], *, now: Mapping[str, str]) -> list[str]:
    """The names of the hashes of `now` that a checkpoint or a record was not made under, and that refuse a resume unless accepted."""
    return [name for name in now if name != STAGES and made_under.get(name) != now[name]]


def diff_sections(old: RunConfig, new: RunConfig) -> list[SettingChange]:
    """(section, key, old value, new value) of each hashed setting that differs, in the order of the sections. None stands for absent."""
    before, after = hashed_values(old), hashed_values(new)
    changes: list[SettingChange] = []
    for section in dict.fromkeys([*after, *before]):
        was, now = _flat(before.get(section, {})), _flat(after.get(section, {}))
        differing = [key for key in dict.fromkeys([*was, *now]) if was.get(key, ()) != now.get(key, ())]  # no tables equal absent ones
        changes += [(section, key, was.get(key), now.get(key)) for key in differing]
    return changes


def values_of(section: Any) -> dict[str, Any]:
    """The settings of one section that count, as plain values; tables in a list are opened the same way."""
    return {item.name: _value(getattr(section, item.name), item) for item in fields(section) if _counts(item, getattr(section, item.name))}


def _counts(item: Field[Any], value: object) -> bool:
    metadata = item.metadata
    return not metadata["is_path"] and metadata["counts"] and (metadata["since"] == 1 or value != item.default)


def _value(value: Any, item: Field[Any]) -> Any:
    if item.metadata["is_table"]:
        return dict(value)  # the order of names means nothing
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [values_of(item) for item in value]
    return value


def _flat(values: Mapping[str, Any]) -> dict[str, object]:
    """Lists of tables opened up, so that a change names `sources[0].weight`."""
    result: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, list):
            result |= {f"{key}[{index}].{inner}": given for index, item in enumerate(value) for inner, given in item.items()}
        else:
            result[key] = value
    return result
