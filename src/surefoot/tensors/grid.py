"""The grid of exact sums: multiples of one power of two, whose sum is the same bits in every order.

If every addend is a multiple of u = 2^k and no partial sum reaches 2^53 u, each addition in float64 is exact: there is nothing left that an
order, a number of ranks or an algorithm of a collective could decide. Whoever adds must know how many addends there are and how large
they get; both are agreed before, by the largest value of the last step.
"""

from __future__ import annotations

import math

import torch

SUM_BITS = 52
"""A sum stays below 2^52 units: one bit less than the significand holds, so that a bound that is rounded up is no risk."""

LOWEST_EXPONENT, HIGHEST_EXPONENT = -126, 126
"""Units whose power of two and its inverse are both normal float32 numbers. Only gradients below 2^-80 feel the lower one."""


def ceil_log2(value: float) -> int:
    """The smallest n with `value` <= 2^n; `value` is positive and finite."""
    fraction, exponent = math.frexp(value)
    return exponent - 1 if fraction == 0.5 else exponent


def unit_exponent(largest: float, *, num_addends: int, headroom_bits: int) -> int:
    """k of the finest unit 2^k that leaves room for `num_addends` values of up to 2^headroom_bits times `largest`."""
    exponent = ceil_log2(largest) + ceil_log2(num_addends) + headroom_bits - SUM_BITS
    return min(max(exponent, LOWEST_EXPONENT), HIGHEST_EXPONENT)


def fits(largest: float, *, num_addends: int, exponent: int) -> bool:
    """Whether no sum of `num_addends` values of up to `largest`, in any order, can leave the significand."""
    return largest * num_addends <= math.ldexp(1.0, SUM_BITS + exponent)


def round_to_grid(values: torch.Tensor, *, exponent: int) -> torch.Tensor:
    """Local. A new tensor of the same dtype: the multiple of 2^exponent nearest to each value, ties to even.

    Scaling by a power of two is exact, so there is one rounding, to an integer; a value that is too large to have a fraction stays as it
    is. A float32 rounded so is a float32: the result has no more significant bits than the value had.
    """
    unit = math.ldexp(1.0, exponent)
    return values.mul(1.0 / unit).round_().mul_(unit)


def largest_of(values: torch.Tensor) -> torch.Tensor:
    """Local. The largest absolute value, a scalar tensor; nan if there is one, 0 of nothing. `vector_norm` takes 25 times as long."""
    if not values.numel():
        return torch.zeros((), dtype=values.dtype, device=values.device)
    low, high = torch.aminmax(values)
    return torch.maximum(high, low.neg())
