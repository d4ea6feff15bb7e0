"""One ill step, computed again before its update: on the same ranks first, then with every rank's atoms on the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from surefoot.core.records import Asks, Finding, Health, Redo, Signals, Verdict
from surefoot.heal.diagnosis import Diagnosis, Run, compare_repetition, compare_rotated, run_of


@dataclass
class Recheck:
    """`first` is the verdict that asked for it. The step is judged by its last computation on its own ranks: `verdict` and `signals`.

    `data_or_state`, told the ranks that are ill, says whose fault a batch is that is ill wherever it is computed; collective, and asked at
    most once. Without `repeats_bits` a difference says nothing.
    """

    first: Verdict
    signals: Signals
    runs: list[Run]
    can_rotate: bool
    repeats_bits: bool
    data_or_state: Callable[[Run, Sequence[int]], Diagnosis]
    verdict: Verdict = field(init=False)
    diagnosis: Diagnosis | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.verdict = self.first

    @property
    def is_rotated(self) -> bool:
        """Whether the computation that comes next has its atoms on other ranks."""
        return len(self.runs) == 2

    def take(self, signals: Signals, verdict: Verdict) -> Redo | None:
        """The repetition on the same ranks; a Redo where one more is needed."""
        self.runs.append(run_of(signals, rotation=0))
        self.verdict, self.signals = verdict, signals
        if self.repeats_bits:
            self.diagnosis = compare_repetition(*self.runs)
        elif verdict.health is not Health.BAD:
            self.diagnosis = Diagnosis("inconclusive", "it is gone when computed again, where bits do not repeat anyway", (), True)
        if self.diagnosis is None and self.can_rotate and self.repeats_bits:
            return Redo("it recurs on the same ranks", rule="recheck", rotation=1)
        self._conclude()
        return None

    def take_rotated(self, signals: Signals) -> None:
        """The computation with every rank's atoms on the next one: it tells ranks from atoms, and counts for nothing else."""
        self.runs.append(run_of(signals, rotation=1))
        self.diagnosis = compare_rotated(*self.runs[1:])
        self._conclude()

    def _conclude(self) -> None:
        if self.diagnosis is None:
            self.diagnosis = self.data_or_state(self.runs[1], named_ranks(self.verdict.findings))

    def conclusion(self, *, step: int) -> Verdict:
        """What is judged: the computation that counts, and what a lasting cause asks for beyond a skip."""
        diagnosis = self.diagnosis
        assert diagnosis is not None
        if diagnosis.is_transient or diagnosis.cause not in _LASTING:
            return self.verdict
        rule, asks = _LASTING[diagnosis.cause]
        finding = Finding(rule, asks, diagnosis.reason, step, {"ranks": list(diagnosis.ranks), "because": self.first.rule})
        return replace(self.verdict, health=Health.BAD, findings=(finding, *self.verdict.findings))


_LASTING = {"state": ("state_is_ill", Asks.ROLL_BACK), "hardware": ("rank_is_wrong", Asks.PAUSE)}
"""Weights that are ill stay so, and a rank that computes wrongly goes on to. A batch is over with its step."""


def named_ranks(findings: Sequence[Finding]) -> tuple[int, ...]:
    """The ranks that the findings name, each once."""
    found: dict[int, None] = {}
    for finding in findings:
        ranks = finding.evidence.get("ranks")
        for rank in ranks if isinstance(ranks, list | tuple) else ():
            found[int(rank)] = None
    return tuple(found)
