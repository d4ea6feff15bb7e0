"""Verified recovery: the steps after a resume, compared with what an earlier attempt recorded for them. Pure.

The compared steps *are* the next steps, so a replay costs nothing. Where nothing that decides a bit has changed, bits are asked: the loss,
the gradient norm and the samples. Else the loss may differ by a relative tolerance. A moment that was changed shows in the second step: the
first one only reads the weights.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal


class Mode(StrEnum):
    """What a recorded step can be asked for: its bits, a loss within the tolerance, or nothing but a figure to show. Best first."""

    BITS = "bits"
    TOLERANCE = "tolerance"
    SHOWN = "none"


_ORDER = list(Mode)


@dataclass(frozen=True, slots=True)
class Figures:
    """What identifies one execution of a step: its samples, and what they did to the model."""

    step: int
    loss: float
    grad_norm: float
    next_sample: int
    num_live_tokens: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step of `attempt` that went on from the same state, and what may be asked of a repetition."""

    figures: Figures
    attempt: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the replay of `checkpoint` left the recorded path. `seen` are the bits of loss and norm; `within`: the tolerance allows it."""

    checkpoint: str
    step: int
    what: str
    reason: str
    within: bool
    relative: float
    seen: str


@dataclass(frozen=True, slots=True)
class Replay:
    """The comparison after one restore: `recorded` holds the steps after `from_step` without a gap, `num_done` of them are done.

    `largest` is the largest relative difference in loss so far. `cut_because` says why later steps that were recorded are not among them.
    """

    checkpoint: str
    from_step: int
    recorded: tuple[Recorded, ...]
    tolerance: float
    num_done: int = 0
    largest: float = 0.0
    cut_because: str = ""

    @property
    def is_over(self) -> bool:
        return self.num_done >= len(self.recorded)

    @property
    def mode(self) -> Mode:
        """The weakest of its steps."""
        return max((step.mode for step in self.recorded), key=_ORDER.index, default=Mode.SHOWN)


def compare(recorded: Recorded, seen: Figures, *, checkpoint: str, tolerance: float) -> Difference | None:
    """What differs in the repetition of one step, or None."""
    was = recorded.figures
    relative = relative_difference(was.loss, seen.loss)
    within = relative <= tolerance
    wrong = ""
    if recorded.mode != Mode.SHOWN:
        if (was.next_sample, was.num_live_tokens) != (seen.next_sample, seen.num_live_tokens):
            wrong, within = "samples", False
        elif recorded.mode == Mode.BITS:
            wrong = next((name for name in ("loss", "grad_norm") if not _same(getattr(was, name), getattr(seen, name))), "")
        elif not within:
            wrong = "loss"
    if not wrong:
        return None
    return Difference(checkpoint, seen.step, wrong, _words(wrong, recorded, seen, relative, tolerance), within, relative, bits_of(seen))


def advance(replay: Replay, seen: Figures) -> tuple[Replay, Difference | None]:
    """After one more step."""
    if replay.is_over:
        return replay, None
    recorded = replay.recorded[replay.num_done]
    difference = compare(recorded, seen, checkpoint=replay.checkpoint, tolerance=replay.tolerance)
    largest = max(replay.largest, relative_difference(recorded.figures.loss, seen.loss))
    return replace(replay, num_done=replay.num_done + 1, largest=largest), difference


@dataclass(frozen=True, slots=True)
class GoOn:
    """From where the run is; `checkpoint` names another one to go on from first."""

    rule: Literal["outvoted", "not-reproduced"]
    reason: str
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class FallBack:
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopHere:
    reason: str


def after_difference(
    now: Difference, *, before: Sequence[Difference], older: Sequence[str], asked_for: bool = False
) -> GoOn | FallBack | StopHere:
    """What follows from a replay that differed. Bounded: each round takes one of `older` away.

    `before` are the differences since a replay was last verified, oldest first; `older` the checkpoints that could be tried, best first.
    A checkpoint that a person `asked_for` by name is never replaced by another: the person must look.
    """
    if asked_for:
        return StopHere(f"{now.checkpoint} was asked for by name and does not repeat what was recorded after it: {now.reason}")
    others = {difference.checkpoint: difference for difference in before if difference.checkpoint != now.checkpoint}
    twin = next((other for other in others.values() if (other.step, other.seen) == (now.step, now.seen)), None)
    if twin is not None:
        return GoOn(
            "outvoted", f"{twin.checkpoint} and {now.checkpoint} give the same bits at step {now.step}: the recorded ones are wrong"
        )
    near = [difference for difference in (*others.values(), now) if difference.within]
    untried = [checkpoint for checkpoint in older if checkpoint not in others and checkpoint != now.checkpoint]
    if near and (len(near) > 1 or not untried):
        newest = near[0].checkpoint
        how_many = f"{len(near)} checkpoints differ" if len(near) > 1 else f"{newest} differs"
        reason = f"{how_many}, and only within the tolerance: this machine does not repeat its own bits"
        return GoOn("not-reproduced", reason, None if newest == now.checkpoint else newest)
    if untried:
        return FallBack(untried[0], now.reason)
    return StopHere(f"no checkpoint repeats what was recorded after it; the last, {now.checkpoint}: {now.reason}")


def relative_difference(recorded: float, seen: float) -> float:
    """Relative to the recorded value; 0 for the same bits, infinite where only one is a number."""
    if _same(recorded, seen):
        return 0.0
    if not (math.isfinite(recorded) and math.isfinite(seen)):
        return math.inf
    return abs(seen - recorded) / max(abs(recorded), 1e-300)


def bits_of(figures: Figures) -> str:
    """Loss and norm as hex digits: equal when, and only when, the bits are."""
    return struct.pack(">dd", figures.loss, figures.grad_norm).hex()


def to_json(recorded: Sequence[Recorded]) -> list[dict[str, Any]]:
    """For a broadcast: floats as hex, which strict JSON takes whatever they are."""
    rows = [asdict(step) for step in recorded]
    for row in rows:
        row["figures"] |= {name: float(row["figures"][name]).hex() for name in ("loss", "grad_norm")}
    return rows


def from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[Recorded, ...]:
    made = []
    for row in rows:
        figures = {**row["figures"], **{name: float.fromhex(row["figures"][name]) for name in ("loss", "grad_norm")}}
        made.append(Recorded(Figures(**figures), row["attempt"], Mode(row["mode"])))
    return tuple(made)


def _same(one: float, other: float) -> bool:
    return struct.pack(">d", one) == struct.pack(">d", other) or (math.isnan(one) and math.isnan(other))


def _words(wrong: str, recorded: Recorded, seen: Figures, relative: float, tolerance: float) -> str:
    was = recorded.figures
    where = f"step {seen.step}: attempt {recorded.attempt} recorded"
    if wrong == "samples":
        return (
            f"{where} {was.num_live_tokens} tokens up to sample {was.next_sample}, "
            f"the replay took {seen.num_live_tokens} up to sample {seen.next_sample}"
        )
    name = "gradient norm" if wrong == "grad_norm" else "loss"
    old, new = getattr(was, wrong), getattr(seen, wrong)
    asked = "the same bits" if recorded.mode == Mode.BITS else f"at most {tolerance:g}"
    share = relative if wrong == "loss" else relative_difference(old, new)
    return f"{where} a {name} of {old!r}, the replay gave {new!r} (relative difference {share:.2g}, wanted {asked})"
