"""The corruption table: whatever happens to a published folder is found and named, by verify and before a load touches anything."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.manifest import (
    EXTRAS_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    checksum_file,
    manifest_bytes,
    read_manifest,
    sealed,
)
from surefoot.checkpoint.metadata import check_metadata, chunk_index, parse_metadata, tensor_metadata
from surefoot.checkpoint.parts import PartReader
from surefoot.checkpoint.reader import listed
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.sources import FolderSource
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import read_metadata, verify
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.records import Manifest, ManifestFile, Problem
from surefoot.tensors.world import World

DATA = "__0_0.distcp"
FILES = [DATA, METADATA_NAME, EXTRAS_NAME, MANIFEST_NAME]


def _flip(file: Path, position: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[position // 8] ^= 1 << position % 8
    file.write_bytes(raw)


@pytest.fixture
def check_both(make_training: Callable[..., Any], world: World) -> Callable[[Path], list[Problem]]:
    """verify's problems, after a load refused the same folder without touching the live state."""

    def check(path: Path) -> list[Problem]:
        fresh = make_training(seed=5)
        live = collect(fresh.model, fresh.optimizer, for_load=True)
        before = {key: tensor.clone() for key, tensor in live.tensors.items()}
        with pytest.raises(CheckpointError) as caught:
            load(path, state=live, world=world)
        assert all(torch.equal(tensor, before[key]) for key, tensor in live.tensors.items())
        problems = verify(path)
        assert problems
        named = problems[0].file or problems[0].tensor
        assert named in str(caught.value)
        return problems

    return check


def test_an_untouched_checkpoint_and_a_copy_elsewhere_are_clean(committed: Path, tmp_path: Path) -> None:
    assert verify(committed) == []
    shutil.copytree(committed, tmp_path / "elsewhere")
    assert verify(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_in_every_file_are_found_and_the_file_is_named(
    committed: Path, check_both: Callable[[Path], list[Problem]], name: str
) -> None:
    file = committed / name
    chooser = random.Random(name)
    for position in chooser.sample(range(file.stat().st_size * 8), 20):
        _flip(file, position)
        assert name in {problem.file for problem in check_both(committed)}, position
        _flip(file, position)
    assert verify(committed) == []


def test_a_flipped_bit_of_a_weight_names_the_tensor(committed: Path, check_both: Callable[[Path], list[Problem]]) -> None:
    weights = collect_bytes(committed, "model.0.weight")
    raw = (committed / DATA).read_bytes()
    _flip(committed / DATA, raw.index(weights) * 8 + 30)
    problems = check_both(committed)
    assert [(problem.kind, problem.file, problem.tensor) for problem in problems] == [
        ("wrong-checksum", DATA, ""),
        ("wrong-digest", DATA, "model.0.weight"),
    ]


def test_the_refused_load_names_the_tensor_too(committed: Path, make_training: Callable[..., Any], world: World) -> None:
    raw = (committed / DATA).read_bytes()
    _flip(committed / DATA, raw.index(collect_bytes(committed, "model.0.weight")) * 8 + 30)
    fresh = make_training()
    with pytest.raises(Corrupt, match=r"wrong-checksum __0_0\.distcp .*wrong-digest __0_0\.distcp model\.0\.weight"):
        load(committed, state=collect(fresh.model, fresh.optimizer, for_load=True), world=world)


def collect_bytes(path: Path, key: str) -> bytes:
    """The raw bytes of a stored tensor."""
    metadata = read_metadata(path)
    (chunk,) = tensor_metadata(metadata, key).chunks
    files = listed(path, metadata)
    with FolderSource(path) as folder:
        parts = PartReader(files, dict.fromkeys(files, folder))
        return parts.read_whole(parts.part(metadata.storage_data[chunk_index(key, chunk)])).numpy().tobytes()


@pytest.mark.parametrize("name", FILES)
def test_a_removed_file_is_missing(committed: Path, check_both: Callable[[Path], list[Problem]], name: str) -> None:
    (committed / name).unlink()
    problems = check_both(committed)
    assert ("missing-file", name) in {(problem.kind, problem.file) for problem in problems}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 16, 0.5])
def test_a_truncated_file_is_named(committed: Path, check_both: Callable[[Path], list[Problem]], name: str, keep: float) -> None:
    size = (committed / name).stat().st_size
    os.truncate(committed / name, int(size * keep) if isinstance(keep, float) else keep)
    problems = check_both(committed)
    assert problems[0].file == name
    assert problems[0].kind == ("bad-manifest" if name == MANIFEST_NAME else "wrong-size")


def test_a_zeroed_page_is_found(committed: Path, check_both: Callable[[Path], list[Problem]]) -> None:
    raw = bytearray((committed / DATA).read_bytes())
    raw[4096:8192] = bytes(4096)
    (committed / DATA).write_bytes(raw)
    assert problems_of(check_both(committed)) >= {("wrong-checksum", DATA)}


def problems_of(problems: list[Problem]) -> set[tuple[str, str]]:
    return {(problem.kind, problem.file) for problem in problems}


def test_swapped_files_are_both_named(committed: Path, check_both: Callable[[Path], list[Problem]]) -> None:
    first, second = committed / DATA, committed / EXTRAS_NAME
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    assert problems_of(check_both(committed)) >= {("wrong-size", DATA), ("wrong-size", EXTRAS_NAME)}


def test_an_extra_file_is_named(committed: Path, check_both: Callable[[Path], list[Problem]]) -> None:
    (committed / "notes.txt").write_text("mine")
    assert problems_of(check_both(committed)) == {("extra-file", "notes.txt")}


