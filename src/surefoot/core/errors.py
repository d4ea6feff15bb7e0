"""Every error that surefoot raises on purpose, and the exit code each one becomes.

SurefootError                1   the unexpected
├── ConfigError              2   bad config or usage: nothing was started
├── PlanInfeasible           3   no plan satisfies the request
├── DataError                4   data missing, broken or changed
├── CheckpointError          5   a run that cannot restore
│   ├── Corrupt                  bytes differ from what was written
│   ├── Incomplete               a file, tensor or item is absent
│   ├── Incompatible             it is whole, but of another shape, dtype or version
│   └── Torn                     live tensors changed while they were copied
├── TrainingHalted           6   policy stopped the run; a person must resume it
├── Held                     7   held after a large-scale fault
├── PeerLost                75   worth a retry: another process went away
├── Preempted               75   worth a retry: asked to leave
└── Deterministic           93   the same failure twice: do not requeue

A message says what happened, where, the numbers (got, wanted, limit), and what to do. The same values are attributes. Errors survive
pickling between ranks because they are rebuilt from their attributes, not from the formatted text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final


class SurefootError(Exception):
    """An error with its three parts: `what` happened, `where`, and a `hint` on what to do."""

    exit_code: ClassVar[int] = 1
    code: ClassVar[str] = "failed"

    def __init__(self, what: str, *, where: str = "", hint: str = "", **values: object) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.values: Mapping[str, object] = values

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} — {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.where, self.hint, dict(self.values))

    def as_json(self) -> dict[str, object]:
        """The `{"error": {...}}` object that reporting verbs print with `--json`."""
        return {"error": {"code": self.code, "what": self.what, "where": self.where, "hint": self.hint}}


def _rebuild(kind: type[SurefootError], what: str, where: str, hint: str, values: dict[str, object]) -> SurefootError:
    return kind(what, where=where, hint=hint, **values)


class ConfigError(SurefootError):
    exit_code = 2
    code = "config"


class PlanInfeasible(SurefootError):
    exit_code = 3
    code = "plan-infeasible"


class DataError(SurefootError):
    exit_code = 4
    code = "data"


DAMAGED: Final = "damaged-block"
DAMAGED_HEADER: Final = "damaged-header"
CUT_SHORT: Final = "cut-short"
MISSING: Final = "missing"
UNREADABLE: Final = "unreadable"
SHARD_LOSSES: Final = frozenset({DAMAGED, DAMAGED_HEADER, CUT_SHORT, MISSING, UNREADABLE})
"""`kind` of a DataError: stored data that is not, or no longer, what was written. Waiting does not help, a copy of it does."""


def lost_shard(error: BaseException | None) -> str:
    """The shard, as SOURCE/SHARD, that `error` says storage does not give back as it was written; empty when it says no such thing."""
    if not isinstance(error, DataError) or error.values.get("kind") not in SHARD_LOSSES:
        return ""
    return str(error.values.get("shard", ""))


class CheckpointError(SurefootError):
    exit_code = 5
    code = "checkpoint"


class Corrupt(CheckpointError):
    code = "checkpoint-corrupt"


class Incomplete(CheckpointError):
    code = "checkpoint-incomplete"


class Incompatible(CheckpointError):
    code = "checkpoint-incompatible"


class Torn(CheckpointError):
    code = "checkpoint-torn"


class TrainingHalted(SurefootError):
    exit_code = 6
    code = "halted"


class Held(SurefootError):
    exit_code = 7
    code = "held"


class PeerLost(SurefootError):
    exit_code = 75
    code = "peer-lost"


class Preempted(SurefootError):
    exit_code = 75
    code = "preempted"


class Deterministic(SurefootError):
    exit_code = 93
    code = "deterministic"


EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_RETRY = 75

_BY_EXIT_CODE: Mapping[int, type[SurefootError]] = {
    1: SurefootError,
    2: ConfigError,
    3: PlanInfeasible,
    4: DataError,
    5: CheckpointError,
    6: TrainingHalted,
    7: Held,
    75: PeerLost,
    93: Deterministic,
}


def error_from_json(told: Mapping[str, Any]) -> SurefootError:
    """The error that another process told by `as_json`, of its own class."""
    parts = told["error"]
    kind = next((kind for kind in _all_kinds(SurefootError) if kind.code == parts["code"]), SurefootError)
    return kind(parts["what"], where=parts["where"], hint=parts["hint"])


def _all_kinds(kind: type[SurefootError]) -> list[type[SurefootError]]:
    return [kind, *(deeper for child in kind.__subclasses__() for deeper in _all_kinds(child))]


def error_for_exit_code(exit_code: int) -> type[SurefootError]:
    """The error class that a child process meant by `exit_code`; anything unlisted (signals too) is the unexpected."""
    return _BY_EXIT_CODE.get(exit_code, SurefootError)
