"""Counters to rates, and which of them are too high: a pure function of what is kept of earlier samples and the newest one.

A counter that went back was set to zero (a driver reloaded, an adapter reset) and counts what it shows; one that went back from the last
sixteenth of 32 or 64 bits wrapped. Across a restart of the machine nothing is compared. What was not read is neither zero nor an alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from surefoot.coordinate.telemetry.records import NodeSample
from surefoot.coordinate.telemetry.rules import RULES, Rule
from surefoot.core.errors import ConfigError

_WRAPS: Final = (1 << 32, 1 << 64)
AGAIN_S: Final = 3600.0
"""A cause that comes and goes is told of once an hour: nobody reads more."""


@dataclass(frozen=True, slots=True)
class NodeAlarm:
    """`subject` is the part that it is about ("gpu 00000000:01:00.0"); `advice` what the rule asks for."""

    node: str
    rule: str
    subject: str
    reason: str
    value: float
    limit: float
    advice: str


@dataclass(frozen=True, slots=True)
class RateState:
    """What is kept between two samples, by (rule, subject): the last value, the growth within the window with its times, since when a level
    has been broken, the highest value seen, when an alarm was raised last, and the alarms that stand."""

    boot_id: str = ""
    last: Mapping[tuple[str, str], float] = field(default_factory=dict)
    grown: Mapping[tuple[str, str], tuple[tuple[float, float], ...]] = field(default_factory=dict)
    broken_since_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    highest: Mapping[tuple[str, str], float] = field(default_factory=dict)
    raised_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    standing: frozenset[tuple[str, str]] = frozenset()


def growth(before: float, now: float) -> float:
    """What a counter counted between two readings."""
    if now >= before:
        return now - before
    for width in _WRAPS:
        if width > before >= width - width / 16 and now < width / 16:
            return now + width - before
    return now


def judge(
    state: RateState, sample: NodeSample, *, limits: Mapping[str, float] | None = None, rules: Iterable[Rule] = RULES
) -> tuple[RateState, tuple[NodeAlarm, ...]]:
    """Raised once, and again when its cause was gone in between and AGAIN_S have passed. `limits` replace those of rules, by name."""
    if state.boot_id and sample.boot_id and state.boot_id != sample.boot_id:
        state = RateState()
    kept = _Kept(dict(state.last), dict(state.grown), dict(state.broken_since_s), dict(state.highest))
    alarms, standing, raised_s = [], set(), dict(state.raised_s)
    for rule in rules:
        limit = (limits or {}).get(rule.name, rule.limit)
        for subject, value in _values(rule, sample):
            key = (rule.name, subject)
            if value is None:
                if key in state.standing:
                    standing.add(key)  # a silent sensor takes nothing back
                continue
            measured, is_broken = _measure(rule, key, value, limit=limit, kept=kept, now_s=sample.mono_s)
            if is_broken:
                standing.add(key)
                if key not in state.standing and sample.mono_s - raised_s.get(key, -AGAIN_S) >= AGAIN_S:
                    raised_s[key] = sample.mono_s
                    reason = _reason(rule, subject, measured, limit)
                    alarms.append(NodeAlarm(sample.node, rule.name, subject, reason, measured, limit, rule.advice))
    boot_id = sample.boot_id or state.boot_id
    newest = RateState(boot_id, kept.last, kept.grown, kept.broken_since_s, kept.highest, raised_s, frozenset(standing))
    return newest, tuple(alarms)


@dataclass(slots=True)
class _Kept:
    last: dict[tuple[str, str], float]
    grown: dict[tuple[str, str], tuple[tuple[float, float], ...]]
    broken_since_s: dict[tuple[str, str], float]
    highest: dict[tuple[str, str], float]


def _measure(rule: Rule, key: tuple[str, str], value: float, *, limit: float, kept: _Kept, now_s: float) -> tuple[float, bool]:
    """What is compared with the limit, and whether it is over it (or under it) for long enough."""
    if rule.kind == "growth":
        grown = kept.grown.get(key, ())
        if (more := growth(kept.last[key], value) if key in kept.last else 0.0) > 0.0:
            grown = (*grown, (now_s, more))
        kept.last[key] = value
        kept.grown[key] = grown = tuple(one for one in grown if one[0] > now_s - rule.window_s)
        measured = sum(more for _, more in grown)
        return measured, measured > limit
    if rule.kind == "drop":
        kept.highest[key] = max(value, kept.highest.get(key, value))
        broken, measured = value < kept.highest[key], value
    else:
        broken, measured = (value > limit if rule.kind == "above" else value < limit), value
    if not broken:
        kept.broken_since_s.pop(key, None)
        return measured, False
    since_s = kept.broken_since_s.setdefault(key, now_s)
    return measured, now_s - since_s >= rule.window_s


def _values(rule: Rule, sample: NodeSample) -> Iterator[tuple[str, float | None]]:
    """(subject, value) of each part that the rule is about; None where nobody said."""
    if rule.of == "host":
        yield "host", rule.read(sample.host)
    parts: Mapping[str, tuple[object, ...]] = {"gpu": sample.gpus, "port": sample.ports, "disk": sample.disks, "node": (sample,)}
    for part in parts.get(rule.of, ()):
        name = getattr(part, "id", None) or getattr(part, "path", None)
        yield (f"{rule.of} {name}" if name else rule.of), rule.read(part)


def _reason(rule: Rule, subject: str, value: float, limit: float) -> str:
    of = {"growth": f"{value:g} within {rule.window_s:g} s, at most {limit:g} are tolerated", "drop": f"down to {value:g}"}
    words = of.get(rule.kind, f"{value:.4g}, the limit is {limit:g}" + (f", for {rule.window_s:g} s" if rule.window_s else ""))
    return f"{subject}: {rule.title}: {words}"


def limits_of(overrides: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The limits that somebody set, by rule. Raises ConfigError for a name that no rule has."""
    found, known = dict(overrides), {rule.name for rule in RULES}
    if unknown := sorted(found.keys() - known):
        raise ConfigError(
            f"launch.telemetry_limits: no rule is called {unknown[0]!r}", where="[launch]", hint=f"there are {', '.join(sorted(known))}"
        )
    return found
