"""The names of everything that the ledger and the machine-readable logs may say: `noun.past`, from this list only."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    RUN_CREATED = "run.created"
    RUN_FINISHED = "run.finished"
    RUN_LEFT = "run.left"
    RUN_HALTED = "run.halted"
    RUN_RELEASED = "run.released"
    CONFIG_ACCEPTED = "config.accepted"
    DATA_ACCEPTED = "data.accepted"
    ENVIRONMENT_CHANGED = "environment.changed"
    LOCK_TAKEN_OVER = "lock.taken_over"
    LEDGER_TAIL_MOVED = "ledger.tail_moved"
    GENERATION_STARTED = "generation.started"
    RANK_LOST = "rank.lost"
    NURSERY_LOST = "nursery.lost"
    RESTART_DECIDED = "restart.decided"
    ATTEMPT_STARTED = "attempt.started"
    CHECKPOINT_COMMITTED = "checkpoint.committed"
    CHECKPOINT_ADOPTED = "checkpoint.adopted"
    CHECKPOINT_ABANDONED = "checkpoint.abandoned"
    CHECKPOINT_REJECTED = "checkpoint.rejected"
    CHECKPOINT_RETIRED = "checkpoint.retired"
    CHECKPOINT_SUSPECTED = "checkpoint.suspected"
    SAVE_FAILED = "save.failed"
    RUN_RESUMED = "run.resumed"
    RUN_ROLLED_BACK = "run.rolled_back"
    UPDATE_SKIPPED = "update.skipped"
