from __future__ import annotations

from dataclasses import replace

from surefoot.core.records import RankSignals, Signals
from surefoot.core.sections import MonitorSection
from surefoot.guard.waiting import DataWaits

RANK = RankSignals(rank=0, loss_sum=1.0, num_live_tokens=8, data_wait_s=0.0, forward_backward_s=0.5, step_clock_s=0.0, cpu_s=0.0)
SIGNALS = Signals(
    step=1,
    attempt=1,
    generation=1,
    loss=1.0,
    num_live_tokens=8,
    grad_norm=1.0,
    num_nonfinite=0,
    leave_requested=False,
    save_requested=False,
    save_clock_s=0.0,
    save_stall_s=0.0,
    save_slot_free=True,
    block_requested=False,
    ranks=(RANK, replace(RANK, rank=1)),
)


def told(waits_s: tuple[float, float], *, step_s: float, num_steps: int, section: MonitorSection | None = None) -> list[str]:
    waits, said = DataWaits(section or MonitorSection()), []
    for step in range(num_steps):
        now_s = step * step_s
        ranks = tuple(replace(part, data_wait_s=wait_s, step_clock_s=now_s) for part, wait_s in zip(SIGNALS.ranks, waits_s, strict=True))
        if line := waits.step(replace(SIGNALS, ranks=ranks), step_s=step_s):
            said.append(line)
    return said


def test_steps_that_wait_are_told_with_the_rank_that_waits_longest() -> None:
    (line,) = told((0.1, 0.4), step_s=1.0, num_steps=110)
    assert line.startswith("the last 100 steps waited 40% of their time for data, 40.0s in all, rank 1 the longest")


def test_healthy_and_tiny_steps_are_not_worth_a_word() -> None:
    assert not told((0.05, 0.09), step_s=1.0, num_steps=200)
    assert not told((0.001, 0.004), step_s=0.01, num_steps=200)
    assert not told((0.4, 0.4), step_s=1.0, num_steps=99)


def test_it_is_told_once_in_a_while() -> None:
    assert len(told((0.0, 0.5), step_s=1.0, num_steps=399)) == 1
    assert len(told((0.0, 0.5), step_s=1.0, num_steps=401)) == 2


def test_what_is_worth_a_word_is_set_in_the_config() -> None:
    assert told((0.4, 0.4), step_s=1.0, num_steps=16, section=MonitorSection(data_wait_steps=8))[0].startswith("the last 16 steps")
    assert not told((0.0, 0.4), step_s=1.0, num_steps=110, section=MonitorSection(data_wait_share=0.5))
    assert not told((0.0, 0.4), step_s=1.0, num_steps=110, section=MonitorSection(data_wait_min_s=0.5))
    assert len(told((0.0, 0.4), step_s=1.0, num_steps=130, section=MonitorSection(data_wait_repeat_s=10.0))) == 4


def test_a_window_that_waited_and_did_so_no_more_is_not_worth_a_word() -> None:
    waits, said = DataWaits(MonitorSection()), []
    for step in range(200):
        wait_s = 0.4 if step < 60 else 0.0
        said.append(waits.step(replace(SIGNALS, ranks=(replace(RANK, data_wait_s=wait_s, step_clock_s=float(step)),)), step_s=1.0))
    assert not any(said)
