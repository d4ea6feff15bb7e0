"""Whether a run did what it promises about a fault. Pure: what must be and what was go in, a result with its reasons comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.drill.account import Seen
from surefoot.drill.catalogue import Drill, Expected


@dataclass(frozen=True, slots=True)
class Ended:
    """How the drilled run ended. `same_bits` as the undisturbed twin, None where the run was to stop; counts of steps are whole steps of
    the metrics: `steps_missing` of those up to the last, `samples_per_step` in each."""

    exit_code: int
    same_bits: bool | None
    steps_missing: int
    samples_per_step: int


@dataclass(frozen=True, slots=True)
class Result:
    """One repetition. `id` is the drill's name; `problems` is empty exactly when it is `ok`."""

    id: str
    fault: str
    detected_s: float | None
    bound_s: float | None
    culprit: Mapping[str, Any] | None
    culprit_right: bool
    grade: str | None
    action: str | None
    recovery: Mapping[str, float]
    steps_lost: int | None
    samples_lost: int | None
    samples_repeated: int | None
    same_bits: bool | None
    ok: bool
    exit_code: int | None = None
    struck_rank: int | None = None
    struck_step: int | None = None
    seed: int | None = None
    problems: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(drill: Drill, seen: Seen | None, ended: Ended, *, rank: int | None, step: int, seed: int, limit_s: float) -> Result:
    """`limit_s` stands for the bound of the phase where the run did not say which one was broken."""
    expected = drill.expected
    assert expected is not None
    if seen is None:
        return failed(drill, "the fault was never injected", rank=rank, step=step, seed=seed, exit_code=ended.exit_code)
    bound_s = expected.bound_s + ((seen.limit_s or limit_s) if expected.waits else 0.0)
    right = is_right(expected, seen.culprit, rank=rank)
    problems = [*_of_detection(seen, bound_s), *_of_decision(expected, seen, right), *_of_end(expected, ended)]
    goes_on = expected.action != "stop"
    return Result(
        id=drill.name,
        fault=drill.fault,
        detected_s=seen.detected_s,
        bound_s=bound_s,
        culprit=seen.culprit,
        culprit_right=right,
        grade=seen.grade or (expected.grade.value if expected.action == "leave" and seen.action == "leave" else None),
        action=seen.action,
        recovery=seen.recovery,
        steps_lost=seen.steps_lost,
        samples_lost=ended.steps_missing * ended.samples_per_step if goes_on else None,
        samples_repeated=seen.steps_lost * ended.samples_per_step if seen.steps_lost is not None else None,
        same_bits=ended.same_bits,
        ok=not problems,
        exit_code=ended.exit_code,
        struck_rank=rank,
        struck_step=step,
        seed=seed,
        problems=tuple(problems),
    )


def failed(drill: Drill, why: str, *, rank: int | None, step: int, seed: int, exit_code: int | None = None) -> Result:
    """A repetition that says nothing about the fault, because something else went wrong."""
    return Result(
        drill.name, drill.fault, None, None, None, False, None, None, {}, None, None, None, None, False, exit_code, rank, step, seed, (why,)
    )


def is_right(expected: Expected, culprit: Mapping[str, Any] | None, *, rank: int | None) -> bool:
    """Nobody else may be blamed for what was done to one rank. Of two that disagree neither can be told from the other: both are named."""
    ranks = set(culprit["ranks"]) if culprit is not None else set()
    if expected.blamed == "nobody":
        return not ranks
    if expected.blamed == "among":
        return culprit is not None and rank in ranks | set(culprit.get("candidates", ()))
    return ranks == {rank}


def _of_detection(seen: Seen, bound_s: float) -> list[str]:
    if seen.detected_s is None:
        return ["nothing in the ledger or the incidents says that the fault was seen"]
    return [f"seen after {seen.detected_s:g} s, the bound is {bound_s:g} s"] if seen.detected_s > bound_s else []


def _of_decision(expected: Expected, seen: Seen, right: bool) -> list[str]:
    problems = []
    if not right:
        problems.append(f"blamed {seen.culprit['ranks'] if seen.culprit else 'nobody'}, not who was struck")
    if seen.action != expected.action:
        problems.append(f"action {seen.action}, wanted {expected.action}")
    if expected.action != "leave" and seen.grade != expected.grade:
        problems.append(f"graded {seen.grade}, wanted {expected.grade.value}")
    return problems


def _of_end(expected: Expected, ended: Ended) -> list[str]:
    problems = []
    wanted = expected.exit_code if expected.action == "stop" else 0
    if ended.exit_code != wanted:
        problems.append(f"the run ended with {ended.exit_code}, wanted {wanted}")
    if expected.action != "stop" and not ended.same_bits:
        problems.append("its last state is not that of a run that nothing happened to")
    if expected.action != "stop" and ended.steps_missing:
        problems.append(f"{ended.steps_missing} steps were never trained")
    return problems
