"""Where a run stands, read from its folder alone: being made, live, stopped, killed, finished or damaged."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import Incompatible, SurefootError
from surefoot.core.events import Event
from surefoot.core.holder import LockRecord, seconds_between
from surefoot.core.records import CheckpointRef, LedgerEntry, Phase, Rung
from surefoot.observe.halts import is_hold, standing_halt
from surefoot.observe.ledger import LEDGER_NAME, manifest_positions, read_ledger, what_is_missing
from surefoot.observe.lineage import Lineage, fold_lineage
from surefoot.observe.live import LiveRecord, is_held, read_live, read_lock
from surefoot.observe.metrics import read_steps
from surefoot.observe.run_dir import CONFIG_NAME, require_run
from surefoot.observe.wishes import open_wish

_RATE_ROWS = 50  # Enough to level out a save or an evaluation, few enough to follow a change of pace.
_NEWEST_ROWS = 2000

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Everything that was read, before anything is concluded."""

    entries: Sequence[LedgerEntry]
    lineage: Lineage
    rows: Sequence[Row]
    lock: LockRecord | None
    live: LiveRecord | None
    config: Mapping[str, Any]
    problems: Sequence[str]
    ledger_fault: bool


def status_of(run_dir: Path, *, clock: Clock | None = None) -> dict[str, Any]:
    """The answer of `surefoot status`: stable keys, null where nothing is known yet. Never writes.

    Raises ConfigError when there is no such folder, or it is none of a run. What is damaged is named under `problems` and the rest is told.
    """
    clock = clock or SystemClock()
    require_run(run_dir)
    seen = _read(run_dir, clock=clock)
    step = _step(seen)
    row = _row_at(seen.rows, step=step)
    standing = _standing(seen.lineage)
    head = standing[-1] if standing else None
    return {
        "run": str(_setting(seen.config, "run", "name") or run_dir.resolve().name),
        "phase": _phase(seen),
        "step": step,
        "attempt": _attempt(seen),
        "tokens": row["tokens"] if row else (0 if step == 0 else None),
        "loss": row["loss"] if row else None,
        "val_loss": _newest_val_loss(seen.rows, step=step),
        "state_digest": (head.state_digest or None) if head else None,
        "finished": seen.lineage.counters.finished,
        "verdict": _verdict(seen, row),
        "last_checkpoint": _checkpoint(head),
        "last_step_age_s": _age_s(seen.rows, now_utc=clock.utc()),
        "goodput": None,
        "mfu": _mfu(seen.rows, row),
        "eta_s": _eta_s(seen, step=step),
        "last_exercised": _last_exercised(seen.entries),
        "prover": _prover(standing),
        "halted": _halted(seen.entries),
        "next_start": _next_start(seen),
        "episode": _open_episode(seen.entries),
        "num_steps": _setting(seen.config, "train", "num_steps"),
        "generation": seen.lineage.counters.generation,
        "num_restarts": seen.lineage.counters.num_restarts,
        "pid": seen.lock.holder.pid if seen.lock else None,
        "host": seen.lock.holder.host if seen.lock else None,
        "ranks": [asdict(rank) for rank in seen.live.ranks] if seen.live else [],
        "problems": list(seen.problems),
    }


def _read(run_dir: Path, *, clock: Clock) -> _Evidence:
    problems: list[str] = []
    manifests = manifest_positions(run_dir)  # before the ledger: a live run adds to both
    entries = _read_entries(run_dir / LEDGER_NAME, problems)
    if not problems and (missing := what_is_missing(entries, manifests)):
        problems.append(f"{run_dir / LEDGER_NAME}: {missing} — put the whole ledger back, or `surefoot triage {run_dir}`")
    ledger_fault = bool(problems)
    lock = read_lock(run_dir)
    lock = lock if is_held(lock, clock=clock) else None
    live = read_live(run_dir) if lock else None
    return _Evidence(
        entries=entries,
        lineage=fold_lineage(entries),
        rows=_read_rows(run_dir, problems),
        lock=lock,
        live=live if live and lock and live.pid == lock.holder.pid else None,
        config=_read_config(run_dir / CONFIG_NAME, problems),
        problems=problems,
        ledger_fault=ledger_fault,
    )


def _read_entries(path: Path, problems: list[str]) -> list[LedgerEntry]:
    try:
        return read_ledger(path)
    except Incompatible:
        raise
    except SurefootError as error:
        problems.append(str(error))
        return read_ledger(path, up_to_damage=True)


def _read_rows(run_dir: Path, problems: list[str]) -> list[Row]:
    try:
        rows: list[Row] = read_steps(run_dir, newest=_NEWEST_ROWS).to_pylist()
    except OSError as error:
        problems.append(f"metrics: {error}")
        return []
    return rows


