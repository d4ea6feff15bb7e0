"""Binds checkpoint, monitor, heal, coordinate and observe to any training loop. `Guard` is imported when it is first used: the processes
beside the ranks take other parts of this room, and load no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.guard.guard import Guard

__all__ = ["Guard"]


def __getattr__(name: str) -> Any:
    if name != "Guard":
        raise AttributeError(f"module 'surefoot.guard' has no attribute {name!r}")
    from surefoot.guard.guard import Guard

    return Guard
