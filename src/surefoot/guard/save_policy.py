"""When to save: a pure decision on values that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection

from surefoot.core.records import Signals
from surefoot.core.sections import CheckpointSection

AUTO_START_STEPS = 500
"""`interval_steps = "auto"` before anything was measured."""


def reason_to_save(
    step: int,
    signals: Signals,
    section: CheckpointSection,
    *,
    num_steps: int,
    last_saved_step: int,
    auto_steps: int = AUTO_START_STEPS,
) -> str | None:
    """Why the state after `step` finished steps is saved, or None. `signals` is the exchange of that step, so its clock is one step old.

    `auto_steps` is what "auto" stands for at present; it is counted from the last save, for it may change between two.
    A step that is saved already is never saved twice. The last step always is: a finished run ends with a commit.
    """
    if step == last_saved_step:
        return None
    if step >= num_steps:
        return "the run is finished"
    if signals.leave_requested:
        return "somebody asked the run to leave"
    if signals.save_requested:
        return "somebody asked for a save"
    if section.interval_steps == "auto":
        if step - last_saved_step >= auto_steps:
            return f"every {auto_steps} steps, as measured"
    elif section.interval_steps and step % section.interval_steps == 0:
        return f"every {section.interval_steps} steps"
    if section.milestone_steps and step % section.milestone_steps == 0:
        return f"milestone, every {section.milestone_steps} steps"
    if step in section.keep_steps:
        return "one of keep_steps"
    if section.interval_s and signals.save_clock_s >= section.interval_s:
        return f"every {section.interval_s:g} s"
    return None


def is_kept_for_good(step: int, *, milestone_steps: int, boundaries: Collection[int]) -> bool:
    """Whether a checkpoint of this very step is one that retention keeps when all around it go: one of a later step is not in its place."""
    return (milestone_steps > 0 and step % milestone_steps == 0) or step in boundaries
