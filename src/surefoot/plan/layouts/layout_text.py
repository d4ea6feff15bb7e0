"""A layout as people write it, `tp=8,pp=4,zero_stage=1`, and as it is shown. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from surefoot.core.errors import ConfigError
from surefoot.plan.records import Layout, Recompute

WHERE = "--layout"

_ALIASES = {
    "zero": "zero_stage",
    "vp": "pp_chunks",
    "chunks": "pp_chunks",
    "schedule": "pp_schedule",
    "mbs": "micro_batch_size",
    "micro_batch": "micro_batch_size",
}
_WORDS: Mapping[str, tuple[str, ...]] = {
    "pp_schedule": ("1f1b", "interleaved", "zero_bubble"),
    "recompute": ("none", "selective", "full"),
}
_NAMES = tuple(field.name for field in fields(Layout))


def parse_layout(text: str, *, num_devices: int) -> Layout:
    """What is not said: `dp_shard` is the devices that are left, of `dp` where that is said; anything else has its default.

    Raises ConfigError for an unknown name, a value that is none, and a product that is not `num_devices`.
    """
    told: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"{part!r} is not name=value", where=WHERE, hint="for example tp=8,pp=4,zero_stage=1", got=part)
        name = _known(_ALIASES.get(name, name))
        if name in told:
            raise ConfigError(f"{name} is given twice", where=WHERE, hint="once is enough", got=text)
        told[name] = _value(name, value)
    _fill_in_data_ranks(told, num_devices)
    if told.get("pp_chunks", 1) > 1:
        told.setdefault("pp_schedule", "interleaved")
    elif told.get("pp_schedule", "1f1b") != "1f1b" and told.get("pp", 1) > 1:
        told.setdefault("pp_chunks", 2)
    return Layout(**told)


def said_in(text: str) -> frozenset[str]:
    """The settings that `text` says anything of."""
    return frozenset(_ALIASES.get(name, name) for name in (part.partition("=")[0].strip() for part in text.split(",")))


def completions(layout: Layout, *, said: frozenset[str]) -> list[Layout]:
    """`layout` with every stage of ZeRO and every recomputation that was not said; its own come first."""
    stages: tuple[Literal[1, 2, 3], ...] = (layout.zero_stage,) if "zero_stage" in said else (3, 2, 1)
    recomputes: tuple[Recompute, ...] = (layout.recompute,) if "recompute" in said else ("none", "selective", "full")
    return [replace(layout, zero_stage=stage, recompute=recompute) for stage in stages for recompute in recomputes]


def _known(name: str) -> str:
    if name in _NAMES or name == "dp":
        return name
    near = difflib.get_close_matches(name, [*_NAMES, "dp"], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"{name!r} is no axis or setting of a layout", where=WHERE, hint=f"{meant}known: {', '.join(_NAMES)}, dp", got=name)


def _value(name: str, text: str) -> str | int:
    if name in _WORDS:
        if text not in _WORDS[name]:
            raise ConfigError(f"{name} = {text!r}", where=WHERE, hint=f"one of {', '.join(_WORDS[name])}", got=text)
        return text
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1 or (name == "zero_stage" and number > 3):
        hint = "1, 2 or 3" if name == "zero_stage" else "a whole number from 1 on"
        raise ConfigError(f"{name} = {text!r}", where=WHERE, hint=hint, got=text)
    return number


def _fill_in_data_ranks(told: dict[str, Any], num_devices: int) -> None:
    """Devices = tp * pp * cp * dp; ep is no factor, for experts are shared out over data ranks."""
    inner = told.get("tp", 1) * told.get("pp", 1) * told.get("cp", 1)
    data_ranks = told.pop("dp", None)
    if data_ranks is None and {"dp_shard", "dp_replicate"} <= told.keys():
        data_ranks = told["dp_shard"] * told["dp_replicate"]
    if data_ranks is None and num_devices % inner == 0:
        data_ranks = num_devices // inner
    product = inner * (data_ranks or 1)
    if product != num_devices:
        hint = "tp * pp * cp * dp is the number of devices; ep divides dp and is no factor"
        raise ConfigError(f"the axes come to {product} devices, not {num_devices}", where=WHERE, hint=hint, got=product, want=num_devices)
    given = [name for name in ("dp_shard", "dp_replicate") if name in told]
    if len(given) == 2 and told["dp_shard"] * told["dp_replicate"] != data_ranks:
        what = f"dp = {data_ranks}, but dp_shard * dp_replicate = {told['dp_shard'] * told['dp_replicate']}"
        raise ConfigError(what, where=WHERE, hint="leave dp out, or one of the others", got=data_ranks)
    known = told[given[0]] if given else 1
    if data_ranks % known:
        raise ConfigError(f"{given[0]} = {known} does not divide dp = {data_ranks}", where=WHERE, hint="change either", got=known)
    if given != ["dp_shard"] and "dp_shard" not in told:
        told["dp_shard"] = data_ranks // known
    elif "dp_replicate" not in told:
        told["dp_replicate"] = data_ranks // known


def show_layout(layout: Layout) -> str:
    """Only what is not as in one process: `tp 8, dp_shard 124, zero 1, recompute full, micro-batch 2`."""
    parts = [f"{axis} {size}" for axis in ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate") if (size := getattr(layout, axis)) > 1]
    if layout.pp > 1:
        parts.append(layout.pp_schedule + (f" x{layout.pp_chunks}" if layout.pp_chunks > 1 else ""))
    if layout.dp_shard * layout.cp > 1:
        parts.append(f"zero {layout.zero_stage}")
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    parts.append(f"micro-batch {layout.micro_batch_size}")
    return ", ".join(parts)
