"""Batches for every number of ranks, ramps under the critical batch, and the steps that both come to."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.data.atoms import deal
from surefoot.data.steps import StepPlan
from surefoot.plan.sizing.published import EPOCH
from surefoot.plan.tuning.batch import LEAST_STEPS, above_critical, batch_ramp, critical_in_run, legal_batches, num_steps, uneven, waste


def test_512_devices_that_become_384() -> None:
    """TP 8 and PP 8 leave 8 data ranks, then 6."""
    assert "42.67 micro-steps: 43 are computed, and 0.78%" in uneven(256, num_ranks=6)
    assert not uneven(256, num_ranks=8)
    judged = legal_batches(256, data_ranks=(8, 6), given=True)
    assert (judged.batch, judged.even) == (256, (240, 264))
    assert judged.waste == pytest.approx({8: 0.0, 6: 1 - 256 / 258})
    proposed = legal_batches(256, data_ranks=(8, 6))
    assert proposed.batch == 264
    assert proposed.worst_waste == 0
    assert "256 sequences over 6 data ranks" in proposed.why


def test_where_no_batch_is_even_for_all_the_waste_is_told() -> None:
    found = legal_batches(1500, data_ranks=range(120, 125))
    assert not found.even
    assert 0 < found.worst_waste < 0.04
    assert "phantoms" in found.why
    assert found.worst_waste < legal_batches(1500, data_ranks=range(120, 125), given=True).worst_waste


def test_a_batch_that_is_legal_is_kept() -> None:
    found = legal_batches(1024, data_ranks=(128,), micro_batch_size=4)
    assert (found.batch, found.even, found.worst_waste) == (1024, (1024,), 0.0)


@given(st.integers(1, 600), st.integers(1, 40), st.integers(1, 9))
def test_waste_is_what_training_deals(batch: int, num_ranks: int, micro_batch_size: int) -> None:
    slots = sum(
        len(deal(batch, micro_batch_size=micro_batch_size, num_ranks=num_ranks, rank=rank)) * micro_batch_size for rank in range(num_ranks)
    )
    assert waste(batch, num_ranks=num_ranks, micro_batch_size=micro_batch_size) == pytest.approx(1 - batch / slots)


@settings(max_examples=60)
@given(st.integers(1, 3000), st.sets(st.integers(1, 64), min_size=1, max_size=4), st.integers(1, 4))
def test_the_proposed_batch_wastes_no_more_than_the_wished_one(near: int, ranks: set[int], micro_batch_size: int) -> None:
    proposed = legal_batches(near, data_ranks=ranks, micro_batch_size=micro_batch_size)
    wished = legal_batches(near, data_ranks=ranks, micro_batch_size=micro_batch_size, given=True)
    assert proposed.batch >= 1
    assert abs(proposed.batch / near - 1) <= 0.25 or proposed.batch == near
    assert proposed.worst_waste <= wished.worst_waste + 1e-3


@pytest.mark.parametrize(("near", "ranks", "micro"), [(0, (1,), 1), (8, (), 1), (8, (0,), 1), (8, (1,), 0)])
def test_no_batch(near: int, ranks: tuple[int, ...], micro: int) -> None:
    with pytest.raises(ConfigError):
        legal_batches(near, data_ranks=ranks, micro_batch_size=micro)


def test_the_flagship_ramp() -> None:
    """41.5B on 3.99e12 tokens, 124 data ranks: half a million tokens at first, 6.1 million from 4% of the run."""
    critical = critical_in_run(EPOCH, 41.5e9)
    num_samples = int(3.99e12 / 4096)
    ramp = batch_ramp(1488, seq_len=4096, num_samples=num_samples, critical=critical, data_ranks=(124,))
    assert [batch for _, batch in ramp] == [124, 248, 372, 744, 1488]
    assert 0.02 < ramp[-1][0] / num_samples < 0.06
    for first, batch in ramp[1:]:
        assert batch * 4096 <= critical(first * 4096.0) <= 1.3 * batch * 4096
    assert num_steps(num_samples, global_batch=1488, ramp=ramp) > num_steps(num_samples, global_batch=1488)


@settings(max_examples=60)
@given(st.integers(2, 4096), st.sampled_from([128, 4096]), st.integers(1, 64), st.floats(1e7, 1e11), st.floats(20, 1e4))
def test_a_ramp_is_one_that_training_takes(global_batch: int, seq_len: int, num_ranks: int, n: float, steps: float) -> None:
    num_samples = int(global_batch * steps) + 1
    ramp = batch_ramp(global_batch, seq_len=seq_len, num_samples=num_samples, critical=critical_in_run(EPOCH, n), data_ranks=(num_ranks,))
    plan = StepPlan(ramp, global_batch_size=global_batch)  # refuses what is out of order
    total = num_steps(num_samples, global_batch=global_batch, ramp=ramp)
    first, batch = plan.span(total - 1)
    assert first < num_samples <= first + batch
    if ramp:
        assert ramp[-1][0] <= 0.6 * num_samples
        assert all(earlier[1] < later[1] for earlier, later in pairwise(ramp))
        assert all((later[0] - earlier[0]) / earlier[1] >= LEAST_STEPS * 0.8 for earlier, later in pairwise(ramp))
        if global_batch % num_ranks == 0:
            assert all(batch % num_ranks == 0 for _, batch in ramp)


def test_a_small_batch_needs_no_ramp() -> None:
    always = batch_ramp(16, seq_len=256, num_samples=10**6, critical=lambda seen: 1e9)
    assert always == ()


def test_a_batch_beyond_the_critical_one_is_known() -> None:
    critical = critical_in_run(EPOCH, 41.5e9)
    beyond = {"seq_len": 4096, "num_samples": int(3.99e12 / 4096)}
    assert above_critical(16384, critical=critical, **beyond) == pytest.approx(8.4, abs=0.1)
    assert above_critical(1488, critical=critical, **beyond) < 1
