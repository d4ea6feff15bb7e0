"""Binds checkpoint, monitor, heal, coordinate and observe to any training loop."""

from surefoot.guard.guard import Guard

__all__ = ["Guard"]
