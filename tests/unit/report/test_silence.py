from __future__ import annotations

from dataclasses import replace

from surefoot.report.silence import Signs, judge_silence

WELL = Signs(is_expected=False, lock_is_held=True, live_age_s=1.0, step_age_s=1.0)


def found(signs: Signs) -> str:
    return judge_silence(signs, silent_s=10.0).silence


def test_a_run_that_makes_steps_or_is_supervised_through_a_long_phase_is_not_silent() -> None:
    assert found(WELL) == "none"
    assert found(replace(WELL, step_age_s=500.0)) == "none"
    assert found(replace(WELL, step_age_s=None)) == "none"


def test_a_run_without_any_sign_is_gone() -> None:
    assert found(replace(WELL, live_age_s=11.0, step_age_s=11.0)) == "run-gone"
    assert found(Signs(False, False, None, None)) == "run-gone"
    assert found(Signs(False, False, 1.0, 20.0)) == "run-gone"  # whoever wrote the record a second ago is dead


def test_steps_without_a_live_record_are_telemetry_that_is_gone() -> None:
    assert found(replace(WELL, live_age_s=60.0)) == "telemetry-gone"
    assert found(replace(WELL, live_age_s=None)) == "telemetry-gone"


def test_nothing_is_expected_of_a_run_that_is_over_or_waits_for_a_person() -> None:
    assert found(Signs(True, False, None, 9000.0)) == "none"
