"""The restarts that a run has used, folded from its ledger: the next agent, of this job or another, goes on counting. Pure.

What a person does begins a new count: a release, and a start after a stop that no scheduler requeues. What the program failed with stays
known even then, until a checkpoint lies behind it or a person has released the run: so what was not mended stops at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from surefoot.coordinate.grades import Failure, NodeLoss
from surefoot.coordinate.restart import RestartHistory, with_checkpoint, with_progress, with_restart
from surefoot.core.errors import EXIT_RETRY
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import LaunchSection

_LOSSES = (Event.RANK_LOST, Event.NURSERY_LOST)
_COMMITS = (Event.CHECKPOINT_COMMITTED, Event.CHECKPOINT_ADOPTED)


def fold_history(entries: Iterable[LedgerEntry], *, limits: LaunchSection) -> RestartHistory:
    """The history after `entries`, oldest first. A loss counts once it was decided about: that line follows it."""
    history = RestartHistory()
    lost: LedgerEntry | None = None
    for entry in entries:
        history = with_progress(history, step=entry.step)
        if entry.event in _LOSSES:
            lost = entry
        elif entry.event in _COMMITS:
            step = entry.fields.get("step")
            history = with_checkpoint(history, step=step if isinstance(step, int) else entry.step)
        elif entry.event == Event.RUN_RELEASED:
            history = RestartHistory(newest_step=history.newest_step)
        elif entry.event == Event.RESTART_DECIDED:
            history = _decided(_remember(history, lost), entry, limits)
            lost = None
    return history


def _remember(history: RestartHistory, lost: LedgerEntry | None) -> RestartHistory:
    if lost is None:
        return history
    fingerprint, nodes = lost.fields.get("fingerprint"), lost.fields.get("nodes")
    failures, gone = history.failures, history.lost_nodes
    if isinstance(fingerprint, str) and fingerprint and lost.fields.get("step_known", True):
        failures = tuple(dict.fromkeys((*failures, Failure(lost.step, fingerprint))))
    if lost.rule == "node" and isinstance(nodes, list | tuple):
        gone = (*gone, *(NodeLoss(str(node), utc_s(lost.time_utc)) for node in nodes))
    return replace(history, failures=failures, lost_nodes=gone)


def _decided(history: RestartHistory, entry: LedgerEntry, limits: LaunchSection) -> RestartHistory:
    if entry.fields.get("kind") == "restart":
        return with_restart(history, utc_s=utc_s(entry.time_utc), window_s=limits.window_s)
    if entry.fields.get("exit_code") == EXIT_RETRY:
        return history  # a scheduler starts it again, and knows of no budget
    return RestartHistory(newest_step=history.newest_step, failures=history.failures, lost_nodes=history.lost_nodes)


def utc_s(time_utc: str) -> float:
    """Seconds since 1970 of a stamp of the ledger; 0 where it is none: so old that it lies in no window."""
    try:
        return datetime.fromisoformat(time_utc).timestamp()
    except ValueError:
        return 0.0
