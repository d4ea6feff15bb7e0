"""Runs drills: starts a run, strikes it at a rank and a step drawn at random, waits for its end, compares it with a twin left alone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config import load_config
from surefoot.core import strict_json
from surefoot.core.clock import SystemClock
from surefoot.core.errors import SurefootError
from surefoot.core.events import Event
from surefoot.core.records import LedgerEntry
from surefoot.core.sections import RunConfig
from surefoot.drill.account import account
from surefoot.drill.catalogue import Drill
from surefoot.drill.scratch import DrillRun, Scratch
from surefoot.drill.verdict import Ended, Result, failed, judge
from surefoot.observe.incidents import INCIDENTS_NAME
from surefoot.observe.ledger import LEDGER_NAME, Ledger

START_LIMIT_S = 120.0
"""Of a run that prepares its text and imports torch: seconds on a quiet machine."""
END_LIMIT_S = 300.0
"""Of a small run that was struck once: against a hang."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What all repetitions share. `digest` is the last state of the run that nothing happened to; empty while that is not known."""

    scratch: Scratch
    config: RunConfig
    digest: str = ""

    @property
    def num_ranks(self) -> int:
        return self.config.parallel.num_ranks


def prepare(scratch: Scratch) -> Rehearsal:
    return Rehearsal(scratch, load_config(scratch.config, scratch.settings).config)


def run_twin(rehearsal: Rehearsal) -> str:
    """The digest of the last state of a run that nothing happens to. It also prepares the data that all others read."""
    run = rehearsal.scratch.start("twin")
    try:
        if (code := run.wait(limit_s=START_LIMIT_S + END_LIMIT_S)) != 0:
            raise SurefootError(f"the undisturbed twin ended with {code}", where=str(run.dir), hint=run.words())
        return last_digest(run.entries())
    finally:
        run.end()


def rehearse(drill: Drill, rehearsal: Rehearsal, *, name: str, seed: int) -> Result:
    """One repetition, in the folder `name`. `seed` draws the rank and the step."""
    rank, step = draw(seed, num_ranks=rehearsal.num_ranks, num_steps=rehearsal.config.train.num_steps)
    struck_rank = None if drill.how == "leave" else rank
    inside = (f"drill.fault={drill.order}", f"drill.rank={rank}", f"drill.step={step}", f"drill.generations={_generations(drill)}")
    run = rehearsal.scratch.start(name, *(inside if drill.how == "inside" else ()))
    try:
        if drill.how != "inside":
            _strike(run, drill, rank=rank, step=step, num_ranks=rehearsal.num_ranks)
        code = run.wait(limit_s=START_LIMIT_S + END_LIMIT_S)
        if drill.how == "leave" and code == 75:
            run.start_again()
            code = run.wait(limit_s=START_LIMIT_S + END_LIMIT_S)
        result = _result(drill, rehearsal, run, code, rank=struck_rank, step=step, seed=seed)
    except SurefootError as error:
        result = failed(drill, str(error), rank=struck_rank, step=step, seed=seed)
    finally:
        run.end()
    record(run.dir, result)
    return result


def draw(seed: int, *, num_ranks: int, num_steps: int) -> tuple[int, int]:
    """The rank and the step to strike: not at the very start, and early enough that there is something left to go on with."""
    drawn = random.Random(f"drill {seed}")  # as text it is hashed: small numbers in a row would draw alike
    return drawn.randrange(num_ranks), drawn.randint(num_steps // 5, num_steps // 2)


def record(run_dir: Path, result: Result) -> None:
    """The outcome into the ledger of a run: the age of the last success of each path is read from there."""
    path = run_dir / LEDGER_NAME
    if not path.exists():
        return
    last = _last(run_dir)
    fields = {
        "drill": result.id,
        "ok": result.ok,
        "detected_s": result.detected_s,
        "recovery": dict(result.recovery),
        "problems": list(result.problems),
    }
    reason = "; ".join(result.problems)
    _ledger(run_dir).append(
        Event.DRILL_ENDED, generation=last.generation, attempt=last.attempt, step=last.step, rule=result.id, reason=reason, fields=fields
    )


def last_digest(entries: list[LedgerEntry]) -> str:
    digests = [
        str(entry.fields["state_digest"])
        for entry in entries
        if entry.event == Event.CHECKPOINT_COMMITTED and "state_digest" in entry.fields
    ]
    return digests[-1] if digests else ""


def _generations(drill: Drill) -> int:
    return 0 if drill.order == "exception" else 1


def _strike(run: DrillRun, drill: Drill, *, rank: int, step: int, num_ranks: int) -> None:
    live = run.stepping(step=step, num_ranks=num_ranks, limit_s=START_LIMIT_S)
    to_rank = drill.how == "signal"
    pid = next(one.pid for one in live.ranks if one.rank == rank) if to_rank else run.process.pid
    pidfd = os.pidfd_open(pid)  # the number alone may be somebody else's by the time that it is used
    try:
        fields = {"fault": drill.order, "ranks": [rank] if to_rank else [], "pid": pid, "mono_s": time.monotonic()}
        _ledger(run.dir).append(
            Event.DRILL_INJECTED,
            generation=live.generation,
            attempt=live.attempt,
            step=live.step,
            rule="drill",
            reason=drill.fault,
            fields=fields,
        )
        signal.pidfd_send_signal(pidfd, signal.Signals[drill.order])
    finally:
        os.close(pidfd)


def _result(drill: Drill, rehearsal: Rehearsal, run: DrillRun, code: int, *, rank: int | None, step: int, seed: int) -> Result:
    entries = run.entries()
    config = rehearsal.config
    first_rows, steps = _rows(run.dir)
    seen = account(entries, incidents=_incidents(run.dir), first_rows=first_rows)
    goes_on = drill.expected is not None and drill.expected.action != "stop"
    ended = Ended(
        exit_code=code,
        same_bits=bool(rehearsal.digest) and last_digest(entries) == rehearsal.digest if goes_on else None,
        steps_missing=config.train.num_steps - len(steps) if goes_on else 0,
        samples_per_step=config.train.global_batch_size,
    )
    return judge(drill, seen, ended, rank=rank, step=step, seed=seed, limit_s=config.launch.step_limit_s)


def _rows(run_dir: Path) -> tuple[dict[int, float], set[int]]:
    """The monotonic time of the first row of each generation, and the steps that have a row."""
    from surefoot.observe.metrics import read_steps

    rows = read_steps(run_dir, columns=("step", "generation", "mono_s")).to_pylist()
    first: dict[int, float] = {}
    for row in rows:
        first[row["generation"]] = min(first.get(row["generation"], row["mono_s"]), row["mono_s"])
    return first, {row["step"] for row in rows}


def _incidents(run_dir: Path) -> Mapping[int, Mapping[str, Any]]:
    return dict(_read_incidents(run_dir / INCIDENTS_NAME))


def _read_incidents(folder: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for path in folder.glob("g*.json"):
        try:
            yield int(path.stem[1:]), strict_json.loads(path.read_bytes())
        except ValueError:
            continue  # of another kind, or torn: what it would have said is missing in the result


def _ledger(run_dir: Path) -> Ledger:
    return Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="drill")


def _last(run_dir: Path) -> LedgerEntry:
    from surefoot.observe.ledger import read_ledger

    return read_ledger(run_dir / LEDGER_NAME)[-1]
