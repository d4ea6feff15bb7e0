"""Orders to a loop in this process: what each does, in its order, once, and what a kill before the answer leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.coordinate.lock import RunLock
from surefoot.core.clock import SystemClock
from surefoot.core.errors import TrainingHalted
from surefoot.core.ports import EvalPort
from surefoot.core.records import HeldOutLoss, LedgerEntry
from surefoot.core.sections import CheckpointSection, HealSection, ObserveSection, RunConfig, RunSection, TrainSection
from surefoot.guard import Guard
from surefoot.observe.blocks import fold_blocks
from surefoot.observe.control import CONTROL_NAME, Order, append_order
from surefoot.observe.ledger import read_ledger
from surefoot.observe.live import read_lock
from surefoot.observe.wishes import open_wish
from tests.steerable import Points, final_digest, skip, until_committed

JOB = "job"


class Restless(SystemClock):
    """A clock whose sleeper does something instead: a paused run sleeps, and nothing else here does for so long."""

    def __init__(self, on_tick: Callable[[], object]) -> None:
        self.ahead_s = 0.0
        self._on_tick = on_tick

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s

    def sleep(self, duration_s: float) -> None:
        if duration_s < 0.4:
            return super().sleep(duration_s)
        self.ahead_s += duration_s
        self._on_tick()


def config_of(run_dir: Path) -> RunConfig:
    return RunConfig(
        run=RunSection(name="alone", dir=str(run_dir)),
        train=TrainSection(num_steps=20),
        checkpoint=CheckpointSection(interval_steps=100, keep_last=99),
        heal=HealSection(pause_limit_s=600.0),
        observe=ObserveSection(ledger_look_s=0.0),
    )


def train(
    run_dir: Path,
    orders: Mapping[int, Sequence[Order]],
    *,
    in_pause: Sequence[Order | None] = (),
    data: Points | None = None,
    committed_by: int = 0,
    evaluation: EvalPort | None = None,
    before: Callable[[int], object] = lambda step: None,
) -> tuple[int, list[int]]:
    """(exit code, finished steps in the order in which they were made). `in_pause` are given one a tick, None is a SIGTERM.

    The loop waits at step `committed_by` for the first save, and calls `before` with each step that it has finished, ahead of its orders.
    With `evaluation` it is asked after each step.
    """
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    points, steps, to_come = data or Points(), [], list(in_pause)

    def on_tick() -> None:
        if not to_come:
            return
        if (given := to_come.pop(0)) is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            append_order(run_dir, given, clock=SystemClock())

    run_dir.mkdir(exist_ok=True)
    lock = RunLock.acquire(run_dir, job=JOB, clock=SystemClock(), lease_s=30.0)
    config = config_of(run_dir)
    config = config if evaluation is None else replace(config, train=replace(config.train, eval_interval_steps=1))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": points, "evaluation": evaluation, "lock": lock}
    try:
        with Guard(config, **parts, clock=Restless(on_tick)) as guard:
            guard.restore()
            while guard.begin():
                loss = model(next(points)[0]).square().sum()
                loss.backward()
                if guard.judge(loss, 4).proceeds:
                    optimizer.step()
                    guard.applied()
                optimizer.zero_grad()
                steps.append(guard.finish().step)
                if guard.step == committed_by:
                    until_committed(run_dir)
                before(guard.step)
                for order in orders.get(guard.step, ()) if guard.step not in steps[:-1] else ():
                    append_order(run_dir, order, clock=SystemClock())
    except SystemExit as end:
        return int(str(end.code)), steps
    return 0, steps


def order(verb: str, *, job: str = JOB, **fields: object) -> Order:
    return Order(verb, "ada@here", job, "", f"to {verb}", fields)


def told(run_dir: Path, *events: str) -> list[LedgerEntry]:
    return [entry for entry in read_ledger(run_dir / "ledger.jsonl") if entry.event in events]


def verbs(run_dir: Path) -> list[tuple[str, object]]:
    return [(entry.event, entry.fields.get("verb")) for entry in told(run_dir, "order.taken", "order.refused")]


def commits(run_dir: Path) -> list[object]:
    return [entry.fields["id"] for entry in told(run_dir, "checkpoint.committed")]


def test_two_orders_at_once_are_followed_in_their_order(tmp_path: Path) -> None:
    code, steps = train(tmp_path, {4: [order("save"), order("stop")]})
    assert (code, steps[-1]) == (TrainingHalted.exit_code, 5)
    assert verbs(tmp_path) == [("order.taken", "save"), ("order.taken", "stop")]
    (left,) = told(tmp_path, "run.left")
    assert (left.rule, left.reason) == ("stop", "stop, asked for by ada@here: to stop")
    assert commits(tmp_path) == ["s5-a1"]
    assert train(tmp_path, {})[1] == list(range(6, 21))  # a person starts it again, and it was answered


def test_a_save_is_of_the_next_step_and_stops_nothing(tmp_path: Path) -> None:
    code, steps = train(tmp_path, {4: [order("save")]})
    assert (code, steps) == (0, list(range(1, 21)))
    assert commits(tmp_path) == ["s6-a1", "s20-a1"]


def test_a_pause_is_saved_and_ends_by_a_person(tmp_path: Path) -> None:
    code, steps = train(tmp_path, {4: [order("pause")]}, in_pause=[order("pause", limit_s=5), order("save"), order("resume")])
    assert (code, steps) == (0, list(range(1, 21)))
    assert [verb for _, verb in verbs(tmp_path)] == ["pause", "pause", "save", "resume"]
    assert [entry.event for entry in told(tmp_path, "run.paused", "run.unpaused", "run.halted")] == ["run.paused", "run.unpaused"]
    (paused,) = told(tmp_path, "run.paused")
    assert (paused.fields["checkpoint"], paused.fields["limit_s"]) == ("s5-a1", 600.0)


def test_a_pause_that_nobody_ends_is_a_halt(tmp_path: Path) -> None:
    code, _ = train(tmp_path, {4: [order("pause", limit_s=3)]}, in_pause=[order("pause", limit_s=3)])  # it begins anew
    assert code == TrainingHalted.exit_code
    (halted,) = told(tmp_path, "run.halted")
    assert halted.reason == "to pause; nobody went on with it for 4 s"
    assert halted.fields["by"] == "ada@here"
    with pytest.raises(TrainingHalted, match="halted at step 5 by pause"):
        train(tmp_path, {})


def test_a_signal_ends_a_pause_and_it_stays_one(tmp_path: Path) -> None:
    assert train(tmp_path, {4: [order("pause")]}, in_pause=[None])[0] == TrainingHalted.exit_code
    with pytest.raises(TrainingHalted, match="halted at step 5 by pause: to pause; received SIGTERM meanwhile"):
        train(tmp_path, {})


def test_a_stop_in_a_pause_leaves_it_paused(tmp_path: Path) -> None:
    assert train(tmp_path, {4: [order("pause")]}, in_pause=[order("stop")])[0] == TrainingHalted.exit_code
    assert not told(tmp_path, "run.left")
    with pytest.raises(TrainingHalted, match="halted at step 5 by pause: stop, asked for by ada@here"):
        train(tmp_path, {})


def test_going_back_in_place_leaves_out_what_was_asked_from_there_on(tmp_path: Path) -> None:
    points = Points()
    back = order("rollback", to=7, blocks=[skip(28, 32).as_json(), skip(22, 23).as_json()])
    code, steps = train(tmp_path, {4: [order("save")], 9: [back]}, data=points, committed_by=9)
    assert (code, steps) == (0, [*range(1, 11), *range(7, 21)])
    assert not told(tmp_path, "block.asked")  # the line that takes the order says it
    ((taken,), (refused,)) = (told(tmp_path, f"block.{how}") for how in ("taken", "refused"))
    assert (refused.fields["asked"], refused.fields["item"]) == (taken.fields["asked"], 1)
    assert not fold_blocks(read_ledger(tmp_path / "ledger.jsonl")).open
    assert (taken.fields["block"]["effective_sample"], taken.step) == (24, 6)  # type: ignore[index]
    assert points.seen[40:48] == [24, 25, 26, 27, 32, 33, 34, 35]
    (rolled,) = told(tmp_path, "run.rolled_back")
    assert (rolled.fields["checkpoint"], rolled.fields["by"]) == ("s6-a1", "ada@here")
    assert [entry.fields["checkpoint"] for entry in told(tmp_path, "attempt.started")] == [None, "s6-a1"]


def test_in_a_pause_it_goes_back_and_stands_still_there(tmp_path: Path) -> None:
    pauses = {4: [order("save")], 9: [order("pause")]}
    code, steps = train(tmp_path, pauses, in_pause=[order("rollback", to=6, confirmed=True), order("resume")])
    assert (code, steps) == (0, [*range(1, 11), *range(7, 21)])
    (unpaused,) = told(tmp_path, "run.unpaused")
    assert unpaused.step == 6


def test_what_cannot_be_followed_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    orders = [order("resume"), order("rollback", to=3), order("stop", job="another")]
    (tmp_path / CONTROL_NAME).write_bytes(b"rm -rf\n" * 3 + b"[]\n")
    code, steps = train(tmp_path, {4: orders, 20: [order("save")]})
    assert (code, steps) == (0, list(range(1, 21)))
    reasons = [entry.reason for entry in told(tmp_path, "order.refused")]
    assert [
        words in reason for words, reason in zip(("JSON", "object", "not paused", "no checkpoint", "another job"), reasons, strict=False)
    ]
    assert reasons[-1] == "the run ended first: finished"
    assert len(reasons) == 6  # three equal lines are one
    assert read_lock(tmp_path) is None


SAVES = {4: [order("save")], 7: [order("save")], 10: [order("save")]}


def save_and_damage(run_dir: Path, step: int) -> None:
    """Each save comes home; when memory holds the first no more its file is damaged, and nobody has seen it yet."""
    deadline_s = time.monotonic() + 50.0
    while len(told(run_dir, "checkpoint.verified")) < min(3, step // 3 - 1):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    if step == 13:
        for path in (run_dir / "checkpoints" / "s6-a1").glob("*.distcp"):
            path.write_bytes(b"\xff" * path.stat().st_size)


def test_a_checkpoint_that_does_not_load_ends_no_run(tmp_path: Path) -> None:
    undisturbed, points = Points(), Points()
    assert train(tmp_path / "undisturbed", SAVES, data=undisturbed)[0] == 0
    run_dir, back = tmp_path / "run", order("rollback", to=6, confirmed=True, blocks=[skip(64, 68).as_json()])
    code, steps = train(run_dir, {**SAVES, 13: [back]}, data=points, before=lambda step: save_and_damage(run_dir, step))
    assert (code, steps) == (0, list(range(1, 21)))
    assert points.seen == undisturbed.seen  # nothing was left out for an order that was not followed
    assert final_digest(run_dir) == final_digest(tmp_path / "undisturbed")
    assert [event for event, _ in verbs(run_dir)] == [*["order.taken"] * 4, "order.refused"]
    (refused,) = told(run_dir, "order.refused")
    assert refused.fields["id"] == back.id
    assert "s6-a1" in refused.reason
    assert refused.reason.endswith("the run goes on as it stands, after step 14")
    assert open_wish(read_ledger(run_dir / "ledger.jsonl")) is None
    assert len(told(run_dir, "attempt.started")) == 1


class Doubting:
    """Held-out losses that are the same ever after, but for the one that is asked for next once somebody doubts."""

    doubts = False

    def held_out(self) -> HeldOutLoss:
        loss, self.doubts = (9.0 if self.doubts else 1.0), False
        return HeldOutLoss(loss, 1.0, 10)


def test_where_a_load_has_written_over_the_state_the_run_goes_on_from_the_newest(tmp_path: Path) -> None:
    evaluation = Doubting()

    def doubt(step: int) -> None:
        evaluation.doubts = step == 12

    orders = {4: [order("save")], 8: [order("save")], 11: [order("rollback", to=6, confirmed=True)]}
    code, steps = train(tmp_path, orders, evaluation=evaluation, committed_by=11, before=doubt)
    assert (code, steps) == (0, [*range(1, 13), *range(11, 21)])
    (refused,) = told(tmp_path, "order.refused")
    assert refused.reason.endswith("the run goes on from the newest checkpoint that loads")
    (rolled,) = told(tmp_path, "run.rolled_back")
    assert (rolled.fields["checkpoint"], rolled.step) == ("s10-a1", 10)


class Sick(Points):
    """Three batches in a row that no loss can be taken of."""

    def __next__(self) -> tuple[torch.Tensor, int]:
        rows, num_live = super().__next__()
        return (rows * torch.nan if 12 < self.next_sample <= 24 else rows), num_live


def test_who_resumes_a_run_that_stood_still_by_itself_has_looked_into_it(tmp_path: Path) -> None:
    resume = Order("resume", "ada@here", JOB, "", "a bad shard")
    code, steps = train(tmp_path, {}, data=Sick(), in_pause=[resume])
    assert (code, steps) == (0, list(range(1, 21)))
    (paused,) = told(tmp_path, "run.paused")
    (released,) = told(tmp_path, "run.released")
    assert paused.step == released.step
    assert (released.reason, released.fields["by"]) == ("a bad shard", "ada@here")
    assert len(told(tmp_path, "run.unpaused")) == 1


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.steerable import Points
from tests.unit.guard.test_orders import order, train

class Deadly(Points):
    def cursor(self):
        if self.next_sample > 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().cursor()

train(Path(sys.argv[1]), {4: [order("stop")]}, data=Deadly())
"""


def test_an_order_that_a_kill_left_without_its_answer_is_answered_once(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not verbs(tmp_path)
    code, steps = train(tmp_path, {})
    assert (code, steps) == (TrainingHalted.exit_code, [1])
    assert verbs(tmp_path) == [("order.taken", "stop")]
    assert train(tmp_path, {})[0] == 0
    assert verbs(tmp_path) == [("order.taken", "stop")]
