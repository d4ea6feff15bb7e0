"""The order of samples as arithmetic: a keyed permutation, so that any position is known without walking to it.

No table is built and no state is kept. Sample g of a run is found from (seed, source, epoch, g) alone, in the same way on every rank.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

PRP: Final = "feistel8-splitmix64/1"
"""Name and version of the permutation. Cursors carry it: another algorithm must never reorder a run that began with this one."""

_NUM_ROUNDS: Final = 8
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK64: Final = (1 << 64) - 1

U64Array = npt.NDArray[np.uint64]


class FeistelPermutation:
    """A bijection of range(size) chosen by a 64-bit key, computed for any index on its own.

    An unbalanced Feistel network over `(size - 1).bit_length()` bits with 8 rounds of a full 64-bit mix; an image outside the range is
    encrypted again until it lies inside (cycle walking), fewer than two passes on average. One bit less would not hold size - 1 when
    size is a power of two plus one.
    """

    def __init__(self, size: int, *, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"a permutation of {size} items: wanted 1 to 2**62")
        self.size = size
        num_bits = (size - 1).bit_length()
        self._low_bits = np.uint64((num_bits + 1) // 2)
        self._low_mask = np.uint64((1 << int(self._low_bits)) - 1)
        self._high_mask = np.uint64((1 << (num_bits // 2)) - 1)
        self._round_keys = [np.uint64(_mix64_int(key + (round_ + 1) * _GOLDEN)) for round_ in range(_NUM_ROUNDS)]

    def forward(self, index: npt.ArrayLike) -> U64Array:
        """Where the permutation sends each index. Any shape; ValueError outside range(size)."""
        return self._walk(self._inside(index), rounds=range(_NUM_ROUNDS))

    def inverse(self, image: npt.ArrayLike) -> U64Array:
        """The index whose image is given: `inverse(forward(i)) == i`."""
        return self._walk(self._inside(image), rounds=range(_NUM_ROUNDS - 1, -1, -1))

    def _inside(self, values: npt.ArrayLike) -> U64Array:
        array = np.asarray(values)
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.size):
            raise ValueError(f"index {int(array.min())}..{int(array.max())} outside range({self.size})")
        return array.astype(np.uint64)

    def _walk(self, values: U64Array, *, rounds: range) -> U64Array:
        flat = self._network(values.reshape(-1), rounds=rounds)
        outside = np.flatnonzero(flat >= self.size)
        while outside.size:
            walked = self._network(flat[outside], rounds=rounds)
            flat[outside] = walked
            outside = outside[walked >= self.size]
        return flat.reshape(values.shape)

    def _network(self, values: U64Array, *, rounds: range) -> U64Array:
        """One pass. A round changes one half by a function of the other, so running the rounds backwards undoes them."""
        low, high = values & self._low_mask, values >> self._low_bits
        for round_ in rounds:
            if round_ % 2 == 0:
                high = high ^ (splitmix64(low ^ self._round_keys[round_]) & self._high_mask)
            else:
                low = low ^ (splitmix64(high ^ self._round_keys[round_]) & self._low_mask)
        return (high << self._low_bits) | low


def splitmix64(values: U64Array) -> U64Array:
    """The finaliser of splitmix64: every input bit reaches every output bit, which a multiply-add does not achieve."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix64_int(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
