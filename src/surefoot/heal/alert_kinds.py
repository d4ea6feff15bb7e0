"""What a person is told of, kind by kind: each one is a heading of docs/runbook.md. Pure tables and the rule that sorts ledger entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from surefoot.core.errors import Held
from surefoot.core.records import Asks, LedgerEntry

Severity = Literal["page", "warn", "info"]

CORRUPTION_RULES: Final = frozenset({"replica_differs", "recompute_differs"})
KIND_OF_RULE: Final[Mapping[str, str]] = {
    "diverged": "diverged",
    "rank_is_wrong": "rank-wrong",
    "state_is_ill": "weights-ill",
    "rebound": "rebound",
    "bits_do_not_repeat": "bits-not-repeated",
}
"""Rules whose findings, where they ask for more than a record, are a kind of their own."""
BREAKER_RULES: Final = frozenset({"breaker", "skips_in_a_row"})
WITHHELD: Final = "alerts-withheld"
TEST: Final = "test"
SEEN_FROM_OUTSIDE: Final = frozenset({"run-silent", "telemetry-silent", "run-back"})
"""Kinds that no entry of the ledger is: the dead-man's timer tells them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`action` says what surefoot did, where the ledger says no more; `command` is what to type next, after RUN is filled in.

    One that `ends` the run is told at once and each time: it holds still until somebody comes.
    """

    name: str
    severity: Severity
    title: str
    action: str
    command: str
    ends: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("run-halted", "page", "the run was halted", "training stopped; nothing goes on unasked", "surefoot triage RUN", ends=True),
        Kind("run-paused", "page", "the run was paused", "no step is made until somebody resumes it", "surefoot triage RUN", ends=True),
        Kind(
            "circuit-breaker",
            "page",
            "too many steps were ill: the circuit breaker opened",
            "training stopped; what was saved since is not resumed from unasked",
            "surefoot triage RUN",
            ends=True,
        ),
        Kind("run-held", "page", "the run is held after a large-scale fault", "nothing is started", "surefoot status RUN", ends=True),
        Kind("restarts-stopped", "page", "the ranks are not started again", "the agent left", "surefoot status RUN", ends=True),
        Kind("silent-corruption", "page", "ranks that must hold the same bits differ", "recorded", "surefoot triage RUN"),
        Kind("diverged", "page", "the loss rose and does not come back", "recorded", "surefoot triage RUN"),
        Kind("rank-wrong", "page", "a rank computes wrongly, again and again", "recorded", "surefoot triage RUN"),
        Kind("weights-ill", "page", "a step is ill whatever batch it gets: the weights took harm", "recorded", "surefoot triage RUN"),
        Kind("canary", "page", "the canary loss rose", "recorded as a vote for a roll-back", "surefoot triage RUN"),
        Kind(
            "replay-differed", "page", "steps computed again gave other bits", "the checkpoint is not gone on from", "surefoot triage RUN"
        ),
        Kind(
            "checkpoint-damaged",
            "page",
            "a checkpoint is not what was written",
            "it is resumed from last",
            "surefoot checkpoint verify RUN",
        ),
        Kind("shard-quarantined", "page", "a shard of the data is lost", "the run left", "surefoot data block RUN --help"),
        Kind("checkpoint-suspect", "warn", "a checkpoint is suspect", "it is never resumed from unasked", "surefoot checkpoint list RUN"),
        Kind("rolled-back", "warn", "the run was rolled back", "training goes on from there", "surefoot triage RUN"),
        Kind("episode-diagnosed", "warn", "the cause of an anomaly was looked for", "recorded", "surefoot triage RUN"),
        Kind("anomaly", "warn", "a step looks ill", "recorded", "surefoot triage RUN"),
        Kind("rebound", "warn", "the loss after a start is above that before it", "training goes on", "surefoot triage RUN"),
        Kind("bits-not-repeated", "warn", "no two ranks get the same bits", "training goes on, unaudited", "surefoot triage RUN"),
        Kind("rank-lost", "warn", "ranks were lost", "the agent decides about a restart", "surefoot status RUN"),
        Kind("agent-lost", "warn", "the agent did not leave in order", "another one took the run over", "surefoot status RUN"),
        Kind("aide-lost", "warn", "a process beside the ranks died for good", "training goes on without it", "surefoot status RUN"),
        Kind("node-alarm", "warn", "a node shows signs of a fault", "recorded; the run goes on", "surefoot doctor --node"),
        Kind("straggler", "warn", "all ranks wait for one that is slow", "recorded; training goes on", "surefoot ledger RUN --tail 50"),
        Kind("run-silent", "page", "the run gives no sign of life", "none: seen from outside the job", "surefoot status RUN"),
        Kind(
            "telemetry-silent", "page", "steps go on, but nothing tells of them", "none: seen from outside the job", "surefoot status RUN"
        ),
        Kind("run-back", "info", "the run gives signs of life again", "none", "surefoot status RUN"),
        Kind("save-failed", "warn", "a save came to nothing", "it is tried again", "surefoot checkpoint list RUN"),
        Kind("copy-failed", "warn", "a checkpoint could not be copied to a store", "it is tried again", "surefoot checkpoint list RUN"),
        Kind("run-left", "info", "the run left, worth a restart", "what was done is saved", "surefoot train RUN"),
        Kind("run-finished", "info", "the run is finished", "its last state is saved", "surefoot status RUN"),
        Kind(
            WITHHELD,
            "warn",
            "more happened than alerts.max_per_hour lets through",
            "counted and told here",
            "surefoot ledger RUN --tail 50",
        ),
        Kind(TEST, "info", "this is a test: nothing happened", "none", "surefoot status RUN"),
    )
}

_PLAIN: Final[Mapping[str, str]] = {
    "run.finished": "run-finished",
    "run.left": "run-left",
    "run.rolled_back": "rolled-back",
    "replay.differed": "replay-differed",
    "episode.diagnosed": "episode-diagnosed",
    "checkpoint.damaged": "checkpoint-damaged",
    "checkpoint.suspected": "checkpoint-suspect",
    "save.failed": "save-failed",
    "snapshot.torn": "save-failed",
    "copy.failed": "copy-failed",
    "shard.quarantined": "shard-quarantined",
    "rank.lost": "rank-lost",
    "node.alarmed": "node-alarm",
    "straggler.found": "straggler",
    "nursery.lost": "rank-lost",
    "lock.taken_over": "agent-lost",
    "step.rechecked": "anomaly",
    "update.skipped": "anomaly",
}
_SORTED_BY_RULE: Final = frozenset({"run.halted", "run.paused", "restart.decided", "aide.lost", "anomaly.found"})
EVENTS: Final = frozenset(_PLAIN) | _SORTED_BY_RULE
"""The ledger events that may be told."""


def kind_of(entry: LedgerEntry) -> str | None:
    """The kind that `entry` belongs to; None for what nobody needs to be told."""
    if (plain := _PLAIN.get(entry.event)) is not None:
        return plain
    if entry.event == "run.paused" and entry.fields.get("limit_s") == 0:
        return None  # it ends at once: what is told is the halt
    if entry.event in ("run.halted", "run.paused"):
        is_breaker = entry.rule in BREAKER_RULES or entry.rule.startswith("breaker")
        return "circuit-breaker" if is_breaker else entry.event.replace(".", "-")
    if entry.event == "restart.decided":
        return _kind_of_restart(entry.fields)
    if entry.event == "aide.lost":
        return "aide-lost" if entry.fields.get("wait_s") is None else None
    return _kind_of_finding(entry.fields) if entry.event == "anomaly.found" else None


def is_answer(entry: LedgerEntry) -> bool:
    """Whether it only says what was done about an entry of the same kind before it: it is told with that one, and is no news by itself.

    So a skipped update that nobody found ill (a back-off of the fp16 scale, a batch without live tokens) is none. A stop is news.
    """
    return entry.event in ("step.rechecked", "update.skipped") or (entry.event == "restart.decided" and entry.fields.get("kind") != "stop")


def ranks_of(entry: LedgerEntry) -> tuple[int, ...]:
    """The ranks that an entry names, wherever its event keeps them."""
    evidence = entry.fields.get("evidence")
    named: list[Any] = [entry.fields.get("rank")]
    for holder in (entry.fields, evidence if isinstance(evidence, Mapping) else {}):
        listed = holder.get("ranks")
        named += listed if isinstance(listed, list) else []
    return tuple(sorted({rank for rank in named if isinstance(rank, int) and not isinstance(rank, bool)}))


def _kind_of_restart(fields: Mapping[str, object]) -> str:
    """A restart is the answer to a loss, and told with it; a stop is news of its own."""
    if fields.get("kind") != "stop":
        return "rank-lost"
    return "run-held" if fields.get("exit_code") == Held.exit_code else "restarts-stopped"


def _kind_of_finding(fields: Mapping[str, object]) -> str | None:
    """What only records is for the ledger, but bits that differ are never nothing."""
    rule = str(fields.get("rule", ""))
    if rule in CORRUPTION_RULES:
        return "silent-corruption"
    if fields.get("asks") == Asks.RECORD:
        return None
    return KIND_OF_RULE.get(rule, "canary" if rule.startswith("canary") else "anomaly")
