"""Reading far away files in blocks, whatever the size of the pieces that are asked for. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable

from surefoot.core.errors import Incomplete
from surefoot.core.records import ManifestFile

BLOCK_BYTES = 16 << 20

ReadBlock = Callable[[ManifestFile, int, memoryview], None]
"""Fills a buffer with the bytes of a file from an offset on."""


class Blocks:
    """Each thread that reads keeps one block: who reads on in small pieces asks the far side once per block."""

    def __init__(self, read: ReadBlock, *, name: str) -> None:
        self._read = read
        self._name = name
        self._kept = threading.local()

    def read_into(self, file: ManifestFile, *, offset: int, buffer: memoryview) -> None:
        """Raises Incomplete when the file ends before `buffer` is full."""
        done = 0
        while done < len(buffer):
            number, skip = divmod(offset + done, BLOCK_BYTES)
            piece = self._block(file, number)[skip : skip + len(buffer) - done]
            if not piece:
                raise Incomplete(f"it ends at byte {offset + done}", where=f"{self._name} {file.name}")
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _block(self, file: ManifestFile, number: int) -> memoryview:
        if getattr(self._kept, "what", None) != (file.name, number):
            start = number * BLOCK_BYTES
            block = memoryview(bytearray(max(0, min(BLOCK_BYTES, file.num_bytes - start))))
            if block:
                self._read(file, start, block)
            self._kept.what, self._kept.block = (file.name, number), block
        kept: memoryview = self._kept.block
        return kept
