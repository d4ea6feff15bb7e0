"""Sums of squares whose bits depend on no order: pre-rounded levels (Demmel and Nguyen, "Parallel Reproducible Summation", 2015).

Squares span twice the exponents of what is squared, too many for one grid. So each is split: the part that is a multiple of a first unit,
then what is left in a second, finer one, then a third. On each level all partial sums are exact in float64; the levels are added
at the end, by `math.fsum`, which is exact too. The units follow from two numbers that all ranks know: the largest value and the count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from surefoot.tensors.grid import SUM_BITS, ceil_log2

NUM_LEVELS = 3
_ERROR_BITS = 34
"""What the levels leave out is at most 2^-34 of the largest square, in all."""
_CHUNK = 1 << 15  # float64 of this many stay in the second cache through all passes


def level_exponents(largest: float, *, num_values: int) -> tuple[int, ...]:
    """k of the unit 2^k of each level, coarsest first: two of them where that is fine enough, else `NUM_LEVELS`.

    `num_values` squares of up to `largest`^2 stay below 2^52 units of the first. A level leaves at most half its unit of each.
    """
    count_bits = max(1, ceil_log2(max(1, num_values)))
    bound = ceil_log2(largest * largest)
    exponents: list[int] = []
    while len(exponents) < NUM_LEVELS:
        exponents.append(bound + count_bits - SUM_BITS)
        bound = exponents[-1] - 1
        if bound + count_bits <= ceil_log2(largest * largest) - _ERROR_BITS:
            break
    return tuple(exponents)


def square_levels(tensors: Iterable[torch.Tensor], *, largest: float, num_values: int, device: torch.device) -> torch.Tensor:
    """Local. float64 [NUM_LEVELS]: what the squares of all elements come to on each level; unused levels are 0.

    `largest` bounds every absolute value, and `num_values` counts the elements, over *all* ranks: the sums of ranks add exactly. All nan
    where `largest` is not finite.
    """
    sums_L = torch.zeros(NUM_LEVELS, dtype=torch.float64, device=device)
    if not math.isfinite(largest * largest):
        return sums_L.fill_(math.nan)
    if not largest * largest:
        return sums_L
    shifts = [1.5 * math.ldexp(1.0, 52 + exponent) for exponent in level_exponents(largest, num_values=num_values)]
    for tensor in tensors:
        for chunk in torch.split(tensor.detach().flatten(), _CHUNK if device.type == "cpu" else max(1, tensor.numel())):
            rest = chunk.to(torch.float64, copy=True).square_()
            for level, shift in enumerate(shifts):
                part = rest.add(shift).sub_(shift)
                sums_L[level] += part.sum()
                if level + 1 < len(shifts):
                    rest.sub_(part)
    return sums_L


def round_sum_addend(value: torch.Tensor, *, exponent: int) -> torch.Tensor:
    """Local. A scalar as float64, rounded to a multiple of 2^exponent: sums of such, below 2^53 units, have no order."""
    unit = math.ldexp(1.0, exponent)
    return value.detach().to(torch.float64).div(unit).round_().mul_(unit)
