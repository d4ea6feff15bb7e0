"""Parts as torch.save writes them, read without torch.load: any dtype, strides and box; what is no plain tensor is refused unexecuted."""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.parts import PartReader, memory_of, read_layout
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.sources import FolderSource
from surefoot.checkpoint.state import LiveState
from surefoot.checkpoint.verify import verify
from surefoot.checkpoint.zip_slice import MAX_SMALL_BYTES, ZipSlice
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.records import Manifest, ManifestFile
from surefoot.tensors.world import World

FIXTURE = Path(__file__).parents[2] / "fixtures" / "checkpoint_v1" / "s4-a1"
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
    torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


def _stored(folder: Path, tensor: torch.Tensor, *, crc: bool = True) -> tuple[PartReader, _StorageInfo]:
    """The tensor as DCP stores a part of it, in the middle of a file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    torch.serialization.set_crc32_options(before)
    raw = stream.getvalue()
    (folder / "file").write_bytes(b"before" + raw + b"after")
    file = ManifestFile(name="file", num_bytes=len(raw) + 11, xxh3_128="")
    return PartReader({"file": file}, {"file": FolderSource(folder)}), _StorageInfo("file", 6, len(raw))


def _same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bytes(memory_of(ours.contiguous())) == bytes(memory_of(theirs.contiguous()))


def _random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    octets = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return octets.to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("crc", [True, False])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, crc: bool) -> None:
    for shape in [(), (1,), (3, 1), (5, 7), (0, 3), (40, 200)]:
        tensor = _random_bits(shape, dtype, seed=3)
        reader, info = _stored(tmp_path, tensor, crc=crc)
        part = reader.part(info)
        target = torch.zeros_like(tensor)
        reader.read_box(part, target, offsets=(0,) * tensor.dim())
        assert _same_bits(target, tensor)
        assert _same_bits(reader.read_whole(part), tensor)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_of_any_layout_goes_into_any_target(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3), label="shape"))
    order = data.draw(st.permutations(range(len(shape))), label="order")
    whole = _random_bits(tuple(shape[dim] for dim in order), torch.float32, seed=data.draw(st.integers(0, 99)))
    tensor = whole.permute([order.index(dim) for dim in range(len(shape))])
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    reader, info = _stored(tmp_path_factory.mktemp("part"), tensor)
    around = torch.zeros([size + 2 for size in sizes])
    target = around
    for dim, size in enumerate(sizes):
        target = target.narrow(dim, 1, size)
    expected = tensor
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        expected = expected.narrow(dim, offset, size)
    for place in (target, torch.zeros(sizes)):
        reader.read_box(reader.part(info), place, offsets=offsets)
        assert _same_bits(place, expected)
    target.zero_()
    assert not around.any()


def test_a_box_outside_of_the_part_is_refused(tmp_path: Path) -> None:
    reader, info = _stored(tmp_path, torch.zeros(4, 3))
    for offsets, sizes in [((1, 0), (4, 3)), ((0, 1), (4, 3)), ((-1, 0), (1, 1))]:
        with pytest.raises(Corrupt, match="holds no box"):
            reader.read_box(reader.part(info), torch.zeros(sizes), offsets=offsets)


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    "value",
    [_Malicious(), {"a": torch.zeros(2)}, 3, torch.nn.Parameter(torch.zeros(2)), [torch.zeros(2), torch.ones(2)]],
    ids=["an action", "a dict", "a number", "a parameter", "two tensors"],
)
def test_what_is_no_plain_tensor_is_refused_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.chdir(tmp_path)
    reader, info = _stored(tmp_path, value)
    with pytest.raises(Corrupt):
        reader.part(info)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_that_reaches_outside_of_its_values_is_refused() -> None:
    stream = io.BytesIO()
    torch.save(torch.zeros(4, 3), stream)
    raw = stream.getvalue()
    layout = ZipSlice(lambda offset, length: raw[offset : offset + length], length=len(raw)).content("data.pkl")
    assert read_layout(layout).shape == (4, 3)
    changed = layout.replace(b"K\x04K\x03\x86", b"K\x05K\x03\x86")
    assert changed != layout
    with pytest.raises(Corrupt, match="reaches outside"):
        read_layout(changed)
    with pytest.raises(Corrupt):
        read_layout(pickle.dumps(_Malicious()))


def test_no_change_of_a_byte_makes_the_reader_fail_in_another_way(tmp_path: Path) -> None:
    """Whatever the bytes: the right tensor, another one (the digest is for that), or a refusal by name."""
    tensor = torch.arange(40.0).view(8, 5)
    _, info = _stored(tmp_path, tensor)
    raw = (tmp_path / "file").read_bytes()
    chooser = random.Random(7)
    refused = 0
    for _ in range(400):
        changed = bytearray(raw)
        changed[chooser.randrange(6, 6 + info.length)] ^= 1 << chooser.randrange(8)
        (tmp_path / "file").write_bytes(changed)
        try:
            fresh = PartReader({"file": ManifestFile(name="file", num_bytes=len(raw), xxh3_128="")}, {"file": FolderSource(tmp_path)})
            fresh.read_whole(fresh.part(info))
        except CheckpointError:
            refused += 1
    assert 0 < refused < 400


def test_a_transposed_parameter_and_its_moments_come_back(tmp_path: Path, make_draft: Callable[..., Manifest], world: World) -> None:
    """torch.save keeps strides; whoever takes the bytes as row-major gets another tensor."""
    model = nn.Linear(6, 4)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    assert not model.weight.is_contiguous()
    state = LiveState({f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()})
    save(tmp_path, make_draft(), state=state, extras={}, world=world)
    assert verify(tmp_path / "s10-a1") == []
    fresh = LiveState({key: torch.zeros_like(tensor) for key, tensor in state.tensors.items()})
    load(tmp_path / "s10-a1", state=fresh, world=world)
    assert all(torch.equal(tensor, state.tensors[key]) for key, tensor in fresh.tensors.items())


def test_a_checkpoint_of_format_1_verifies_and_loads(world: World) -> None:
    """Written by torch.save with its checksums, by two ranks of an earlier surefoot."""
    assert verify(FIXTURE) == []
    tensors = [tensor for tensor in read_manifest(FIXTURE).tensors if not tensor.key.startswith("rng/")]
    state = LiveState({tensor.key: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in tensors})
    loaded = load(FIXTURE, state=state, world=world)
    assert loaded.sources.keys() == {"__0_0.distcp", "__1_0.distcp"}
    assert any(tensor.any() for tensor in state.tensors.values())


@pytest.mark.parametrize(
    "greedy",
    [
        b"\x80\x02Nr\xff\xff\xff\xff.",  # a memo of four thousand million places
        b"\x80\x05\x96" + (1 << 60).to_bytes(8, "little") + b".",  # an array of an exbibyte
        b"\x80\x02" + b"N" + b"\x85" * 900 + b"Q.",  # what cannot be said in a message
    ],
)
def test_a_pickle_that_asks_for_more_than_it_brings_is_refused_before_it_is_read(greedy: bytes) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Corrupt) as refused:
        read_layout(greedy)
    assert len(str(refused.value)) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10


def test_a_small_record_that_is_said_to_be_large_is_not_read() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as written:
        written.writestr("archive/data.pkl", b"\0" * (MAX_SMALL_BYTES + 1))
    raw = stream.getvalue()
    found = ZipSlice(lambda offset, length: raw[offset : offset + length], length=len(raw))
    with pytest.raises(Corrupt, match="at most"):
        found.content("data.pkl")
