from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.tensors.exact_sum import NUM_LEVELS, level_exponents, round_sum_addend, square_levels

CPU = torch.device("cpu")
VALUES = st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=80)


def largest_in(values: list[float]) -> float:
    return max(abs(value) for value in values)


@given(VALUES, st.integers(0, 5), st.integers(1, 7))
def test_any_order_and_any_split_over_ranks_gives_the_same_bits(values: list[float], seed: int, num_ranks: int) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    shuffled = whole[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]

    def levels(parts: list[torch.Tensor]) -> list[float]:
        return square_levels(parts, largest=largest_in(values), num_values=len(values), device=CPU).tolist()

    by_rank = [levels([part]) for part in shuffled.chunk(num_ranks)]
    added = [math.fsum(level) for level in zip(*by_rank, strict=True)]
    assert added == levels([whole]) == levels(list(torch.split(whole, 1)))


@given(VALUES)
def test_what_is_left_out_is_bounded_by_the_largest_square(values: list[float]) -> None:
    largest = largest_in(values)
    levels = square_levels([torch.tensor(values, dtype=torch.float32)], largest=largest, num_values=len(values), device=CPU)
    exact = sum((Fraction(value) ** 2 for value in values), Fraction(0))
    error = abs(sum((Fraction(level) for level in levels.tolist()), Fraction(0)) - exact)
    assert error <= Fraction(largest) ** 2 / 2**34


def test_a_plain_sum_of_these_squares_depends_on_the_order() -> None:
    """The control."""
    squares = torch.randn(200, generator=torch.Generator().manual_seed(0)).double().square()
    sums = {sum(squares[torch.randperm(200, generator=torch.Generator().manual_seed(seed))].tolist()) for seed in range(9)}
    assert len(sums) > 1


@pytest.mark.parametrize("num_values", [1, 2, 3, 1000, 12_000_000, 2**24, 2**25, 10**9, 10**12])
def test_no_level_overflows_and_the_last_is_fine_enough(num_values: int) -> None:
    largest = 3.7
    exponents = level_exponents(largest, num_values=num_values)
    bound = Fraction(largest) ** 2
    for exponent in exponents:
        unit = Fraction(2) ** exponent
        assert bound <= 2**51 * unit  # so that adding 1.5 * 2^52 units rounds to a multiple of one
        assert num_values * (bound + unit / 2) <= 2**53 * unit
        bound = unit / 2
    assert len(exponents) <= NUM_LEVELS
    if num_values < 10**9:
        assert num_values * bound <= Fraction(largest) ** 2 / 2**33


def test_nothing_and_zeros_are_zero_and_what_is_not_finite_is_told() -> None:
    assert square_levels([], largest=0.0, num_values=0, device=CPU).tolist() == [0.0] * NUM_LEVELS
    assert square_levels([torch.zeros(5)], largest=0.0, num_values=5, device=CPU).tolist() == [0.0] * NUM_LEVELS
    assert (
        square_levels([torch.tensor([1e-200], dtype=torch.float64)], largest=1e-200, num_values=1, device=CPU).tolist()
        == [0.0] * NUM_LEVELS
    )
    assert square_levels([torch.ones(5)], largest=math.inf, num_values=5, device=CPU).isnan().all()


@given(st.lists(st.floats(0.0, 2.0**30, width=32), min_size=1, max_size=20))
def test_nats_add_up_in_any_order(nats: list[float]) -> None:
    addends = [round_sum_addend(torch.tensor(value), exponent=-20) for value in nats]
    assert all(addend.dtype == torch.float64 for addend in addends)
    assert float(sum(addends)) == float(sum(reversed(addends))) == math.fsum(float(addend) for addend in addends)
    assert all(abs(float(addend) - value) <= 2.0**-21 for addend, value in zip(addends, nats, strict=True))
