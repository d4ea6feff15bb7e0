from __future__ import annotations

import math
from dataclasses import replace

import pytest

from surefoot.core.records import Asks, Finding, Health, RankSignals, Signals
from surefoot.monitor.verdict import verdict_of

WELL = Signals(10, 1, 1, 2.0, 100, 0.5, 0, False, False, 0.0, 0.0, True, False, (RankSignals(0, 200.0, 100, 0.0, 0.0, 0.0, 0.0),))


def finding(asks: Asks) -> Finding:
    return Finding(f"asks_{asks}", asks, "because", 11, {"asks": asks})


def test_without_findings_a_step_is_healthy() -> None:
    assert verdict_of(WELL, ()).health is Health.HEALTHY


@pytest.mark.parametrize(
    ("asks", "health"),
    [
        (Asks.RECORD, Health.HEALTHY),
        (Asks.ALERT, Health.SUSPECT),
        (Asks.SKIP, Health.BAD),
        (Asks.ROLL_BACK, Health.SUSPECT),
        (Asks.PAUSE, Health.SUSPECT),
    ],
)
def test_only_what_speaks_against_the_update_makes_it_bad(asks: Asks, health: Health) -> None:
    assert verdict_of(WELL, (finding(asks),)).health is health


def test_the_gravest_comes_first_and_the_rule_is_that_of_what_speaks_against_the_update() -> None:
    verdict = verdict_of(WELL, [finding(asks) for asks in (Asks.RECORD, Asks.SKIP, Asks.ROLL_BACK)])
    assert [found.asks for found in verdict.findings] == [Asks.ROLL_BACK, Asks.SKIP, Asks.RECORD]
    assert (verdict.health, verdict.rule, verdict.evidence) == (Health.BAD, "asks_skip", {"asks": "skip"})


def test_an_empty_batch_is_suspect_whatever_its_figures() -> None:
    assert verdict_of(replace(WELL, num_live_tokens=0), (finding(Asks.SKIP),)).rule == "no_live_tokens"


def test_an_overflow_under_a_loss_scale_is_told_apart() -> None:
    overflowed = replace(WELL, loss_scale=65536.0, num_nonfinite=2, grad_norm=math.nan)
    assert verdict_of(overflowed, (finding(Asks.SKIP),)).rule == "loss_scale_backoff"
    assert verdict_of(replace(overflowed, loss=math.nan), (finding(Asks.SKIP),)).rule == "asks_skip"
