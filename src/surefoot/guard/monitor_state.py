"""What judging remembers: windows, votes, findings to be heard. Saved with the weights, so a resumed run judges as it would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.core.records import Asks, Finding
from surefoot.heal.policy import HealState, heal_state_from_json
from surefoot.monitor.detectors import DetectorState, state_from_json


@dataclass
class MonitorState:
    """`pending` were made between two steps, by a canary or an audit, and are heard in the next judgement. `losses` are the newest ones."""

    heal: HealState = field(default_factory=HealState)
    detectors: DetectorState = field(default_factory=DetectorState)
    pending: tuple[Finding, ...] = ()
    losses: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "heal": self.heal.as_json(),
            "detectors": self.detectors.to_json(),
            "pending": [asdict(finding) for finding in self.pending],
            "losses": list(self.losses),
        }


def monitor_state_from_json(value: Mapping[str, Any]) -> MonitorState:
    """Of a checkpoint; what an older one does not hold begins anew."""
    return MonitorState(
        heal=heal_state_from_json(value.get("heal", {})),
        detectors=state_from_json(value.get("detectors", {})),
        pending=tuple(Finding(**{**found, "asks": Asks(found["asks"])}) for found in value.get("pending", ())),
        losses=tuple(map(float, value.get("losses", ()))),
    )
