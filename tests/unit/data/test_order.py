from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.hashing import key64
from surefoot.data.order import PRP, FeistelPermutation
from surefoot.data.source_order import Era, Source

# Sizes at which a bit width that is one short, or a walk that does not come back, would show.
SIZES_AT_EDGES = (65_536, 65_537, 65_538, 262_145, 1_048_577)

GOLDEN_1000 = [350, 547, 328, 97, 243, 673, 430, 922]
GOLDEN_1048577 = [928886, 993504, 390085, 1019682, 673812, 604324]
GOLDEN_ORDER = [30, 12, 9, 8, 39, 23, 22, 43, 46, 10]
GOLDEN_RESTART = [9, 11, 45]


def assert_bijection(size: int, *, key: int) -> None:
    permutation = FeistelPermutation(size, key=key)
    image = permutation.forward(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size, dtype=np.uint64))
    assert np.array_equal(permutation.inverse(image), np.arange(size, dtype=np.uint64))


def test_every_small_size_is_a_bijection_with_its_inverse() -> None:
    for size in range(2, 1501):
        assert_bijection(size, key=key64("small", size))


@pytest.mark.parametrize("size", SIZES_AT_EDGES)
def test_sizes_around_powers_of_two_are_bijections(size: int) -> None:
    assert_bijection(size, key=key64("edge", size))


def test_one_item_stays_where_it_is() -> None:
    assert FeistelPermutation(1, key=5).forward(np.zeros(3, dtype=np.int64)).tolist() == [0, 0, 0]


@settings(max_examples=200, deadline=None)
@given(size=st.integers(2, 1 << 62), key=st.integers(0, (1 << 64) - 1), data=st.data())
def test_huge_sizes_come_back_by_the_inverse(size: int, key: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    permutation = FeistelPermutation(size, key=key)
    image = permutation.forward(np.array(index, dtype=np.int64))
    assert int(image.max()) < size
    assert permutation.inverse(image).tolist() == index


@settings(max_examples=50, deadline=None)
@given(size=st.integers(2, 5000), key=st.integers(0, (1 << 64) - 1))
def test_any_key_is_a_bijection(size: int, key: int) -> None:
    assert_bijection(size, key=key)


@pytest.mark.parametrize("size", [1 << 22, (1 << 22) + 1, 3_500_000])
def test_parity_of_neighbours_does_not_show_through(size: int) -> None:
    image = FeistelPermutation(size, key=key64("parity", size)).forward(np.arange(size))
    signs, image_signs = 1.0 - 2.0 * (np.arange(size) % 2), 1.0 - 2.0 * (image % 2).astype(np.float64)
    assert abs(float(np.mean(signs * image_signs))) < 0.001


def test_gaps_between_neighbours_are_as_many_as_in_a_true_shuffle() -> None:
    size = 1 << 18
    image = FeistelPermutation(size, key=11).forward(np.arange(size)).astype(np.int64)
    shuffled = np.random.default_rng(0).permutation(size)
    wanted = len(np.unique(np.diff(shuffled)))
    assert abs(len(np.unique(np.diff(image))) - wanted) < 0.01 * wanted


def test_shape_is_kept_and_outside_is_refused() -> None:
    permutation = FeistelPermutation(100, key=1)
    assert permutation.forward(np.arange(6).reshape(2, 3)).shape == (2, 3)
    assert permutation.forward(np.empty(0, dtype=np.int64)).shape == (0,)
    for wrong in ([100], [-1]):
        with pytest.raises(ValueError, match="outside"):
            permutation.forward(np.array(wrong))


def test_values_are_frozen() -> None:
    """These never change under this name: a run that began with them must be able to go on."""
    assert PRP == "feistel8-splitmix64/1"
    assert FeistelPermutation(1000, key=0x0123456789ABCDEF).forward(np.arange(8)).tolist() == GOLDEN_1000
    assert FeistelPermutation(1_048_577, key=42).forward(np.arange(6)).tolist() == GOLDEN_1048577
    places = Era(Source("text", 50, 16, seed=7), 0, 16).at(np.arange(46, 56))
    assert places.epochs.tolist() == [0] * 4 + [1] * 6
    assert (places.starts // 16).tolist() == GOLDEN_ORDER
    restarted = Era(Source("text", 50, 16, seed=7, restart=1), 0, 16)
    assert (restarted.at(np.array([0, 1, 50])).starts // 16).tolist() == GOLDEN_RESTART
