"""The canary: the held-out loss that was saved with a checkpoint, against that of the weights that were loaded from it. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from surefoot.core.records import Manifest
from surefoot.guard.replay import Mode, relative_difference
from surefoot.guard.trajectory import Facts, facts_of, repeats_bits


@dataclass(frozen=True, slots=True)
class Canary:
    """`within`: the difference is one that another machine may make. `relative` is relative to the saved loss."""

    agrees: bool
    within: bool
    mode: Mode
    relative: float
    reason: str


def compare_canary(saved: float, found: float, *, made_under: Manifest, now: Facts, tolerance: float) -> Canary:
    """Bits where config, data, surroundings and layout are those of the save; else the tolerance; nothing where the config differs."""
    relative = relative_difference(saved, found)
    within = relative <= tolerance
    then = facts_of(asdict(made_under))
    if then.identity != now.identity:
        return Canary(True, within, Mode.SHOWN, relative, "saved under another config or data: the held-out loss is no proof")
    mode = Mode.BITS if then.surroundings == now.surroundings and repeats_bits(now) else Mode.TOLERANCE
    agrees = relative == 0.0 if mode is Mode.BITS else within
    share = f"{relative:.2g}" if math.isfinite(relative) else "not finite"
    wanted = "the same bits" if mode is Mode.BITS else f"at most {tolerance:g}"
    reason = f"its held-out loss was {saved!r} when it was saved, and is {found!r} (relative difference {share}, wanted {wanted})"
    return Canary(agrees, within, mode, relative, reason)
