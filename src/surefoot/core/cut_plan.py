"""What a model says about how it may be cut: names only. `model` makes it, `parallel` does what it says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CutPlan:
    """Names of submodules (fqn). `units` are gathered together under full sharding, in the order of the forward; the rest is the root's.

    `blocks` are those of them that repeat: recomputed one by one, and dealt to the stages of a pipeline in this order.
    """

    units: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
