from __future__ import annotations

from surefoot.core.sections import PlanSection
from surefoot.plan.promise import NOT_VALIDATED, promise


def test_a_run_without_a_plan_is_told_nothing() -> None:
    assert promise(PlanSection()) == ""


def test_a_plan_says_whether_a_sweep_stands_behind_it() -> None:
    assert NOT_VALIDATED in promise(PlanSection(law="epoch"))
    assert NOT_VALIDATED not in promise(PlanSection(law="fit.json", validated=True))


def test_what_is_known_is_told_and_what_is_not_is_left_out() -> None:
    told = promise(PlanSection(law="epoch", loss=2.5, loss_low=2.4, loss_high=2.6, step_s=4.0, memory_bytes=3 << 30))
    assert "loss 2.500 (2.400 to 2.600)" in told
    assert "4 s a step" in told
    assert "3.0 GiB" in told
    assert "loss" not in promise(PlanSection(law="kaplan"))
