"""How large a canary is: what was asked for, as far as it is affordable, in whole atoms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.core.canary_cost import canary_samples, canary_share, canary_words
from surefoot.core.sections import CanarySection, TrainSection

TRAIN = TrainSection(global_batch_size=16, micro_batch_size=4)
CANARY = CanarySection(num_tokens=131_072, interval_steps=100, max_share=0.01)


def test_a_share_is_one_forward_against_three_per_step() -> None:
    assert canary_share(300, interval_steps=10, tokens_per_step=10) == 1.0
    assert canary_share(131_072, interval_steps=100, tokens_per_step=2**20) == pytest.approx(0.000417, rel=1e-3)


def test_it_is_as_large_as_asked_where_that_is_cheap() -> None:
    large = TrainSection(global_batch_size=256, micro_batch_size=8)
    assert canary_samples(CANARY, large, seq_len=2048) == 64
    assert canary_words(64, CANARY, large, seq_len=2048) == "canary: 131,072 held-out tokens every 100 steps, 0.08% of the computing"


def test_it_is_made_smaller_where_it_would_cost_more_than_its_share() -> None:
    samples = canary_samples(CANARY, TRAIN, seq_len=256)
    assert samples == 48
    assert canary_share(samples * 256, interval_steps=100, tokens_per_step=16 * 256) <= CANARY.max_share
    assert canary_share((samples + 4) * 256, interval_steps=100, tokens_per_step=16 * 256) > CANARY.max_share
    words = canary_words(samples, CANARY, TRAIN, seq_len=256)
    assert words.endswith("1.00% of the computing; the 131,072 of canary.num_tokens would be 10.7%")
    assert canary_samples(replace(CANARY, max_share=1.0), TRAIN, seq_len=256) == 512


def test_it_is_whole_atoms_and_at_least_one() -> None:
    odd = TrainSection(global_batch_size=15, micro_batch_size=5)
    assert canary_samples(CANARY, odd, seq_len=256) == 45
    assert canary_samples(replace(CANARY, interval_steps=1), odd, seq_len=256) == 5


def test_what_is_held_out_may_be_less() -> None:
    assert canary_words(12, CANARY, TRAIN, seq_len=256).endswith("0.25% of the computing; no more are held out")


@pytest.mark.parametrize("off", [{"interval_steps": 0}, {"num_tokens": 0}])
def test_it_can_be_left_out(off: dict[str, int]) -> None:
    assert canary_samples(replace(CANARY, **off), TRAIN, seq_len=256) == 0
