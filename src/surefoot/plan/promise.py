"""What a plan promised of a run, in one line that the run begins with."""

from __future__ import annotations

from surefoot.core.sections import PlanSection
from surefoot.core.units import show_bytes

NOT_VALIDATED = "not validated: no sweep of your own runs stands behind it"


def promise(section: PlanSection) -> str:
    """Empty where no plan was made."""
    if not section.law:
        return ""
    parts = [f"plan by {section.law}", "validated by a sweep" if section.validated else NOT_VALIDATED]
    if section.loss:
        band = f" ({section.loss_low:.3f} to {section.loss_high:.3f})" if section.loss_high else ""
        parts.append(f"loss {section.loss:.3f}{band} at the end")
    if section.step_s:
        parts.append(f"{section.step_s:.3g} s a step")
    if section.memory_bytes:
        parts.append(f"{show_bytes(section.memory_bytes)} on the fullest device")
    return "; ".join(parts)
