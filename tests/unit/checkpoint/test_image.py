"""The image of a rank's file: byte for byte what torch.save writes around the values, and where they lie."""

from __future__ import annotations

import io

import pytest
import torch

from surefoot.checkpoint.image import ALIGN_BYTES, Part, archive_around, file_name, lay_out
from surefoot.checkpoint.slot import PAGE_BYTES

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
SHAPES = [(), (1,), (3,), (0,), (0, 4), (5, 7), (2, 3, 4), (70, 1000)]


def part(key: str = "model.a", dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = (3,)) -> Part:
    return Part(key, dtype, sizes, (0,) * len(sizes), sizes)


def values(dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
    raw = torch.arange(torch.Size(sizes).numel() * dtype.itemsize, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).view(sizes)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_frame_and_values_are_what_torch_saves(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    tensor = values(dtype, sizes)
    head, tail = archive_around(dtype, sizes)
    archive = head + raw_bytes(tensor) + tail
    loaded = torch.load(io.BytesIO(archive), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert raw_bytes(loaded) == raw_bytes(tensor)
    stock = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor.clone(), stock)
    finally:
        torch.serialization.set_crc32_options(True)
    assert archive == stock.getvalue()


def test_the_crc_option_of_the_program_stays_as_it_was() -> None:
    assert torch.serialization.get_crc32_options()
    archive_around(torch.float32, (12, 345))
    assert torch.serialization.get_crc32_options()


def test_archives_are_aligned_and_the_file_is_whole_pages() -> None:
    parts = [
        part("a", torch.bool, (5,)),
        part("b", torch.float64, (3, 3)),
        part("c", sizes=(0,)),
        part("d", torch.int8, (4097,)),
        part("e"),
    ]
    image = lay_out(parts, rank=3)
    assert image.file == file_name(3) == "__3_0.distcp"
    assert image.num_bytes % PAGE_BYTES == 0
    assert [placed.part for placed in image.placed] == parts
    assert all(
        placed.archive_offset % ALIGN_BYTES == 0 and placed.values_offset % ALIGN_BYTES == 0
        for placed in image.placed
        if placed.part.num_bytes
    )


def test_frame_and_values_cover_every_byte_once() -> None:
    image = lay_out([part("a", torch.bool, (5,)), part("b", torch.float64, (3, 3)), part("c", sizes=(0, 2)), part("d")], rank=0)
    pieces = [(offset, len(piece)) for offset, piece in image.frame]
    pieces += [(placed.values_offset, placed.part.num_bytes) for placed in image.placed if placed.part.num_bytes]
    end = 0
    for offset, num_bytes in sorted(pieces):
        assert offset == end
        end += num_bytes
    assert end == image.num_bytes


def test_an_image_of_nothing_is_empty() -> None:
    assert lay_out([], rank=0).num_bytes == 0
