"""What a probe of a node found. Records only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "failed", "hung", "unknown"]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`hung`: it did not answer in time, which is a finding. `unknown`: there was nothing to ask, so nothing is said against the node.

    `figures` are what was measured, by name with its unit.
    """

    name: str
    verdict: Verdict
    reason: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    took_s: float = 0.0


def is_sound(results: tuple[ProbeResult, ...]) -> bool:
    """Whether nothing was found against the node: what is unknown is not."""
    return all(result.verdict in ("ok", "unknown") for result in results)
