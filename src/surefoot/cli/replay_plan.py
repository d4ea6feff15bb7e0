"""What a replay is made of, before anything is computed: the run as its ledger tells it, where to start, what to force. Writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.checkpoint.manifest import read_manifest
from surefoot.core.errors import CheckpointError, ConfigError
from surefoot.core.identity import STAGES, code_hashes, other_sections, section_hashes
from surefoot.core.records import CheckpointRef, LedgerEntry, SkipUpdate
from surefoot.core.sections import RunConfig
from surefoot.guard.script import Script
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.interventions import (
    Intervention,
    Segment,
    began_here,
    interventions_of,
    segment_at,
    segments_of,
    usable_starts,
)
from surefoot.observe.ledger import LEDGER_NAME, read_ledger
from surefoot.observe.lineage import fold_lineage
from surefoot.observe.run_dir import CHECKPOINTS_NAME

_CAN_BE_LEFT_OUT = ("skip", "block", "rate")


@dataclass(frozen=True, slots=True)
class Original:
    """A run as its ledger tells it."""

    run_dir: Path
    entries: Sequence[LedgerEntry]
    segments: tuple[Segment, ...]
    interventions: tuple[Intervention, ...]
    starts: tuple[CheckpointRef | None, ...]
    left_out: tuple[Intervention, ...]

    def between(self, first_step: int, last_step: int) -> tuple[Segment, ...]:
        """Who computed these steps."""
        return tuple(part for part in self.segments if part.first_step <= last_step and (part.last_step or last_step) >= first_step)


def read_original(run_dir: Path, *, from_step: int, num_steps: int, without: Sequence[int]) -> Original:
    """`starts` are what a replay of steps from_step + 1 on can begin with, best first; None is step 0.

    Raises ConfigError for a run without steps and for what cannot be left out, CheckpointError when nothing is left to start from.
    """
    entries = read_ledger(run_dir / LEDGER_NAME)
    lineage = fold_lineage(entries)
    segments = segments_of(entries, lineage)
    if not segments:
        raise ConfigError("the run has not begun: its ledger knows of no attempt", where=str(run_dir), hint=f"surefoot train {run_dir}")
    found = interventions_of(entries, segments)
    left_out = tuple(_named(seq, found, last_step=from_step + num_steps) for seq in dict.fromkeys(without))
    before = min([from_step + 1, *(one.step for one in left_out if one.kind != "block")])
    taken = [entry.seq for entry in fold_blocks(entries).taken]
    max_blocks = min((taken.index(one.seq) for one in left_out if one.kind == "block"), default=len(taken))
    starts: list[CheckpointRef | None] = [
        ref for ref in usable_starts(lineage, segments, before_step=before) if _num_blocks(run_dir, ref) <= max_blocks
    ]
    if began_here(segments):
        starts.append(None)
    if not starts:
        raise _nothing_left(run_dir, before=before, first_step=segments[0].first_step)
    return Original(run_dir, entries, segments, found, tuple(starts), left_out)


def script_for(original: Original, *, first_step: int, last_step: int) -> Script:
    """Every decision of the line from `first_step` on that a step by itself would not take again."""
    left_out = {one.seq for one in original.left_out}
    within = original.between(first_step, last_step)
    skips = [one for one in original.interventions if one.kind == "skip" and one.seq not in left_out]
    rotations = [(part.first_step, part.rotation) for part in within]
    rates = [(part.first_step, next((factor for seq, factor in reversed(part.rates) if seq not in left_out), 1.0)) for part in within]
    return Script(
        skips={one.step: SkipUpdate(one.rule, one.reason) for one in skips if first_step <= one.step <= last_step},
        rates=tuple(rates) if any(factor != 1.0 for _, factor in rates) else (),
        rotations=tuple(rotations) if any(rotation for _, rotation in rotations) else (),
    )


def refuse_other_config(original: Original, config: RunConfig, *, first_step: int, last_step: int) -> None:
    """Raises CheckpointError when some of these steps were computed under settings, or code of a factory, that are no longer there."""
    now = section_hashes(config) | code_hashes(config)
    for segment in original.between(first_step, last_step):
        made_under = segment.facts.get("config_hashes") or {}
        others = [section for section in other_sections(made_under, now=now) if section != STAGES]
        if others:
            until = min(segment.last_step or last_step, last_step)
            raise CheckpointError(
                f"steps {max(segment.first_step, first_step)} to {until} were computed under another "
                f"{', '.join(f'[{section}]' for section in others)} (attempt {segment.attempt}), and the folder holds what came after",
                where=str(original.run_dir),
                hint=f"replay a range behind step {until}" if segment.last_step else "put the settings back, in a copy of the folder",
            )


def changed_surroundings(original: Original, environment: dict[str, object], *, first_step: int, last_step: int) -> Iterator[str]:
    """What else decides bits and is not what it was, in words. `environment` is what the replay ran in."""
    for segment in original.between(first_step, last_step):
        was = dict(segment.facts.get("environment") or {})
        changed = [name for name in sorted({*was, *environment}) if was.get(name) != environment.get(name)]
        if was and changed:
            words = ", ".join(f"{name} was {was.get(name)}, is {environment.get(name)}" for name in changed)
            yield f"attempt {segment.attempt} ran elsewhere, so its bits may be others: {words}"


def _named(seq: int, found: Sequence[Intervention], *, last_step: int) -> Intervention:
    there = [one for one in found if one.kind in _CAN_BE_LEFT_OUT and one.step <= last_step]
    one = next((one for one in found if one.seq == seq), None)
    if one is not None and one in there:
        return one
    listed = "; ".join(f"{other.seq} ({other.event} at step {other.step})" for other in there) or "none"
    if one is None:
        what = f"entry {seq} of the ledger is no intervention of the present line"
    elif one.kind == "rollback":
        what = f"entry {seq} is a roll-back: the line that came of it has no step of the other one, only what was left out then"
    elif one.kind == "none":
        what = f"entry {seq}, {one.event}, changed no bit"
    else:
        what = f"entry {seq} begins at step {one.step}, behind the last one that is asked for"
    raise ConfigError(what, where="--without", hint=f"up to step {last_step} there are: {listed}")


def _num_blocks(run_dir: Path, ref: CheckpointRef) -> int:
    """How many entries of the log its state was trained under. What cannot be read is no start."""
    try:
        held = read_manifest(run_dir / CHECKPOINTS_NAME / ref.id).cursor.get("blocklist")
    except CheckpointError:
        return 1 << 60
    return int(held["count"]) if isinstance(held, dict) else 0


def _nothing_left(run_dir: Path, *, before: int, first_step: int) -> CheckpointError:
    what = f"no checkpoint of the present line from before step {before} is left"
    if first_step > 1:
        what += f", and the line begins with step {first_step}, at a checkpoint from elsewhere"
    return CheckpointError(what, where=str(run_dir), hint=f"see `surefoot checkpoint list {run_dir}`")


def recorded_to(segments: Sequence[Segment], steps: Sequence[int]) -> int:
    """The last of the recorded `steps` that is on the line."""
    return max((step for step in steps if segment_at(segments, step) is not None), default=0)
