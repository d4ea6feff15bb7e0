"""Which sample of the reserve stands in for which blocked one: arithmetic over the order of a source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block
from surefoot.data.blocked import BlockedSpans, blocked_by_source
from surefoot.data.source_order import Source

I64Array = npt.NDArray[np.int64]


class Replacements:
    """Units of one source with a blocked token in mode replace, and the reserve's units in their place, epoch by epoch.

    The j-th such unit, entries of the log first, then the order of the epoch, takes the reserve's j-th. When the reserve is used up, the
    blocked text is masked and nothing is replaced. A piece of a unit that holds nothing blocked stays.
    """

    def __init__(self, source: Source, blocks: Sequence[Block]) -> None:
        self._source = source
        self._blocks = blocks
        self._spans = blocked_by_source(blocks, modes=frozenset({"replace"})).get(source.name, BlockedSpans())
        self._of_epoch = lru_cache(maxsize=8)(self._replaced)

    def __bool__(self) -> bool:
        return bool(self._spans) and self._source.num_reserve > 0

    def apply(self, starts: I64Array, length: int, *, epoch: int, samples: I64Array) -> I64Array:
        """`starts` of rows in `epoch`, those of replaced rows changed to where the reserve has them."""
        unit = self._source.unit_tokens
        blocked, instead = self._of_epoch(epoch)
        found = np.searchsorted(blocked, starts // unit)
        is_blocked = found < blocked.size
        is_blocked[is_blocked] = blocked[found[is_blocked]] == starts[is_blocked] // unit
        is_blocked &= self._spans.touch(starts, length, samples=samples)
        changed = starts.copy()
        changed[is_blocked] = instead[found[is_blocked]] * unit + starts[is_blocked] % unit
        return changed

    def replaced_by(self, start: int, end: int, *, epoch: int) -> I64Array:
        """The blocked units in whose place a unit with a token of [start, end) stands."""
        unit = self._source.unit_tokens
        blocked, instead = self._of_epoch(epoch)
        return blocked[(instead >= start // unit) & (instead < -(-end // unit))]

    def _replaced(self, epoch: int) -> tuple[I64Array, I64Array]:
        """(blocked units sorted, the unit in the place of each)."""
        source = self._source
        order = source.permutation(epoch)
        taken: dict[int, int] = {}
        for block in self._blocks:
            if block.mode != "replace":
                continue
            units = {
                unit
                for span in block.spans
                if span.source == source.name
                for unit in range(span.start // source.unit_tokens, min(-(-span.end // source.unit_tokens), source.num_units))
            }
            fresh = np.array(sorted(units - taken.keys()), dtype=np.int64)
            positions = order.inverse(fresh).astype(np.int64) if fresh.size else fresh
            for position, unit in sorted(zip(positions.tolist(), fresh.tolist(), strict=True)):
                if position < source.num_regular and len(taken) < source.num_reserve:
                    taken[unit] = int(order.forward([source.num_regular + len(taken)])[0])
        blocked = np.array(sorted(taken), dtype=np.int64)
        return blocked, np.array([taken[unit] for unit in blocked.tolist()], dtype=np.int64)
