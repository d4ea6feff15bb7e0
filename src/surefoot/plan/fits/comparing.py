"""Whether the losses of several runs may be compared: a schedule that was cut short, or never decayed, is a handicap, not a finding. Pure.

A learning rate that has not come down yet costs more than most differences that a sweep is made to see. So a cosine must be as long as its
run (Hoffmann et al., arXiv 2203.15556, appendix B), while WSD may branch off at any step and come down there (arXiv 2405.18392).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["wsd", "cosine", "constant"]

HIGH = 0.05
"""A rate that ended within this share of the peak above where its schedule ends counts as having come down."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run got. `lr_share` is its last learning rate over the peak, `final_share` where its schedule ends."""

    name: str
    kind: str
    step: int
    num_steps: int
    lr_share: float
    final_share: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.step >= self.num_steps

    @property
    def has_come_down(self) -> bool:
        return self.kind != "constant" and self.lr_share <= self.final_share + HIGH


def unequal(runs: Sequence[Standing]) -> list[str]:
    """One sentence for each run that must not be compared with the others as it stands; empty where all are alike."""
    told = [_cut_short(run) for run in runs if not run.is_finished]
    settled = [run for run in runs if run.is_finished and run.has_come_down]
    flat = [run for run in runs if run.is_finished and not run.has_come_down]
    if settled:
        told += [
            f"{run.name} ended at {run.lr_share:.0%} of its peak rate ({run.kind}), {settled[0].name} at {settled[0].lr_share:.0%}: "
            "a loss before the decay is higher than after it"
            for run in flat
        ]
    return told


def _cut_short(run: Standing) -> str:
    where = f"{run.name} stands at step {run.step} of {run.num_steps}, its rate at {run.lr_share:.0%} of the peak"
    if run.kind == "cosine":
        return (
            f"{where}: a cosine cut short is not the run of {run.step} steps, whose rate would have come down by then; "
            "do not compare it with finished runs"
        )
    if run.kind == "wsd":
        return f"{where}: its cooldown is not over; `surefoot checkpoint branch` makes a shorter run of it that may be compared"
    return f"{where}: it is not finished"
