"""What judging remembers: windows, votes, findings to be heard. Saved with the weights, so a resumed run judges as it would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.core.records import Asks, Finding
from surefoot.heal.policy import HealState, heal_state_from_json
from surefoot.monitor.canary import CanaryState, canary_from_json
from surefoot.monitor.detectors import DetectorState, state_from_json
from surefoot.monitor.ratios import Late, late_from_json
from surefoot.monitor.spikes import SpikeWatch, watch_from_json


@dataclass
class MonitorState:
    """`watch` is open while it is not known what became of a spike; `canary_anew`: a stage or batch began since the last canary.

    `stage` is the one that the newest step began in, and `config_word` names the settings it was made under. `canary_tokens` is how many
    the set had that `canary` is about: settings may make it another one between two starts. `pending` were made between two steps, by a
    canary or an audit, and are heard in the next judgement. `losses` are the newest ones. `late` is of the last save's own step.
    """

    heal: HealState = field(default_factory=HealState)
    detectors: DetectorState = field(default_factory=DetectorState)
    canary: CanaryState = field(default_factory=CanaryState)
    canary_anew: bool = False
    stage: int = -1
    config_word: str = ""
    canary_tokens: int = 0
    watch: SpikeWatch | None = None
    pending: tuple[Finding, ...] = ()
    losses: tuple[float, ...] = ()
    late: Late = field(default_factory=Late)

    def as_json(self) -> dict[str, Any]:
        return {
            "heal": self.heal.as_json(),
            "detectors": self.detectors.to_json(),
            "canary": self.canary.to_json(),
            "canary_anew": self.canary_anew,
            "stage": self.stage,
            "config_word": self.config_word,
            "canary_tokens": self.canary_tokens,
            "watch": self.watch.to_json() if self.watch is not None else None,
            "pending": [asdict(finding) for finding in self.pending],
            "losses": list(self.losses),
            "late": self.late.to_json(),
        }


def monitor_state_from_json(value: Mapping[str, Any]) -> MonitorState:
    """Of a checkpoint; what an older one does not hold begins anew."""
    return MonitorState(
        heal=heal_state_from_json(value.get("heal", {})),
        detectors=state_from_json(value.get("detectors", {})),
        canary=canary_from_json(value.get("canary", {})),
        stage=int(value.get("stage", -1)),
        config_word=str(value.get("config_word", "")),
        canary_anew=bool(value.get("canary_anew", False)),
        canary_tokens=int(value.get("canary_tokens", 0)),
        watch=watch_from_json(value["watch"]) if value.get("watch") else None,
        pending=tuple(Finding(**{**found, "asks": Asks(found["asks"])}) for found in value.get("pending", ())),
        losses=tuple(map(float, value.get("losses", ()))),
        late=late_from_json(value.get("late", {})),
    )
