"""What of the data is blocked, by source and token: looked up for many samples at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block, BlockMode

I64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class BlockedSpans:
    """Token spans of one source, each with the first global sample that knows of it."""

    def __init__(self, spans: Iterable[tuple[int, int, int]] = ()) -> None:
        """`spans` are (start, end, effective sample)."""
        ordered = np.array(sorted(spans), dtype=np.int64).reshape(-1, 3)
        self._starts, self._ends, self._effective = ordered[:, 0], ordered[:, 1], ordered[:, 2]
        self._furthest = np.maximum.accumulate(self._ends) if len(ordered) else self._ends

    def __bool__(self) -> bool:
        return self._starts.size > 0

    def touch(self, starts: I64Array, length: int, *, samples: I64Array) -> BoolArray:
        """Which of the rows [start, start + length) of the global `samples` hold a blocked token."""
        near = np.searchsorted(self._starts, starts + length, side="left")
        maybe = near > 0
        maybe[maybe] = self._furthest[near[maybe] - 1] > starts[maybe]
        touched = np.zeros(starts.shape, dtype=np.bool_)
        for row in np.flatnonzero(maybe).tolist():
            touched[row] = bool(self.within(int(starts[row]), length, sample=int(samples[row])))
        return touched

    def within(self, start: int, length: int, *, sample: int | None) -> list[tuple[int, int]]:
        """The blocked parts of [start, start + length) as (first, end) counted from `start`; of all entries where `sample` is None."""
        low = int(np.searchsorted(self._furthest, start, side="right"))
        high = int(np.searchsorted(self._starts, start + length, side="left"))
        firsts, ends = self._starts[low:high], self._ends[low:high]
        here = ends > start
        if sample is not None:
            here &= self._effective[low:high] <= sample
        parts = zip(np.maximum(firsts[here], start) - start, np.minimum(ends[here], start + length) - start, strict=True)
        return [(int(first), int(end)) for first, end in parts]


def silenced(blocks: Sequence[Block]) -> Mapping[str, BlockedSpans]:
    """What of each source has no loss and is attended to by nobody. Mode replace too: what the reserve has no room for is masked."""
    return blocked_by_source(blocks, modes=frozenset({"mask", "replace"}))


def blocked_by_source(blocks: Sequence[Block], *, modes: frozenset[BlockMode]) -> Mapping[str, BlockedSpans]:
    """The spans of all `blocks` in one of `modes`, per source."""
    spans: dict[str, list[tuple[int, int, int]]] = {}
    for block in blocks:
        if block.mode in modes:
            for span in block.spans:
                spans.setdefault(span.source, []).append((span.start, span.end, block.effective_sample))
    return {source: BlockedSpans(found) for source, found in spans.items()}


def skipped_ranges(blocks: Iterable[Block]) -> list[tuple[int, int]]:
    """The ranges [first, end) of global samples that no step takes: never anything before the entry was known."""
    ranges = [
        (max(block.samples[0], block.effective_sample), block.samples[1])
        for block in blocks
        if block.kind == "samples" and block.samples is not None
    ]
    return [(first, end) for first, end in ranges if first < end]