@pytest.mark.parametrize("name", [DATA, METADATA_NAME, MANIFEST_NAME])
def test_a_file_of_another_generation_is_found(
    committed: Path,
    training: Any,
    make_draft: Callable[..., Manifest],
    check_both: Callable[[Path], list[Problem]],
    world: World,
    name: str,
) -> None:
    training.step(seed=3)
    save(committed.parent, make_draft("s20-a1"), state=collect(training.model, training.optimizer), extras={"cursor": {}}, world=world)
    shutil.copy(committed.parent / "s20-a1" / name, committed / name)
    assert verify(committed.parent / "s20-a1") == []
    if name == METADATA_NAME:  # the same tensors at the same places: the same bytes, so nothing is wrong
        assert verify(committed) == []
        return
    check_both(committed)


def test_an_edited_manifest_is_found(committed: Path, check_both: Callable[[Path], list[Problem]]) -> None:
    file = committed / MANIFEST_NAME
    file.write_text(file.read_text().replace('"step":10', '"step":11'))
    assert problems_of(check_both(committed)) == {("bad-manifest", MANIFEST_NAME)}


def test_an_edited_state_digest_is_found_though_the_hash_was_redone(committed: Path, check_both: Callable[[Path], list[Problem]]) -> None:
    _reseal(committed, state_digest="sf1:" + "0" * 64)
    assert problems_of(check_both(committed)) == {("bad-manifest", MANIFEST_NAME)}


def test_a_changed_weight_is_found_though_all_checksums_were_redone(
    committed: Path, make_training: Callable[..., Any], world: World
) -> None:
    """Only the digest from before the save knows better."""
    raw = (committed / DATA).read_bytes()
    _flip(committed / DATA, raw.index(collect_bytes(committed, "model.0.weight")) * 8)
    _reseal(committed, files=_listed_anew(committed))
    assert [(problem.kind, problem.tensor) for problem in verify(committed)] == [("wrong-digest", "model.0.weight")]
    fresh = make_training()
    with pytest.raises(Corrupt, match=r"wrong-digest __0_0\.distcp model\.0\.weight"):
        load(committed, state=collect(fresh.model, fresh.optimizer, for_load=True), world=world)


@pytest.mark.parametrize("raw", [b"[]", b"{", b"\xff"])
def test_extras_that_are_no_object_are_found_though_all_checksums_were_redone(
    committed: Path, check_both: Callable[[Path], list[Problem]], raw: bytes
) -> None:
    (committed / EXTRAS_NAME).write_bytes(raw)
    _reseal(committed, files=_listed_anew(committed))
    assert problems_of(check_both(committed)) == {("unreadable", EXTRAS_NAME)}


def _listed_anew(path: Path) -> tuple[ManifestFile, ...]:
    return tuple(
        ManifestFile(name=file.name, num_bytes=(path / file.name).stat().st_size, xxh3_128=checksum_file(path / file.name))
        for file in read_manifest(path).files
    )


def _reseal(path: Path, **changes: Any) -> None:
    (path / MANIFEST_NAME).write_bytes(manifest_bytes(sealed(replace(read_manifest(path), **changes))))


class _Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("resealed", [False, True], ids=["as it is", "with checksums redone"])
def test_a_malicious_pickle_is_not_executed(
    committed: Path,
    check_both: Callable[[Path], list[Problem]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resealed: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (committed / METADATA_NAME).write_bytes(pickle.dumps(_Malicious()))
    if resealed:
        _reseal(committed, files=_listed_anew(committed))
    problems = check_both(committed)
    assert not (tmp_path / "executed").exists()
    assert problems[0].file == METADATA_NAME
    if resealed:
        assert "posix.system has no place" in problems[0].detail


@pytest.mark.parametrize("raw", [b"", b"\x80", pickle.dumps({}), pickle.dumps(7)])
def test_bytes_that_are_no_metadata_are_refused(raw: bytes) -> None:
    with pytest.raises(Corrupt, match="here"):
        parse_metadata(raw, where="here")


def test_holes_are_found(committed: Path) -> None:
    """DCP itself would leave the region as it was in memory, without a word."""
    manifest = read_manifest(committed)

    def problems(metadata: Any) -> list[tuple[str, str]]:
        found = check_metadata(metadata, tensors=manifest.tensors, files=manifest.files)
        return [(problem.kind, problem.tensor) for problem in found]

    assert problems(read_metadata(committed)) == []
    lost = read_metadata(committed)
    lost.storage_data = {index: info for index, info in lost.storage_data.items() if index.fqn != "model.0.bias"}
    assert problems(lost) == [("hole", "model.0.bias")]
    fewer = read_metadata(committed)
    fewer.state_dict_metadata["model.0.weight"].chunks.clear()  # type: ignore[union-attr]
    assert problems(fewer) == [("hole", "model.0.weight")]
    outside = read_metadata(committed)
    next(info for index, info in outside.storage_data.items() if index.fqn == "model.0.weight").length = 1 << 40
    assert problems(outside) == [("hole", "model.0.weight")]


def test_metadata_and_manifest_must_speak_of_the_same_tensors(committed: Path) -> None:
    metadata, manifest = read_metadata(committed), read_manifest(committed)
    bias = next(tensor for tensor in manifest.tensors if tensor.key == "model.0.bias")
    others = [tensor for tensor in manifest.tensors if tensor is not bias]
    for changed, kind in [
        ([], "extra-tensor"),
        ([bias, replace(bias, key="model.new")], "missing-tensor"),
        ([replace(bias, dtype="int32")], "wrong-dtype"),
        ([replace(bias, shape=(7,))], "wrong-shape"),
    ]:
        problems = check_metadata(metadata, tensors=[*others, *changed], files=manifest.files)
        assert [problem.kind for problem in problems] == [kind]
