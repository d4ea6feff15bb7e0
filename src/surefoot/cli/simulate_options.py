"""What the options of `surefoot simulate` say: tiers, shares and restarts by grade."""

from __future__ import annotations

import math

from surefoot.core.errors import ConfigError
from surefoot.plan.failures.scenario import GRADES, SURVIVES, Grade, Tier

_TIER_KEYS = ("every", "write_s", "restore_s")


def parse_tier(text: str) -> Tier:
    """`shared:every=4,write_s=120`. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    if kind not in SURVIVES:
        raise ConfigError(f"no tier is called {kind!r}", where="--tier", hint=f"known: {', '.join(SURVIVES)}", got=kind)
    told = _pairs(rest, option="--tier", known=_TIER_KEYS)
    every = told.get("every", 1.0)
    if every < 1 or every != int(every):
        raise ConfigError(f"every is {every:g}", where="--tier", hint="a whole number of saves, 1 or more", got=every)
    return Tier(kind, every=int(every), write_s=told.get("write_s", 0.0), restore_s=told.get("restore_s", 0.0))


def parse_shares(text: str) -> dict[Grade, float]:
    """`process=0.2,node=0.8`; a grade that is not named has none. Raises ConfigError."""
    told = _pairs(text, option="--shares", known=GRADES)
    return {grade: told.get(grade, 0.0) for grade in GRADES}


def parse_restarts(text: str) -> dict[Grade, float]:
    """Seconds for all grades, or for each: `process=60,node=600,large_scale=3600`. Raises ConfigError."""
    if "=" not in text:
        return dict.fromkeys(GRADES, _number(text, option="--restart-s"))
    told = _pairs(text, option="--restart-s", known=GRADES)
    missing = [grade for grade in GRADES if grade not in told]
    if missing:
        raise ConfigError(f"{', '.join(missing)} has no time", where="--restart-s", hint="one number for all, or one for each", got=text)
    return {grade: told[grade] for grade in GRADES}


def _pairs(text: str, *, option: str, known: tuple[str, ...]) -> dict[str, float]:
    told: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise ConfigError(f"{part!r} is not understood", where=option, hint=f"KEY=NUMBER with {', '.join(known)}", got=part)
        told[key] = _number(value, option=option)
    return told


def _number(text: str, *, option: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{text!r} is no number of 0 or more", where=option, hint="seconds or shares, such as 60 or 0.15", got=text)
    return value
