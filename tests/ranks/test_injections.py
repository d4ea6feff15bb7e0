"""Faults injected into real training on three ranks: each is noticed, named, and healed where the policy heals.

The campaign draws every fault ten times and prints what became of each:

    pytest -m campaign tests/ranks/test_injections.py -s
"""

from __future__ import annotations

import pytest

from tests.ranks.conftest import WarmParent
from tests.ranks.injections.bench import Bench
from tests.ranks.injections.drawing import KINDS, Case, draw
from tests.ranks.injections.faults import Kind
from tests.ranks.injections.outcomes import Outcome, table

_SEED = 1
_NUM_DRAWN = 10
_MOST_INCONCLUSIVE = 2


@pytest.fixture(scope="module")
def bench(warm_parent: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(warm_parent, tmp_path_factory.mktemp("injections"))


def test_what_is_over_is_named_and_leaves_the_bits_of_a_run_without_it(bench: Bench) -> None:
    windows: dict[Kind, tuple[int, int]] = {
        "nan-in-an-atom": (22, 38),
        "flipped-gradient-bit": (45, 58),
        "flipped-parameter-bit": (82, 98),
        "rate-not-as-told": (165, 185),
    }
    cases = [draw(kind, seed=_SEED, data=bench.data, window=window) for kind, window in windows.items()]
    for outcome in shown(bench.outcomes(cases)):
        assert outcome.is_named_rightly, outcome.line()
        assert outcome.healed == "the same bits", outcome.line()


def test_samples_that_are_ill_are_skipped_and_the_loss_is_that_of_clean_runs(bench: Bench) -> None:
    repeated = draw("repeated-bytes", seed=_SEED, data=bench.data)
    not_a_number = draw("nan-of-a-sample", seed=_SEED, data=bench.data, window=(70, 120), company=repeated)
    shuffled = draw("shuffled-tokens", seed=_SEED, data=bench.data)
    for outcome in shown([*bench.outcomes([not_a_number, repeated]), bench.outcome(shuffled)]):
        assert outcome.is_named_rightly, outcome.line()
        assert outcome.actions == ("skip",), outcome.line()
        assert outcome.healed == "within the spread", outcome.line()


@pytest.mark.parametrize("kind", ["biased-contribution", "rate-as-told", "other-seed"])
def test_what_stays_is_named_and_stops_the_run(kind: Kind, bench: Bench) -> None:
    (outcome,) = shown([bench.outcome(draw(kind, seed=_SEED, data=bench.data))])
    assert outcome.is_named_rightly, outcome.line()
    assert outcome.exit_code == outcome.case.exit_code, outcome.line()


def test_moments_that_a_resume_lost_are_missed_and_an_older_checkpoint_has_them(bench: Bench) -> None:
    (outcome,) = shown([bench.outcome(draw("lost-moments", seed=_SEED, data=bench.data))])
    assert outcome.is_named_rightly, outcome.line()
    assert outcome.healed == "the same bits", outcome.line()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_campaign(kind: Kind, bench: Bench) -> None:
    outcomes = shown([bench.outcome(draw(kind, seed=seed, data=bench.data)) for seed in range(_NUM_DRAWN)])
    assert all(outcome.is_caught for outcome in outcomes)
    wrong = [outcome.line() for outcome in outcomes if not outcome.is_named_rightly]
    assert len(wrong) <= _MOST_INCONCLUSIVE
    assert all(outcome.is_inconclusive for outcome in outcomes if not outcome.is_named_rightly), wrong
    assert all(ended_as_it_should(outcome) for outcome in outcomes)


def ended_as_it_should(outcome: Outcome) -> bool:
    """Healed; or stopped for a person, where the fault stays or its cause could not be told."""
    case: Case = outcome.case
    if case.exit_code or outcome.exit_code:
        return outcome.exit_code == (case.exit_code or 6)
    return outcome.healed == "the same bits" or (not case.same_bits and outcome.healed == "within the spread")


def shown(outcomes: list[Outcome]) -> list[Outcome]:
    print(f"\n{table(outcomes)}")
    return outcomes
