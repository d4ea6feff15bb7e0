"""Which nodes have been silent for how long, by the coordinator's own clock alone. A pure function of when each was heard.

Somebody who did not listen cannot say that others were silent: what the coordinator itself lost (stopped, starved, swapped out) between two
looks is added to every lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """`look_s` is how often `look` is called when all is well; a longer gap is a pause of our own.

    A node kills its ranks at `fence_s`, which is before it lapses at `lapse_s`, which is so early that all know by `dead_s`.
    """

    suspect_s: float = 3.0
    dead_s: float = 5.0
    look_s: float = 0.1

    @property
    def pause_s(self) -> float:
        """A gap between two looks that is longer was a pause. A shorter one is a busy turn: what came meanwhile was read after it."""
        return max(0.2 * self.dead_s, 2 * self.look_s)

    @property
    def lapse_s(self) -> float:
        return self.dead_s - min(2 * self.look_s, 0.05 * self.dead_s)

    @property
    def fence_s(self) -> float:
        return 0.9 * self.dead_s


@dataclass(frozen=True, slots=True)
class Silence:
    """When each watched node was last heard. `looked_s` is None before the first look."""

    heard_s: Mapping[str, float] = field(default_factory=dict)
    suspects: frozenset[str] = frozenset()
    looked_s: float | None = None


@dataclass(frozen=True, slots=True)
class SilenceChange:
    node: str
    kind: Literal["suspect", "back", "lapsed"]
    silent_s: float
    reason: str


def look(
    silence: Silence, *, heard: Iterable[str], gone: Iterable[str] = (), now_s: float, limits: SilenceLimits
) -> tuple[Silence, tuple[SilenceChange, ...]]:
    """`heard` since the last look, `gone` are watched no longer. A lapsed node is watched no longer either, until it is heard again."""
    times_s = _extended(silence, now_s=now_s, limits=limits)
    for node in heard:
        times_s[node] = now_s
    for node in gone:
        times_s.pop(node, None)
    changes = []
    suspects = set(silence.suspects & times_s.keys())
    for node in sorted(suspects):
        if now_s - times_s[node] < limits.suspect_s:
            suspects.discard(node)
            changes.append(SilenceChange(node, "back", now_s - times_s[node], "heard again"))
    for node, time_s in list(times_s.items()):
        silent_s = now_s - time_s
        if silent_s >= limits.lapse_s:
            del times_s[node]
            suspects.discard(node)
            changes.append(SilenceChange(node, "lapsed", silent_s, f"not heard for {silent_s:.1f} s, the limit is {limits.lapse_s:g} s"))
        elif silent_s >= limits.suspect_s and node not in suspects:
            suspects.add(node)
            changes.append(SilenceChange(node, "suspect", silent_s, f"not heard for {silent_s:.1f} s"))
    return Silence(times_s, frozenset(suspects), now_s), tuple(changes)


def _extended(silence: Silence, *, now_s: float, limits: SilenceLimits) -> dict[str, float]:
    """The times, moved on by what we slept."""
    gap_s = 0.0 if silence.looked_s is None else now_s - silence.looked_s
    lost_s = gap_s - limits.look_s if gap_s > limits.pause_s else 0.0
    if not lost_s:
        return dict(silence.heard_s)
    return {node: time_s + lost_s for node, time_s in silence.heard_s.items()}