def _read_config(path: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {error}")
        return {}


def _setting(config: Mapping[str, Any], section: str, name: str) -> Any:
    values = config.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


def _attempt(seen: _Evidence) -> int:
    newest_row = int(seen.rows[-1]["attempt"]) if seen.rows else 0
    return max(seen.lineage.counters.attempt, newest_row, seen.live.attempt if seen.live else 0)


def _step(seen: _Evidence) -> int:
    """Steps finished on the present attempt. A resume or roll-back that has no row yet stands at the step of its ledger entry."""
    is_training = seen.live is not None and seen.live.phase not in (Phase.START.label, Phase.RESTORE.label)
    if seen.live and is_training and seen.live.attempt >= _attempt(seen):
        return seen.live.step
    attempt = _attempt(seen)
    steps = [entry.step for entry in seen.entries if entry.attempt == attempt]
    steps += [int(row["step"]) for row in seen.rows if row["attempt"] == attempt]
    return max(steps, default=0)


def _row_at(rows: Sequence[Row], *, step: int) -> Row | None:
    """The row of the newest step of the present trajectory: not beyond `step`, and of the last attempt that did it."""
    return max((row for row in rows if row["step"] <= step), key=lambda row: (row["step"], row["generation"], row["attempt"]), default=None)


def _newest_val_loss(rows: Sequence[Row], *, step: int) -> float | None:
    row = _row_at([row for row in rows if row["val_loss"] is not None], step=step)
    return row["val_loss"] if row else None


def _phase(seen: _Evidence) -> str:
    if seen.lock is None:
        return Phase.STOPPED.label
    return seen.live.phase if seen.live else Phase.START.label


def _verdict(seen: _Evidence, row: Row | None) -> str:
    """healthy, suspect (the last update was held back, an episode is open, or the ledger is not all that was written) or bad (halted or
    paused by policy, and not released)."""
    standing = standing_halt(seen.entries)
    if standing is not None and standing.event != Event.ORDER_TAKEN and not standing.fields.get("by"):
        return "bad"
    held_back = row is not None and not str(row["action"]).lower().startswith("proceed")
    return "suspect" if held_back or seen.ledger_fault or _open_episode(seen.entries) is not None else "healthy"


def _halted(entries: Sequence[LedgerEntry]) -> dict[str, Any] | None:
    """Since when, at which step, by which rule and why the run is halted or paused, and by whom (empty for policy); null when it is not, or
    a person has released it."""
    last = standing_halt(entries)
    if last is None:
        return None
    state = "held" if is_hold(last) else "halted" if last.event == Event.RUN_HALTED else "paused"
    told = {"state": state, "step": last.step, "rule": last.rule, "by": str(last.fields.get("by") or ""), "reason": last.reason}
    return {**told, "time_utc": last.time_utc}


def _last_exercised(entries: Sequence[LedgerEntry]) -> dict[str, str] | None:
    """When each path of recovery was last rehearsed with success, by drill; null when none was."""
    rehearsed = {entry.rule: entry.time_utc for entry in entries if entry.event == Event.DRILL_ENDED and entry.fields.get("ok")}
    return rehearsed or None


def _next_start(seen: _Evidence) -> dict[str, Any] | None:
    """From which checkpoint the next start goes on because a person asked for it, and who; null when nobody did."""
    wish = open_wish(seen.entries)
    if wish is None:
        return None
    ref = seen.lineage.ref(wish.checkpoint)
    return {"checkpoint": wish.checkpoint, "step": ref.step if ref is not None else None, "by": wish.by}


def _open_episode(entries: Sequence[LedgerEntry]) -> dict[str, Any] | None:
    """What is being looked into: the id of the episode, from which step on, by which rule; null when nothing is."""
    last = next((entry for entry in reversed(entries) if entry.event in (Event.EPISODE_OPENED, Event.EPISODE_CLOSED)), None)
    if last is None or last.event == Event.EPISODE_CLOSED:
        return None
    onset = last.fields.get("onset_step", last.step)
    return {"id": f"e{last.seq}", "rule": last.rule or last.fields.get("rule"), "onset_step": onset}


def _mfu(rows: Sequence[Row], row: Row | None) -> float | None:
    """The median of the newest steps of the present attempt: one that saves or compiles says little."""
    if row is None:
        return None
    same = [other["mfu"] for other in rows[-_RATE_ROWS:] if other["attempt"] == row["attempt"] and other["mfu"] is not None]
    return statistics.median(same) if same else None


def _standing(lineage: Lineage) -> list[CheckpointRef]:
    """The checkpoints of the line that are still kept, oldest first."""
    return [ref for name in lineage.line if name not in lineage.retired and (ref := lineage.ref(name)) is not None]


def _prover(standing: Sequence[CheckpointRef]) -> dict[str, Any]:
    """The newest that others have loaded, and how far it is behind the newest commit; null while none was loaded."""
    loaded = [index for index, ref in enumerate(standing) if ref.rung in (Rung.LOADABLE, Rung.PROVEN)]
    proven = [ref.id for ref in standing if ref.rung is Rung.PROVEN]
    newest = standing[loaded[-1]] if loaded else None
    return {
        "newest_loaded": newest.id if newest else None,
        "newest_proven": proven[-1] if proven else None,
        "lag_checkpoints": len(standing) - 1 - loaded[-1] if loaded else len(standing),
        "lag_steps": standing[-1].step - newest.step if newest else None,
    }


def _checkpoint(ref: CheckpointRef | None) -> dict[str, Any] | None:
    if ref is None:
        return None
    looks = {"read_back": ref.read_back, "damaged": ref.damaged}
    return {"id": ref.id, "step": ref.step, "rung": ref.rung.value, **looks, "suspect": ref.suspect}


def _age_s(rows: Sequence[Row], *, now_utc: str) -> float | None:
    return max(0.0, seconds_between(rows[-1]["time_utc"].isoformat(), now_utc)) if rows else None


def _eta_s(seen: _Evidence, *, step: int) -> float | None:
    """Seconds to the last step at the recent pace; 0 when finished, null when nobody is training."""
    if seen.lineage.counters.finished:
        return 0.0
    num_steps = _setting(seen.config, "train", "num_steps")
    if seen.lock is None or not seen.rows or not isinstance(num_steps, int):
        return None
    last = seen.rows[-1]
    recent = [row for row in seen.rows[-_RATE_ROWS:] if (row["generation"], row["attempt"]) == (last["generation"], last["attempt"])]
    num_done, took_s = last["step"] - recent[0]["step"], last["mono_s"] - recent[0]["mono_s"]
    return max(0, num_steps - step) * took_s / num_done if num_done > 0 else None
