"""FLOPs from devices and days and back, and what a model's tokens cost exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.plan.hardware import accelerator
from surefoot.plan.sizing.budget import USUAL_MFU, budget, tokens_for, training_cost
from surefoot.plan.sizing.shapes import PUBLIC_SHAPES

H100 = accelerator("h100")


def test_a_thousand_h100_for_thirty_days() -> None:
    assert budget(H100, num_devices=1000, days=30, mfu=0.4).flops == pytest.approx(1.025e24, rel=1e-3)
    flagship = budget(H100, num_devices=1000, days=30, mfu=0.4, goodput=0.97)
    assert flagship.flops == pytest.approx(9.95e23, rel=1e-3)
    assert flagship.cost(3.0) == pytest.approx(2.16e6)


def test_a_fifth_of_it_is_a_fifth_of_mfu_devices_or_days() -> None:
    """2e23 FLOPs, which are often taken for what those devices give."""
    assert budget(H100, num_devices=1000, days=30, flops=2e23).mfu == pytest.approx(0.078, abs=5e-4)
    assert budget(H100, days=30, flops=2e23, mfu=0.4).num_devices == 195
    assert budget(H100, num_devices=1000, flops=2e23, mfu=0.4).days == pytest.approx(5.85, abs=0.01)


@settings(max_examples=40)
@given(st.integers(1, 100_000), st.floats(0.01, 400.0), st.floats(0.01, 1.0), st.floats(0.1, 1.0))
def test_each_is_solved_from_the_others(num_devices: int, days: float, mfu: float, goodput: float) -> None:
    flops = budget(H100, num_devices=num_devices, days=days, mfu=mfu, goodput=goodput).flops
    assert budget(H100, num_devices=num_devices, flops=flops, mfu=mfu, goodput=goodput).days == pytest.approx(days)
    assert budget(H100, days=days, flops=flops, mfu=mfu, goodput=goodput).num_devices == num_devices
    assert budget(H100, num_devices=num_devices, days=days, flops=flops, goodput=goodput).mfu == pytest.approx(mfu)


def test_an_unknown_mfu_is_assumed_and_said_to_be() -> None:
    assumed = budget(H100, num_devices=8, days=1)
    assert assumed.mfu == USUAL_MFU
    assert "assumed" in assumed.reasons["budget.mfu"].why
    assert "assumed" not in budget(H100, num_devices=8, days=1, mfu=0.3).reasons["budget.mfu"].why


def test_more_than_the_peak_is_refused_with_what_would_do() -> None:
    with pytest.raises(PlanInfeasible, match="156% of their dense peak") as caught:
        budget(H100, num_devices=1000, days=30, flops=4e24)
    assert "3900 devices" in caught.value.hint
    assert budget(H100, num_devices=3900, days=30, flops=4e24).mfu == pytest.approx(0.4, abs=1e-3)


def test_more_than_the_given_mfu_is_refused_too() -> None:
    with pytest.raises(PlanInfeasible, match="an MFU of 30%"):
        budget(H100, num_devices=1000, days=30, flops=1e24, mfu=0.3)
    assert budget(H100, num_devices=1000, days=30, flops=1e24, mfu=0.4).mfu == pytest.approx(0.39, abs=0.001)


@pytest.mark.parametrize("mfu", [1.01, 0.0, -0.4, float("nan"), 40.0])
def test_an_mfu_is_a_share(mfu: float) -> None:
    with pytest.raises(ConfigError, match="--mfu"):
        budget(H100, num_devices=1, days=1, mfu=mfu)


def test_one_number_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="more than one"):
        budget(H100, days=30)


def test_exact_flops_beside_six_n_d() -> None:
    """Llama 3 8B: attention over 6N, causal, at 8k and 32k; the head over 6N."""
    sizes = PUBLIC_SHAPES["llama-3-8b"]
    short, long = (training_cost(sizes, tokens=1e12, seq_len=seq_len) for seq_len in (8192, 32768))
    assert short.attention / short.six_nd == pytest.approx(0.134, abs=1e-3)
    assert long.attention / long.six_nd == pytest.approx(0.535, abs=1e-3)
    assert short.head / (6 * 7e9 * 1e12) == pytest.approx(0.075, abs=1e-3)
    assert long.ratio > short.ratio > 1.0
    assert tokens_for(sizes, flops=short.exact, seq_len=8192) == pytest.approx(1e12)


def test_a_window_and_idle_experts_cost_nothing() -> None:
    sizes = PUBLIC_SHAPES["llama-3-8b"]
    whole = training_cost(sizes, tokens=1.0, seq_len=32768)
    windowed = training_cost(replace(sizes, window=4096), tokens=1.0, seq_len=32768)
    assert windowed.attention < whole.attention / 4
    mixture = PUBLIC_SHAPES["mixtral-8x7b"]
    more = replace(mixture, num_experts=16)
    assert training_cost(more, tokens=1.0, seq_len=4096).exact == pytest.approx(
        training_cost(mixture, tokens=1.0, seq_len=4096).exact, rel=1e-3
    )
    assert more.num_parameters > 1.9 * mixture.num_parameters
