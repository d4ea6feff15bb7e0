"""Detectors: from what a step showed to what is wrong with it. Pure, torch-free, the same for a live run and for a file of its losses."""

from surefoot.monitor.detectors.catalog import ADVISORY, OFF, RULES, Rule, bindings, bound_by_hand
from surefoot.monitor.detectors.observation import Observation, observation_of
from surefoot.monitor.detectors.observing import observe, rebased
from surefoot.monitor.detectors.state import DetectorState, state_from_json
from surefoot.monitor.detectors.thresholds import Thresholds, thresholds_of

__all__ = [
    "ADVISORY",
    "OFF",
    "RULES",
    "DetectorState",
    "Observation",
    "Rule",
    "Thresholds",
    "bindings",
    "bound_by_hand",
    "observation_of",
    "observe",
    "rebased",
    "state_from_json",
    "thresholds_of",
]
