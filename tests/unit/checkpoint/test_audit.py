"""Foreign checkpoints: what stock DCP lets pass is found from its own bytes, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from surefoot.checkpoint.audit import Audit, audit
from surefoot.checkpoint.manifest import MANIFEST_NAME
from surefoot.core.errors import ConfigError, Incompatible

DATA = "__0_0.distcp"


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "model.weight": torch.randn(40, 30, generator=generator),
        "model.bias": torch.randn(30, generator=generator).bfloat16(),
        "optimizer.state.weight.exp_avg": torch.randn(40, 30, generator=generator),
        "step": torch.tensor(7),
    }


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """Written by stock DCP in one process, with pickled objects among the tensors."""
    return _stock_save(tmp_path / "stock", {**_state(), "lr_scheduler": {"last": 3}, "name": "x"})


def _stock_save(path: Path, state: dict[str, Any], **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=FileSystemWriter(path, **options), no_dist=True)
    return path


def _kinds(found: Audit) -> set[tuple[str, str]]:
    return {(problem.kind, problem.tensor) for problem in found.problems}


def _change_metadata(path: Path, change: Callable[[Metadata], object]) -> None:
    metadata = FileSystemReader(path).read_metadata()
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_whole_one_is_clean_and_its_pickled_objects_are_named_and_not_read(stock: Path) -> None:
    found = audit(stock)
    assert found.clean
    assert found.problems == ()
    assert found.unread == ("lr_scheduler.last", "name")
    assert (found.num_tensors, found.num_parts, found.num_checked) == (4, 6, 6)
    assert "clean" in found.summary()


def test_one_written_by_several_threads_is_clean(tmp_path: Path) -> None:
    found = audit(_stock_save(tmp_path / "threads", _state(), thread_count=3))
    assert found.clean
    assert found.num_files == 4


@pytest.mark.parametrize("key", ["model.weight", "model.bias", "optimizer.state.weight.exp_avg"])
def test_each_flipped_bit_of_a_value_is_found_though_stock_loads_it(stock: Path, key: str) -> None:
    raw = (stock / DATA).read_bytes()
    values = _state()[key].view(torch.uint8).numpy().tobytes()
    start = raw.index(values)
    chooser = random.Random(key)
    for position in chooser.sample(range(start * 8, (start + len(values)) * 8), 10):
        changed = bytearray(raw)
        changed[position // 8] ^= 1 << position % 8
        (stock / DATA).write_bytes(changed)
        state = _state()
        with pytest.warns(UserWarning, match="single process"):
            dcp_load(state, checkpoint_id=stock)
        assert not torch.equal(state[key].view(torch.uint8), _state()[key].view(torch.uint8))
        assert [(problem.kind, problem.file, problem.tensor) for problem in audit(stock).problems] == [("wrong-checksum", DATA, key)]


def test_files_that_are_missing_cut_or_unknown_are_named(stock: Path) -> None:
    (stock / ".metadata.tmp").write_bytes(b"")
    assert [(problem.kind, problem.file) for problem in audit(stock).problems] == [("extra-file", ".metadata.tmp")]
    (stock / ".metadata.tmp").unlink()
    os.truncate(stock / DATA, (stock / DATA).stat().st_size - 100)
    assert {kind for kind, _ in _kinds(audit(stock))} == {"hole"}
    (stock / DATA).unlink()
    assert ("missing-file", DATA) in {(problem.kind, problem.file) for problem in audit(stock).problems}
    shutil.rmtree(stock)
    stock.mkdir()
    (stock / DATA).write_bytes(b"x")
    assert [(problem.kind, problem.file) for problem in audit(stock).problems] == [("missing-file", ".metadata")]


def test_holes_and_overlaps_are_found_though_stock_does_not_ask(stock: Path) -> None:
    def cut(metadata: Any) -> None:
        metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([20, 30])

    def move(metadata: Any) -> None:
        chunk = metadata.state_dict_metadata["model.weight"].chunks[0]
        chunk.offsets = torch.Size([1, 0])

    def share(metadata: Any) -> None:
        first, second = (info for index, info in metadata.storage_data.items() if index.fqn in ("model.weight", "model.bias"))
        second.offset = first.offset

    original = (stock / ".metadata").read_bytes()
    for change, expected in [(cut, ("hole", "model.weight")), (move, ("hole", "model.weight"))]:
        _change_metadata(stock, change)
        assert expected in _kinds(audit(stock))
        (stock / ".metadata").write_bytes(original)
    _change_metadata(stock, share)
    assert any("overlap those of" in problem.detail for problem in audit(stock).problems)


def test_parts_that_overlap_while_the_volume_is_right_are_found(tmp_path: Path) -> None:
    """A doubled region and a hole of the same size: a count of elements sees nothing."""
    path = _stock_save(tmp_path / "two", {"a": torch.zeros(4, 6)})

    def tile(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["a"]
        (index,) = metadata.storage_data
        info = metadata.storage_data.pop(index)
        boxes = [((0, 0), (4, 3)), ((1, 2), (3, 4))]
        entry.chunks = [type(entry.chunks[0])(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        for chunk in entry.chunks:
            metadata.storage_data[type(index)("a", chunk.offsets)] = info

    _change_metadata(path, tile)
    assert any("overlaps another" in problem.detail for problem in audit(path).problems)


def test_another_dtype_or_shape_than_described_is_found(stock: Path) -> None:
    def retype(metadata: Any) -> None:
        metadata.state_dict_metadata["model.weight"].properties.dtype = torch.bfloat16

    original = (stock / ".metadata").read_bytes()
    _change_metadata(stock, retype)
    assert _kinds(audit(stock)) == {("wrong-dtype", "model.weight")}
    (stock / ".metadata").write_bytes(original)

    def turn(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["model.weight"]
        entry.size = torch.Size([30, 40])
        entry.chunks[0].sizes = torch.Size([30, 40])

    _change_metadata(stock, turn)
    assert _kinds(audit(stock)) == {("wrong-shape", "model.weight")}


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_nothing_is_executed(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (stock / ".metadata").write_bytes(pickle.dumps(_Malicious()))
    found = audit(stock)
    assert "posix.system has no place" in found.problems[0].detail
    trap = _stock_save(tmp_path / "trap", {"object": _Malicious()})
    assert audit(trap).unread == ("object",)
    assert not (tmp_path / "executed").exists()


def test_our_own_without_its_manifest_is_not_clean(committed: Path) -> None:
    (committed / MANIFEST_NAME).unlink()
    found = audit(committed)
    assert not found.clean
    assert ("missing-file", MANIFEST_NAME) in {(problem.kind, problem.file) for problem in found.problems}
    assert "without its manifest" in found.kind


def test_parts_without_checksums_are_not_counted_as_checked(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = _stock_save(tmp_path / "plain", _state())
    finally:
        torch.serialization.set_crc32_options(before)
    found = audit(path)
    assert found.problems == ()
    assert not found.clean
    assert found.num_checked == 0
    assert "4 of 4 parts carry no checksum" in found.notes[0]
    assert "not all could be checked" in found.summary()


def test_our_own_is_verified_as_such(committed: Path) -> None:
    assert audit(committed).clean
    raw = bytearray((committed / DATA).read_bytes())
    raw[len(raw) // 2] ^= 1
    (committed / DATA).write_bytes(raw)
    assert not audit(committed).clean


# --- safetensors ---


def _safetensors(path: Path) -> Path:
    path.mkdir()
    save_file({"a": torch.zeros(4, 3), "b": torch.ones(5)}, path / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(2, dtype=torch.bfloat16)}, path / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def test_safetensors_are_checked_as_far_as_the_format_goes(tmp_path: Path) -> None:
    path = _safetensors(tmp_path / "hf")
    found = audit(path)
    assert found.problems == ()
    assert not found.clean
    assert "no checksums" in found.notes[0]
    second = path / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    assert {problem.file for problem in audit(path).problems} == {second.name}
    second.write_bytes(whole + b"x")
    assert [problem.kind for problem in audit(path).problems] == ["wrong-size"]
    second.write_bytes(struct.pack("<Q", 1 << 40) + whole[8:])
    assert audit(path).problems[0].kind == "unreadable"
    second.unlink()
    assert [(problem.kind, problem.file) for problem in audit(path).problems] == [("missing-file", second.name)]
    save_file({"d": torch.zeros(2)}, second)
    assert _kinds(audit(path)) == {("missing-tensor", "c"), ("extra-tensor", "d")}


def test_a_sharded_safetensors_folder_says_what_cannot_be_known(tmp_path: Path) -> None:
    """Stock writes neither an index nor a mark that the save ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True)
        dcp_save({"a": torch.zeros(4, 3)}, storage_writer=writer, no_dist=True)
    found = audit(tmp_path / "hf")
    assert found.problems == ()
    assert not found.clean
    assert any("cannot be known" in note for note in found.notes)


