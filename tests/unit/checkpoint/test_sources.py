"""Memory, folder, another copy: each file from the first that has it right; what is damaged is named; mixed, they give the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import MANIFEST_NAME, read_manifest
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.readback import READ_BYTES, StorageSource, verify_files
from surefoot.checkpoint.reader import Reader
from surefoot.checkpoint.restore import Loaded, load
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.sources import FileSource, FolderSource, SlotSource, check_bytes, choose
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import read_metadata
from surefoot.core.errors import CheckpointError, Corrupt, Incomplete
from surefoot.core.records import Manifest, ManifestFile
from surefoot.tensors.world import World, single_world

DATA = "__0_0.distcp"
EXTRAS = {"cursor": {"next_sample": 7}}


@pytest.fixture
def slot() -> Iterator[Slot]:
    slot = Slot.create(rank=0, number=0)
    yield slot
    slot.close()


@pytest.fixture
def staged(tmp_path: Path, slot: Slot, training: Any, make_draft: Callable[..., Manifest], world: World) -> Path:
    """The folder of a checkpoint whose bytes are still in `slot`."""
    save(
        tmp_path / "checkpoints",
        make_draft(),
        state=collect(training.model, training.optimizer),
        extras=EXTRAS,
        world=world,
        slot=slot,
    )
    return tmp_path / "checkpoints" / "s10-a1"


def _flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 8
    file.write_bytes(raw)


def _data(path: Path) -> ManifestFile:
    return next(file for file in read_manifest(path).files if file.name == DATA)


@pytest.fixture
def load_and_compare(training: Any, make_training: Callable[..., Any], world: World) -> Callable[..., Loaded]:
    """A load into another model, whose bits must then be those of `training`."""

    def run(path: Path, *sources: FileSource) -> Loaded:
        fresh = make_training(seed=5)
        loaded = load(path, state=collect(fresh.model, fresh.optimizer, for_load=True), world=world, sources=sources)
        expected = collect(training.model, training.optimizer).tensors
        for key, tensor in collect(fresh.model, fresh.optimizer).tensors.items():
            assert torch.equal(tensor, expected[key]), key
        return loaded

    return run


def test_without_sources_the_folder_serves(staged: Path, load_and_compare: Callable[..., Loaded]) -> None:
    loaded = load_and_compare(staged)
    assert loaded.sources == {DATA: "disk"}
    assert loaded.problems == ()


def test_memory_serves_before_the_disk(staged: Path, slot: Slot, load_and_compare: Callable[..., Loaded]) -> None:
    """The file on disk is not even looked at: a damaged one does not disturb."""
    _flip(staged / DATA)
    loaded = load_and_compare(staged, SlotSource([slot], checkpoint="s10-a1"))
    assert loaded.sources == {DATA: "memory"}
    assert loaded.extras == EXTRAS


def test_parts_in_memory_are_known_by_checksum_and_digest(staged: Path, slot: Slot) -> None:
    source, manifest = SlotSource([slot], checkpoint="s10-a1"), read_manifest(staged)
    digests = {tensor.key: tensor.digest for tensor in manifest.tensors}
    for key in ("model.0.weight", "optim.2.weight.exp_avg"):
        known = source.part(_data(staged), key=key, offsets=(0, 0))
        assert known is not None
        assert known[1] == digests[key]
    assert source.part(_data(staged), key="model.0.weight", offsets=(1, 0)) is None


@pytest.mark.parametrize("from_memory", [True, False])
def test_what_is_read_whole_is_digested_on_the_way(staged: Path, slot: Slot, make_training: Callable[..., Any], from_memory: bool) -> None:
    metadata, file, manifest = read_metadata(staged), _data(staged), read_manifest(staged)
    tensors = collect((fresh := make_training(seed=5)).model, fresh.optimizer, for_load=True).tensors
    with FolderSource(staged) as folder:
        source: FileSource = SlotSource([slot], checkpoint="s10-a1") if from_memory else folder
        reader = Reader(staged, metadata=metadata, files={DATA: file}, sources={DATA: source}, num_threads=2)
        with dcp_errors(single_world(), what="loading"):
            planner = StrictLoadPlanner(may_be_left=lambda key: key.startswith("rng/"))
            dcp_load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    stored = {tensor.key: tensor.digest for tensor in manifest.tensors if not tensor.key.startswith("rng/")}
    assert {key: digest for (key, _), digest in reader.digests.items()} == stored


def test_damaged_memory_is_named_and_the_disk_serves(staged: Path, slot: Slot, load_and_compare: Callable[..., Loaded]) -> None:
    slot.image()[5000] ^= 1
    loaded = load_and_compare(staged, SlotSource([slot], checkpoint="s10-a1"))
    assert loaded.sources == {DATA: "disk"}
    assert [(problem.kind, problem.file) for problem in loaded.problems] == [("wrong-checksum", DATA)]
    assert loaded.problems[0].detail.startswith("memory:")


def test_a_slot_of_another_checkpoint_does_not_serve(staged: Path, slot: Slot) -> None:
    assert not SlotSource([slot], checkpoint="s11-a1").has(_data(staged))
    assert not SlotSource([slot], checkpoint="s10-a1").has(replace(_data(staged), xxh3_128="0" * 32))


def test_a_slot_that_is_taken_for_another_save_meanwhile_is_noticed(staged: Path, slot: Slot) -> None:
    source = SlotSource([slot], checkpoint="s10-a1")
    header = slot.header()
    assert header is not None
    slot.claim(header)
    with pytest.raises(Corrupt, match="another save"):
        source.read_into(_data(staged), offset=0, buffer=memoryview(bytearray(10)))


@pytest.mark.parametrize("damage", [_flip, Path.unlink, lambda file: file.write_bytes(b"short")], ids=["flipped", "gone", "cut"])
@pytest.mark.parametrize("name", [DATA, ".metadata", "extras.json", MANIFEST_NAME])
def test_what_is_damaged_on_disk_comes_from_another_copy(
    staged: Path, tmp_path: Path, load_and_compare: Callable[..., Loaded], damage: Callable[[Path], Any], name: str
) -> None:
    shutil.copytree(staged, tmp_path / "copy")
    damage(staged / name)
    with FolderSource(staged) as disk, FolderSource(tmp_path / "copy", name="copy") as copy:
        loaded = load_and_compare(staged, disk, copy)
    assert loaded.sources == {DATA: "copy" if name == DATA else "disk"}
    assert name in {problem.file for problem in loaded.problems}


def test_a_lost_folder_comes_from_another_copy(staged: Path, tmp_path: Path, load_and_compare: Callable[..., Loaded]) -> None:
    staged.rename(tmp_path / "elsewhere")
    with FolderSource(tmp_path / "elsewhere", name="copy") as copy:
        assert load_and_compare(staged, copy).sources == {DATA: "copy"}


def test_a_folder_with_files_that_nobody_wrote_serves_nothing(
    staged: Path, tmp_path: Path, load_and_compare: Callable[..., Loaded]
) -> None:
    shutil.copytree(staged, tmp_path / "copy")
    (staged / "notes.txt").write_text("mine")
    with FolderSource(staged) as disk, FolderSource(tmp_path / "copy", name="copy") as copy:
        assert load_and_compare(staged, disk, copy).sources == {DATA: "copy"}
    with pytest.raises(CheckpointError, match=r"extra-file notes\.txt"):
        load_and_compare(staged)


def test_when_all_copies_are_damaged_each_is_named_and_nothing_is_touched(
    staged: Path, tmp_path: Path, make_training: Callable[..., Any], world: World
) -> None:
    shutil.copytree(staged, tmp_path / "copy")
    for folder in (staged, tmp_path / "copy"):
        _flip(folder / DATA)
    fresh = make_training(seed=5)
    live = collect(fresh.model, fresh.optimizer, for_load=True)
    before = {key: tensor.clone() for key, tensor in live.tensors.items()}
    with FolderSource(staged) as disk, FolderSource(tmp_path / "copy", name="copy") as copy, pytest.raises(Corrupt) as caught:
        load(staged, state=live, world=world, sources=[disk, copy])
    assert "disk: xxh3_128" in str(caught.value)
    assert "copy: xxh3_128" in str(caught.value)
    assert all(torch.equal(tensor, before[key]) for key, tensor in live.tensors.items())


def test_the_ledgers_digest_chooses_among_copies(
    staged: Path, tmp_path: Path, training: Any, make_training: Callable[..., Any], make_draft: Callable[..., Manifest], world: World
) -> None:
    """The folder holds another checkpoint under the same name, as after a copy from the wrong run."""
    shutil.copytree(staged, tmp_path / "copy")
    expected = read_manifest(staged).state_digest
    shutil.rmtree(staged)
    other = make_training(seed=9)
    save(staged.parent, make_draft(), state=collect(other.model, other.optimizer), extras=EXTRAS, world=world)
    live = collect(other.model, other.optimizer, for_load=True)
    with FolderSource(tmp_path / "copy", name="copy") as copy:
        loaded = load(staged, state=live, world=world, expected_state_digest=expected, sources=[copy])
    assert loaded.manifest.state_digest == expected
    assert loaded.sources == {DATA: "copy"}


def test_a_file_that_ends_early_is_said_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    file = ManifestFile(name="file", num_bytes=4, xxh3_128="")
    with FolderSource(tmp_path) as folder:
        with pytest.raises(Incomplete, match="ends at byte 3"):
            folder.read_into(file, offset=0, buffer=memoryview(bytearray(4)))
        assert choose(file, [folder]).problems[0].kind == "unreadable"
        assert choose(replace(file, name="other"), [folder]).problems[0].kind == "missing-file"


# --- the read-back, without torch ---


def test_the_read_back_names_what_is_wrong(staged: Path) -> None:
    manifest = read_manifest(staged)
    assert verify_files(staged, expected_hash=manifest.hash) == []
    assert [problem.kind for problem in verify_files(staged, expected_hash="00")] == ["bad-manifest"]
    _flip(staged / DATA)
    assert [(problem.kind, problem.file) for problem in verify_files(staged)] == [("wrong-checksum", DATA)]
    (staged / DATA).unlink()
    assert [(problem.kind, problem.file) for problem in verify_files(staged)] == [("missing-file", DATA)]
    shutil.rmtree(staged)
    assert [(problem.kind, problem.file) for problem in verify_files(staged)] == [("missing-file", MANIFEST_NAME)]


def test_neither_sources_nor_read_back_load_torch() -> None:
    modules = ", ".join(f"surefoot.checkpoint.{name}" for name in ("readback", "zip_slice", "foreign", "safetensors_audit"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, READ_BYTES, READ_BYTES + 7, 3 * READ_BYTES])
def test_storage_is_read_to_the_last_byte_whatever_the_size(tmp_path: Path, num_bytes: int) -> None:
    raw = os.urandom(num_bytes)
    (tmp_path / "file").write_bytes(raw)
    file = ManifestFile("file", num_bytes, xxhash.xxh3_128_hexdigest(raw))
    with StorageSource(tmp_path) as storage:
        assert check_bytes(file, storage) is None
        longer = check_bytes(replace(file, num_bytes=num_bytes + 1), storage)
        assert longer is not None
        assert "it ends at byte" in longer.detail
        buffer = bytearray(num_bytes)
        storage.read_into(file, offset=0, buffer=memoryview(buffer))
        assert buffer == raw


def test_storage_without_direct_reads_is_read_too(tmp_path: Path) -> None:
    """Memory file systems refuse the flag, or the read, depending on the kernel."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no memory file system here: the fallback was NOT tested")
    path = shared / f"surefoot-test-{os.getpid()}"
    path.write_bytes(b"abc")
    try:
        with StorageSource(shared) as storage:
            assert check_bytes(ManifestFile(path.name, 3, xxhash.xxh3_128_hexdigest(b"abc")), storage) is None
    finally:
        path.unlink()
