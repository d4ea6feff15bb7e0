from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.tensors.grid import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ceil_log2,
    fits,
    largest_of,
    round_to_grid,
    unit_exponent,
)

FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)
EXPONENTS = st.integers(-60, 30)


@given(st.lists(FLOATS, min_size=1, max_size=30), EXPONENTS)
def test_the_nearest_multiple_is_taken_and_stays_a_float32(values: list[float], exponent: int) -> None:
    rounded = round_to_grid(torch.tensor(values, dtype=torch.float32), exponent=exponent)
    unit = Fraction(2) ** exponent
    for value, got in zip(values, rounded.tolist(), strict=True):
        assert Fraction(got) == round(Fraction(value) / unit) * unit  # both round ties to even


@given(st.lists(FLOATS, min_size=2, max_size=60))
def test_sums_of_what_fits_are_the_same_bits_in_every_order(values: list[float]) -> None:
    addends = torch.tensor(values, dtype=torch.float32)
    largest = float(largest_of(addends))
    if not largest:
        return
    exponent = unit_exponent(largest, num_addends=len(values), headroom_bits=0)
    assert fits(largest, num_addends=len(values), exponent=exponent)
    on_grid = round_to_grid(addends, exponent=exponent).double()
    exact = math.fsum(on_grid.tolist())
    for seed in range(4):
        total = 0.0
        for index in torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)).tolist():
            total += float(on_grid[index])
        assert total == exact
    assert abs(exact - math.fsum(addends.double().tolist())) <= len(values) * math.ldexp(0.5, exponent)


def test_without_the_grid_the_order_decides() -> None:
    """The control: the same addends as they are."""
    addends = torch.tensor([1.0, 2.0**-53, 2.0**-53], dtype=torch.float64)
    assert (addends[0] + addends[1]) + addends[2] != addends[0] + (addends[1] + addends[2])
    on_grid = round_to_grid(addends, exponent=unit_exponent(1.0, num_addends=3, headroom_bits=0))
    assert (on_grid[0] + on_grid[1]) + on_grid[2] == on_grid[0] + (on_grid[1] + on_grid[2])


@pytest.mark.parametrize("largest", [1.0, 0.75, 1.5, 3.1e-20, 1e30])
@pytest.mark.parametrize("num_addends", [1, 3, 64, 1000])
def test_headroom_is_how_much_a_gradient_may_grow(largest: float, num_addends: int) -> None:
    exponent = unit_exponent(largest, num_addends=num_addends, headroom_bits=6)
    assert fits(largest * 64, num_addends=num_addends, exponent=exponent)
    assert not fits(largest * 64 * 4.01, num_addends=num_addends, exponent=exponent)


def test_units_and_their_inverse_stay_normal_float32() -> None:
    assert unit_exponent(1e-45, num_addends=1, headroom_bits=0) == LOWEST_EXPONENT
    assert unit_exponent(3e38, num_addends=2**60, headroom_bits=6) == HIGHEST_EXPONENT
    for exponent in (LOWEST_EXPONENT, HIGHEST_EXPONENT):
        assert torch.equal(round_to_grid(torch.zeros(3), exponent=exponent), torch.zeros(3))


def test_what_is_not_finite_stays_so() -> None:
    rounded = round_to_grid(torch.tensor([math.inf, -math.inf, math.nan]), exponent=-20)
    assert rounded[0] == math.inf
    assert rounded[1] == -math.inf
    assert math.isnan(rounded[2])


@pytest.mark.parametrize(("values", "largest"), [([], 0.0), ([0.0, -0.0], 0.0), ([1.0, -3.0], 3.0), ([-math.inf, 2.0], math.inf)])
def test_the_largest_absolute_value(values: list[float], largest: float) -> None:
    assert float(largest_of(torch.tensor(values))) == largest


def test_a_nan_is_not_lost_in_the_largest() -> None:
    assert math.isnan(float(largest_of(torch.tensor([1.0, math.nan, 2.0]))))


@pytest.mark.parametrize(("value", "expected"), [(1.0, 0), (1.5, 1), (2.0, 1), (2.1, 2), (0.5, -1), (0.3, -1), (5e-324, -1074)])
def test_the_power_of_two_at_or_above(value: float, expected: int) -> None:
    assert ceil_log2(value) == expected