# --- what is refused, with a sentence ---


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["latest_checkpointed_iteration.txt", "iter_0000010"], "Megatron"),
        (["common.pt", ".metadata", DATA], "Megatron"),
        (["global_step10", "latest", "zero_to_fp32.py"], "DeepSpeed"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["__0.metadata", "__1.metadata", DATA], "nobody committed the whole"),
    ],
)
def test_others_are_refused_and_said_to_be_what_they_are(tmp_path: Path, names: list[str], sentence: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(Incompatible, match=sentence):
        audit(tmp_path)


def test_a_folder_without_a_checkpoint_is_a_wrong_argument(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError):
            audit(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: next(iter(metadata.storage_data.values())).__setattr__("relative_path", "../outside"),
        lambda metadata: next(iter(metadata.storage_data.values())).__setattr__("offset", "0"),
        lambda metadata: metadata.state_dict_metadata["model.bias"].__setattr__("size", ("a",)),
        lambda metadata: metadata.state_dict_metadata["model.bias"].__setattr__("chunks", None),
        lambda metadata: metadata.state_dict_metadata.__setitem__("model.bias", "text"),
        lambda metadata: metadata.__setattr__("storage_data", None),
    ],
)
def test_metadata_with_other_fields_than_dcp_has_is_a_finding_and_no_crash(stock: Path, change: Callable[[Metadata], object]) -> None:
    (stock.parent / "outside").write_bytes((stock / DATA).read_bytes())
    _change_metadata(stock, change)
    (problem,) = audit(stock).problems
    assert (problem.kind, problem.file) == ("unreadable", ".metadata")


def test_parts_of_other_numbers_of_dims_are_holes(stock: Path) -> None:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks += [ChunkStorageMetadata(torch.Size([]), torch.Size([])), ChunkStorageMetadata(torch.Size([5]), torch.Size([5]))]

    _change_metadata(stock, change)
    assert ("hole", "model.weight") in _kinds(audit(stock))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":["x"],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"__metadata__":{"DCP_SHARDING_INFO":"{\\"a\\":{\\"saved_offsets\\":[0,0]}}"}}',
        b"[" * 100_000,
    ],
)
def test_a_torn_or_forged_safetensors_file_is_a_finding_and_no_crash(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4 if header else b"torn")
    assert [(problem.kind, problem.file) for problem in audit(tmp_path).problems] == [("unreadable", "a.safetensors")]


def test_a_tensor_in_two_safetensors_files_is_one_too_many(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    assert [(problem.kind, problem.file) for problem in audit(tmp_path).problems] == [("extra-tensor", "b.safetensors")]
