"""What an incident got into: `incidents/<id>/contamination.json` and `.md`, from the ledger, the checkpoints and the metrics. No torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from surefoot.checkpoint.manifest import read_manifest
from surefoot.core import strict_json
from surefoot.core.durable import write_atomic
from surefoot.core.errors import SurefootError
from surefoot.core.events import Event
from surefoot.core.records import CheckpointRef, LedgerEntry
from surefoot.core.units import show_duration
from surefoot.heal.contamination import Contamination, Salvage, WayBack, contaminated, salvage
from surefoot.observe.ledger import read_ledger
from surefoot.observe.lineage import Lineage, fold_lineage

logger = logging.getLogger(__name__)

CONTAMINATION_FORMAT: Final = 1
CONTAMINATION_NAME: Final = "contamination"
_MOVES: Final = frozenset({Event.EPISODE_OPENED.value, Event.EPISODE_DIAGNOSED.value})
_NUM_TIMED_STEPS: Final = 200
_LOOK_BACK_STEPS: Final = 20_000
"""Before the window: further back no evaluation foretells anything, and the rows of a long run are many."""
_FROZEN_LOSSES: Final = ("canary_loss", "val_loss")
"""Columns of the metrics that are of a frozen set, the quieter one first."""


def write_contamination(ledger: Path, entry: LedgerEntry) -> Path | None:
    """Local, for rank 0, after `entry` stands in `ledger`; does nothing but where an episode is opened, or its cause is named.

    Never raises into the step: the ledger holds what it is made from, and `surefoot checkpoint list --window` tells the same.
    """
    if entry.event not in _MOVES:
        return None
    episode = str(entry.fields.get("episode") or f"e{entry.seq}")
    folder = ledger.parent / "incidents" / episode
    try:
        report = contamination_report(ledger, entry, episode=episode)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{CONTAMINATION_NAME}.json"
        write_atomic(path, strict_json.dumps(report, indent=2))
        write_atomic(folder / f"{CONTAMINATION_NAME}.md", _page(report))
    except (OSError, SurefootError) as error:
        logger.warning("what %s got into could not be written: %s", episode, error)
        return None
    return path


def contamination_report(ledger: Path, entry: LedgerEntry, *, episode: str) -> dict[str, Any]:
    """Local. The window is from the first step that is held against the run (after an audit: the one behind the last clean audit).

    What was saved and evaluated under later attempts, as after a roll-back, is no part of the incident.
    """
    run_dir = ledger.parent
    entries = read_ledger(ledger, up_to_damage=True)
    opened = next((known for known in entries if f"e{known.seq}" == episode), entry)
    lineage = fold_lineage(entries)
    first, last = _window(entry)
    standing = [ref for ref in lineage.refs if ref.id not in lineage.retired and ref.attempt <= opened.attempt]
    found = contaminated_here(run_dir / "checkpoints", lineage, standing, steps=(first, last), step=last)
    rows = _rows(run_dir, range(max(1, first - _LOOK_BACK_STEPS), last + 1), attempt=opened.attempt)
    kept = salvage(_frozen_path(rows), first_step=first)
    return {
        "format_version": CONTAMINATION_FORMAT,
        "episode": episode,
        "rule": entry.rule,
        "window": [first, last],
        "affected": list(found.affected),
        "clean": list(found.clean),
        "newest_clean": _way(found.newest, rows),
        "choice": _way(found.choice, rows),
        "reason": found.reason,
        "salvage": asdict(kept),
        "proposal": _proposal(found, kept),
    }


def contaminated_here(
    root: Path, lineage: Lineage, standing: Sequence[CheckpointRef], *, steps: tuple[int, int], step: int
) -> Contamination:
    """Local. With the hosts that wrote and proved each checkpoint, as manifests and ledger tell them."""
    proven_on = {
        name: [look.host for look in looks if look.event == Event.CHECKPOINT_PROVEN and look.host] for name, looks in lineage.looks.items()
    }
    written_on = {ref.id: _writers(root / ref.id) for ref in standing}
    first, last = steps
    return contaminated(standing, first_step=first, last_step=last, step=step, proven_on=proven_on, written_on=written_on)


def _writers(folder: Path) -> set[str]:
    try:
        return {file.host for file in read_manifest(folder).files if file.host}
    except (OSError, SurefootError):
        return set()


def _window(entry: LedgerEntry) -> tuple[int, int]:
    steps = entry.fields.get("steps")
    if isinstance(steps, Sequence) and len(steps) == 2:
        first, last = steps
    else:
        first, last = entry.fields.get("onset_step", entry.step), entry.fields.get("detected_step", entry.step)
    return max(1, int(first)), max(1, int(first), int(last))


def _rows(run_dir: Path, steps: range, *, attempt: int) -> list[dict[str, Any]]:
    """Of the metrics, in the order of the steps: the newest attempt of each, up to `attempt`."""
    from surefoot.observe.metrics import read_steps  # pyarrow starts threads: after the fork

    by_step: dict[int, dict[str, Any]] = {}
    for row in read_steps(run_dir, steps=steps, columns=(*_FROZEN_LOSSES, "step_s")).to_pylist():
        if int(row["attempt"]) <= attempt:
            by_step[int(row["step"])] = row
    return [by_step[number] for number in sorted(by_step)]


def _frozen_path(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    for name in _FROZEN_LOSSES:
        path = [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
        if path:
            return path
    return []


def _way(way: WayBack | None, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """With what the steps that are trained again take, at the pace of now."""
    if way is None:
        return None
    times = [float(row["step_s"]) for row in rows[-_NUM_TIMED_STEPS:] if row.get("step_s") is not None]
    return {**asdict(way), "cost_s": round(way.cost_steps * median(times), 3) if times else None}


def _proposal(found: Contamination, kept: Salvage) -> str:
    back = f"go back to {found.choice.id}" if found.choice is not None else "start anew: no clean checkpoint is left"
    return f"keep what is there, or {back}" if kept.may_be_kept else back


def _page(report: Mapping[str, Any]) -> str:
    first, last = report["window"]
    choice = report["choice"]
    cost = ""
    if choice is not None:
        took = f", about {show_duration(choice['cost_s'])} of training" if choice["cost_s"] is not None else ""
        cost = f"- cost of going back: {choice['cost_steps']} steps{took}\n"
    return (
        f"# What {report['episode']} got into\n\n"
        f"- rule: `{report['rule']}`\n"
        f"- steps that are held against the run: {first} to {last}\n"
        f"- checkpoints that hold them: {', '.join(report['affected']) or 'none'}\n"
        f"- clean ones: {', '.join(report['clean']) or 'none'}\n"
        f"- way back: {report['reason']}\n"
        f"{cost}"
        f"- salvage: {report['salvage']['reason']}\n"
        f"- proposal: {report['proposal']}\n"
    )
