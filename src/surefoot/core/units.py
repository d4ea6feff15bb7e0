"""Numbers for people: bytes, counts and durations in the shortest form that keeps three digits."""

from __future__ import annotations


def show_count(value: float) -> str:
    """1234567 -> '1.23M'."""
    for limit, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # what would be rounded up to it
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}" if value != int(value) else str(int(value))


def show_bytes(num_bytes: float) -> str:
    """Powers of 1024, as file tools show them: 16384 -> '16.0 KiB'."""
    for limit, suffix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= limit:
            return f"{num_bytes / limit:.1f} {suffix}"
    return f"{int(num_bytes)} B"


def show_duration(duration_s: float) -> str:
    """7384 -> '2h03m'; 61 -> '1m01s'; 2.5 -> '2.5s'."""
    if duration_s < 60:
        return f"{duration_s:.1f}s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
