"""The sharding-free digest: frozen values, an independent reference, every kind of change, every kind of cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from surefoot.core.records import ManifestTensor
from surefoot.tensors.digest import BoxDigest, as_hex, box_digest, combine, state_digest, tensor_digest

MASK = (1 << 64) - 1
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_digest(tensor: torch.Tensor, *, first_element: int = 0) -> int:
    """The definition, word by word, in Python integers."""
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    size = min(tensor.dtype.itemsize, 4)
    words = [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
    first = first_element * (tensor.dtype.itemsize // size)
    total = 0
    for i, word in enumerate(words, start=first):
        row = splitmix64(0x243F6A8885A308D3 + i // 65536) | 1
        column = splitmix64(0x13198A2E03707344 + i % 65536) | 1
        total += word * row * column
    return total & MASK


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition_for_every_dtype(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, (7, 11))
    assert tensor_digest(tensor) == reference_digest(tensor)


@pytest.mark.parametrize("num_elements", [1, 65535, 65536, 65537, 131072, 200_003])
def test_equals_the_definition_around_block_borders(num_elements: int) -> None:
    tensor = random_bits(torch.int16, (num_elements,))
    assert tensor_digest(tensor) == reference_digest(tensor)


def test_frozen_values() -> None:
    """These never change: every checkpoint on disk holds digests made this way."""
    assert as_hex(tensor_digest(torch.arange(10, dtype=torch.float32))) == "e4cbc958f9b00000"
    assert as_hex(tensor_digest(torch.arange(200_000))) == "1f8929e91559f45e"
    assert as_hex(tensor_digest(torch.tensor(1.5, dtype=torch.bfloat16))) == FROZEN_SCALAR
    items = [
        ManifestTensor(key="model.b", dtype="float32", shape=(2, 3), digest="0000000000000001"),
        ManifestTensor(key="model.a", dtype="bfloat16", shape=(), digest="00000000000000ff"),
    ]
    assert state_digest(items) == FROZEN_STATE
    assert state_digest(reversed(items)) == FROZEN_STATE


FROZEN_SCALAR = "d568693bdcd6b940"
FROZEN_STATE = "sf1:b14c85f7566e2e317f528e793d28d639aa9d0809d736853acf9324e240d0b7a0"


@pytest.mark.parametrize("change", [{"key": "model.x"}, {"dtype": "int32"}, {"shape": (3, 2)}, {"digest": "0000000000000002"}], ids=str)
def test_state_digest_covers_key_dtype_shape_and_digest(change: dict[str, Any]) -> None:
    item = ManifestTensor(key="model.b", dtype="float32", shape=(2, 3), digest="0000000000000001")
    assert state_digest([dataclasses.replace(item, **change)]) != state_digest([item])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_single_bit_flip_is_seen(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, (5,))
    before = tensor_digest(tensor)
    raw = tensor.view(torch.uint8)
    for byte, bit in itertools.product(range(raw.numel()), range(8)):
        raw[byte] ^= 1 << bit
        assert tensor_digest(tensor) != before
        raw[byte] ^= 1 << bit
    assert tensor_digest(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sign_swaps_and_pairs_of_sign_flips_are_seen(dtype: torch.dtype) -> None:
    """A sum over 64-bit words with odd weights would lose both: two flips of bit 63 cancel mod 2^64."""
    tensor = torch.arange(1.0, 7.0, dtype=dtype)
    tensor[::2] *= -1
    before = tensor_digest(tensor)
    for i, j in itertools.combinations(range(len(tensor)), 2):
        changed = tensor.clone()
        changed[[i, j]] *= -1
        assert tensor_digest(changed) != before


def test_swapped_values_and_rows_are_seen() -> None:
    tensor = random_bits(torch.float32, (300, 500))
    before = tensor_digest(tensor)
    for i, j in [(0, 1), (0, 299), (131, 262)]:
        rows = tensor.clone()
        rows[[i, j]] = tensor[[j, i]]
        assert tensor_digest(rows) != before
        value = tensor.clone()
        value[i, i], value[j, j] = tensor[j, j], tensor[i, i]
        assert tensor_digest(value) != before
    assert tensor_digest(tensor.t().contiguous()) != before
    assert tensor_digest(tensor.view(-1)[torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0))]) != before


def test_nan_payloads_and_negative_zero_count_as_bits() -> None:
    zero, negative = torch.tensor([0.0]), torch.tensor([-0.0])
    assert tensor_digest(zero) != tensor_digest(negative)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert tensor_digest(nans[:1]) != tensor_digest(nans[1:])
    assert tensor_digest(nans) == tensor_digest(nans.clone())


@pytest.mark.parametrize("shape", [(13,), (8, 9), (5, 6, 7), (3, 70_000), (257, 300)], ids=str)
@pytest.mark.parametrize("num_boxes", [1, 2, 3, 4])
def test_boxes_along_any_dim_add_up_to_the_whole(shape: tuple[int, ...], num_boxes: int) -> None:
    tensor = random_bits(torch.float32, shape)
    whole = tensor_digest(tensor)
    for dim in range(len(shape)):
        offsets = [0] * len(shape)
        parts = []
        for box in tensor.chunk(num_boxes, dim=dim):
            parts.append(box_digest(box, global_shape=shape, offsets=offsets))
            offsets[dim] += box.shape[dim]
        assert combine(parts) == whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16, torch.uint8], ids=str)
def test_boxes_cut_along_two_dims_add_up_for_every_word_count(dtype: torch.dtype) -> None:
    tensor = random_bits(dtype, (6, 10, 4))
    parts = [
        box_digest(tensor[i : i + 3, j : j + 5], global_shape=tensor.shape, offsets=(i, j, 0)) for i, j in itertools.product((0, 3), (0, 5))
    ]
    assert combine(parts) == tensor_digest(tensor)


def test_empty_boxes_count_nothing() -> None:
    assert box_digest(torch.empty(0, 4), global_shape=(3, 4), offsets=(3, 0)) == 0
    assert tensor_digest(torch.empty(0)) == 0


def test_memory_layout_and_views_do_not_matter() -> None:
    tensor = random_bits(torch.float32, (4, 6))
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous())
    assert tensor_digest(tensor[:, ::2]) == tensor_digest(tensor[:, ::2].clone())
    assert tensor_digest(torch.view_as_complex(tensor.view(4, 3, 2)).conj()) == tensor_digest(
        torch.view_as_complex(tensor.view(4, 3, 2)).conj().resolve_conj()
    )


def test_thread_count_does_not_matter() -> None:
    tensor = random_bits(torch.float32, (1 << 20,))
    before = torch.get_num_threads()
    try:
        digests = set()
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            digests.add(tensor_digest(tensor))
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_parameters_are_digested_without_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert tensor_digest(parameter) == tensor_digest(torch.ones(3))


@pytest.mark.parametrize("offsets", [(1, 0), (-1, 0), (0,)], ids=str)
def test_a_box_that_does_not_fit_is_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        box_digest(torch.zeros(2, 3), global_shape=(2, 3), offsets=offsets)


def test_layouts_without_plain_bits_are_refused() -> None:
    with pytest.raises(TypeError, match="no digest"):
        tensor_digest(torch.eye(3).to_sparse())


def test_far_rows_have_their_own_weights() -> None:
    """Element 2^40 of a tensor far larger than memory: indices stay exact."""
    local = torch.ones(2, 2, dtype=torch.uint8)
    shape, offsets = (1 << 21, 1 << 20), ((1 << 20) + 5, 17)
    firsts = [(offsets[0] + row) * shape[1] + offsets[1] for row in range(2)]
    expected = combine(reference_digest(row, first_element=first) for row, first in zip(local, firsts, strict=True))
    assert math.prod(shape) > 1 << 40
    assert box_digest(local, global_shape=shape, offsets=offsets) == expected


BOXES = {
    "evenly spaced runs over a block border": ((300, 200), (310, 500), (7, 101)),
    "evenly spaced runs of odd length": ((300, 151), (310, 501), (7, 101)),
    "whole dims inside": ((4, 25, 31, 10), (9, 25, 31, 33), (3, 0, 0, 6)),
    "runs in two nested rows": ((40, 15, 50), (40, 30, 100), (0, 9, 34)),
    "runs of a few words": ((70, 40, 3), (90, 40, 29), (11, 0, 26)),
    "long runs": ((3, 9001), (5, 30_011), (1, 12_345)),
    "columns that come again": ((700, 192), (710, 512), (3, 131)),
    "columns that come again after skipped rows": ((13, 4200), (15, 98_304), (1, 63_000)),
    "whole blocks": ((1, 7 * 65_536 + 5), (2, 9 * 65_536), (1, 65_533)),
    "one run": ((1, 77_777), (5, 100_003), (3, 9)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("kind", BOXES)
def test_boxes_equal_the_definition(dtype: torch.dtype, kind: str) -> None:
    sizes, shape, offsets = BOXES[kind]
    box = random_bits(dtype, sizes)
    outer = list(itertools.product(*(range(size) for size in sizes[:-1])))
    firsts = [global_index((*at, 0), shape=shape, offsets=offsets) for at in outer]
    expected = combine(reference_digest(box[at], first_element=first) for at, first in zip(outer, firsts, strict=True))
    assert box_digest(box, global_shape=shape, offsets=offsets) == expected


def global_index(at: tuple[int, ...], *, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    index = 0
    for position, size, offset in zip(at, shape, offsets, strict=True):
        index = index * size + position + offset
    return index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 65_533])
@pytest.mark.parametrize("skipped", [0, 1, 2, 3])
def test_neither_the_address_nor_the_parity_of_an_index_matters(dtype: torch.dtype, first: int, skipped: int) -> None:
    words = random_bits(dtype, (70_003,))[skipped:]
    expected = reference_digest(words, first_element=first)
    assert box_digest(words, global_shape=(200_000,), offsets=(first,)) == expected


def test_threads_do_not_meet() -> None:
    tensors = [random_bits(torch.float32, (300_000,), seed=seed) for seed in range(4)]
    expected = [tensor_digest(tensor) for tensor in tensors] * 8
    with ThreadPoolExecutor(max_workers=4) as pool:
        assert list(pool.map(tensor_digest, tensors * 8)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("offsets", [(0, 0, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("num_pieces", [1, 2, 5, 41])
def test_a_box_in_pieces_has_the_digest_of_the_box(dtype: torch.dtype, offsets: tuple[int, ...], num_pieces: int) -> None:
    box, shape = random_bits(dtype, (3, 5, 77)), (7, 6, 80)
    digest = BoxDigest(box.shape, dtype=dtype, global_shape=shape, offsets=offsets)
    words = box.view(-1).view(torch.uint8).view(-1, digest.word_bytes)
    for piece in words.tensor_split(num_pieces):
        digest.update(piece.numpy())
    assert digest.value == box_digest(box, global_shape=shape, offsets=offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("num_pieces", [2, 3, 7])
def test_pieces_need_not_begin_where_columns_come_again(dtype: torch.dtype, num_pieces: int) -> None:
    box, shape, offsets = random_bits(dtype, (900, 192)), (910, 512), (3, 131)
    digest = BoxDigest(box.shape, dtype=dtype, global_shape=shape, offsets=offsets)
    for piece in box.view(-1).view(torch.uint8).view(-1, digest.word_bytes).tensor_split(num_pieces):
        digest.update(piece.numpy())
    rows = [box_digest(box[i : i + 1], global_shape=shape, offsets=(3 + i, 131)) for i in range(len(box))]
    assert digest.value == combine(rows)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)
def test_the_largest_sums_are_exact(dtype: torch.dtype) -> None:
    """Floats carry some of the sums: all bits set is as large as they get."""
    tensor = torch.full((4 * 65_536,), -1, dtype=torch.int16).view(dtype)[: 4 * 65_536]
    assert tensor_digest(tensor) == reference_digest(tensor)


def test_a_box_in_pieces_knows_when_it_is_whole() -> None:
    digest = BoxDigest((4,), dtype=torch.float32, global_shape=(4,), offsets=(0,))
    digest.update(bytes(12))
    with pytest.raises(ValueError, match="3 of 4 words"):
        _ = digest.value
    with pytest.raises(ValueError, match=r"3 \+ 2 words, but the box has 4"):
        digest.update(bytes(8))
    digest.update(bytes(4))
    assert digest.value == 0
