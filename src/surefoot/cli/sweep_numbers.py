"""Numbers as they are given to `surefoot sweep`: what is none, or cannot be meant, is refused by the option's name."""

from __future__ import annotations

import math

from surefoot.core.errors import ConfigError


def numbers(text: str, *, where: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of numbers", where=where, hint="separate them by commas: 1e18,2e18") from error


def whole_numbers(text: str, *, where: str) -> tuple[int, ...]:
    found = numbers(text, where=where)
    for number in found:
        if not 0 < number < math.inf or number != int(number):
            raise ConfigError(f"{number:g} is no whole number above 0", where=where, hint="such as 64,128,256", got=number)
    return tuple(int(number) for number in found)


def amount(value: float, *, where: str, hint: str) -> float:
    """`value`, finite and not below 0."""
    if not 0 <= value < math.inf:
        raise ConfigError(f"{value:g} is no amount", where=where, hint=hint, got=value)
    return value


def flops(value: float, *, where: str) -> float:
    """0 is none given."""
    return amount(value, where=where, hint="a finite number of FLOPs, such as 1e18")
