"""Published laws at the budgets where their answers are known, and what they say of themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.errors import ConfigError
from surefoot.plan.sizing.laws import Power, Ratio, counted, power_draws
from surefoot.plan.sizing.published import TUNING_NAMES, law, published_laws
from surefoot.plan.sizing.shapes import PUBLIC_SHAPES

NAMES = ("chinchilla-20", "hoffmann", "epoch", "kaplan", "porian", "deepseek", "hunyuan-moe")


def ratio_at(name: str, flops: float) -> float:
    return law(name).best_tokens(flops) / law(name).best_n(flops)


@pytest.mark.parametrize(
    ("name", "flops", "ratio"),
    [
        ("epoch", 5.76e23, 17.9),
        ("hoffmann-rounded", 5.76e23, 92.6),
        ("kaplan", 1e21, 2.8),
        ("kaplan", 1e23, 0.33),
        ("hunyuan-moe", 3.12e24, 96.0),
    ],
)
def test_tokens_per_parameter(name: str, flops: float, ratio: float) -> None:
    assert ratio_at(name, flops) == pytest.approx(ratio, rel=0.015)


def test_twenty_tokens_per_parameter() -> None:
    for flops, n, tokens in ((2e23, 40.8e9, 816e9), (1e24, 91.3e9, 1.826e12)):
        assert law("chinchilla-20").best_n(flops) == pytest.approx(n, rel=1e-3)
        assert law("chinchilla-20").best_tokens(flops) == pytest.approx(tokens, rel=1e-3)


def test_sizes_that_authors_print() -> None:
    """Hunyuan-Large: 58.1B active on 5.6T. Porian et al. at Chinchilla's budget. Besiroglu et al.'s law at 2e23."""
    assert law("hunyuan-moe").best_n(3.12e24) == pytest.approx(58.1e9, rel=0.005)
    assert law("hunyuan-moe").best_tokens(3.12e24) == pytest.approx(5.6e12, rel=0.005)
    assert law("porian").best_n(5.76e23) == pytest.approx(76e9, rel=0.01)
    assert law("epoch").best_n(2e23) == pytest.approx(42.3e9, rel=0.01)
    surface = law("epoch").surface
    assert surface is not None
    assert surface.loss(law("epoch").best_n(2e23), law("epoch").best_tokens(2e23)) == pytest.approx(2.007, abs=1e-3)


def test_bands_of_the_corrected_law() -> None:
    assert law("epoch").n_band(1.026e24) == pytest.approx((70e9, 166e9), rel=0.03)
    assert law("epoch").ratio_band(1.026e24) == pytest.approx((6.2, 35.2), rel=0.03)
    assert law("epoch").n_band(2e23) == pytest.approx((32e9, 66e9), rel=0.03)


def test_a_band_widens_with_distance() -> None:
    widths = [high / low for low, high in (law("porian").n_band(flops) or (1.0, 1.0) for flops in (5.4e17, 1e20, 1e24))]
    assert widths == sorted(widths)
    assert widths[0] == pytest.approx(math.exp(2 * 1.96 * 0.033), rel=0.05)


def test_distance_is_said() -> None:
    assert law("epoch").extrapolation(1e24) == pytest.approx(77, rel=0.01)
    assert law("epoch").extrapolation(1e21) == 1.0
    assert law("epoch").extrapolation(1e16) == pytest.approx(140, rel=0.01)
    assert any("76.9 times beyond the largest run" in text for text in law("epoch").warnings(1e24))
    assert not any("beyond" in text for text in law("epoch").warnings(1e21))


@pytest.mark.parametrize("name", NAMES)
def test_each_law_has_its_papers(name: str) -> None:
    told = law(name)
    assert told.name == name
    assert "arXiv" in told.source
    assert told.corpus
    assert told.flops_range
    assert told.flops_range[0] < told.flops_range[1]


@given(st.sampled_from(sorted(published_laws())), st.floats(1e17, 1e27), st.floats(1.001, 100.0))
def test_more_compute_is_a_larger_model_on_more_tokens(name: str, flops: float, factor: float) -> None:
    told = law(name)
    assert told.best_n(flops * factor) > told.best_n(flops)
    assert told.best_tokens(flops * factor) > told.best_tokens(flops)
    assert told.cost.flops(told.best_n(flops), told.best_tokens(flops)) == pytest.approx(flops)


@given(st.floats(1e15, 1e27))
def test_size_and_tokens_of_a_surface_know_each_other(flops: float) -> None:
    surface = law("epoch").surface
    assert surface is not None
    n = surface.best_n(flops)
    assert surface.tokens_for(n) == pytest.approx(flops / 6 / n)
    assert surface.n_for(surface.tokens_for(n)) == pytest.approx(n)


@pytest.mark.parametrize("name", ["ratio 40", "ratio:40", "ratio=40", "RATIO 40.0"])
def test_a_ratio_of_ones_own(name: str) -> None:
    assert law(name).rule == Ratio(40.0)
    assert "no run says" in law(name).warnings(1e22)[0]


@pytest.mark.parametrize(
    ("name", "hint"), [("epok", "did you mean epoch"), ("ratio:0", "ratio:40"), ("ratio:1.2.3", "ratio:40"), ("", "known: epoch")]
)
def test_no_such_law(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        law(name)
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", [*TUNING_NAMES, "lr~1/width"])
def test_a_law_of_something_else(name: str) -> None:
    with pytest.raises(ConfigError, match="says no size"):
        law(name)


def test_draws_of_a_line_have_the_errors_asked_for() -> None:
    line = Power(0.1, 0.5)
    draws = power_draws(line, pivot_flops=1e20, log_n_std=0.05, exponent_std=0.01, num_draws=1000)
    levels = [math.log(draw.best_n(1e20) / line.best_n(1e20)) for draw in draws]
    slopes = [draw.exponent - 0.5 for draw in draws]
    for values, std in ((levels, 0.05), (slopes, 0.01)):
        assert sum(values) / len(values) == pytest.approx(0.0, abs=0.02 * std)
        assert math.sqrt(sum(value**2 for value in values) / len(values)) == pytest.approx(std, rel=0.03)
    together = sum(a * b for a, b in zip(levels, slopes, strict=True)) / len(levels)
    assert abs(together) < 0.05 * 0.05 * 0.01


def test_of_experts_the_active_ones_are_counted() -> None:
    assert law("epoch").counts_for(is_mixture=True) == "active"
    assert law("epoch").counts_for(is_mixture=False) == "all"
    assert law("kaplan").counts_for(is_mixture=True) == "body"


def test_what_is_counted() -> None:
    sizes = PUBLIC_SHAPES["llama-3-8b"]
    embedding = 128256 * 4096
    everything = 8_030_261_248
    assert counted(sizes, "all") == everything
    assert counted(sizes, "without embedding") == everything - embedding
    assert counted(sizes, "body") == everything - 2 * embedding
    assert counted(sizes, "flops/6", seq_len=8192) == everything - 2 * embedding + 2 * 32 * 4096 * 8192
    mixture = PUBLIC_SHAPES["mixtral-8x7b"]
    assert counted(mixture, "active") == mixture.num_active_parameters < counted(mixture, "all")
    assert counted(mixture, "body") == mixture.num_active_parameters - 2 * 32000 * 4096
