"""A look at a foreign pickle before it is read: even one that may name nothing can ask for all the memory of the machine. No torch."""

from __future__ import annotations

import pickle
import pickletools

_SHOWN_CHARS = 200


def refuse_greedy(raw: bytes) -> None:
    """Raises ValueError or UnpicklingError for a pickle that asks for more room than its own length accounts for.

    `pickle` makes room for what an opcode announces before it looks whether that much comes: a memo of four thousand million places, or an
    array of any length, is six bytes.
    """
    for opcode, argument, position in pickletools.genops(raw):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(raw):
            raise pickle.UnpicklingError(f"byte {position} asks for {argument} places, and the pickle has {len(raw)} bytes")


def told(error: Exception) -> str:
    """What a foreign pickle made the reader raise, for a message: its text may repeat what was read, of any length."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
