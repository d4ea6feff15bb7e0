"""The commit record: names, its own hash, and that no changed byte of it passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from surefoot.checkpoint.manifest import checkpoint_id, manifest_bytes, parse_id, parse_manifest, read_manifest, sealed
from surefoot.core.errors import Corrupt, Incompatible, Incomplete
from surefoot.core.hashing import sha256_json
from surefoot.core.records import Manifest, ManifestFile, ManifestTensor
from surefoot.core.strict_json import canonical


@pytest.fixture
def manifest(make_draft: Callable[..., Manifest]) -> Manifest:
    tensor = ManifestTensor(key="model.w", dtype="float32", shape=(2, 3), digest="00000000000000ff")
    return sealed(replace(make_draft(), tensors=(tensor,), files=(ManifestFile(name="a", num_bytes=3, xxh3_128="0" * 32),)))


def test_ids_read_back() -> None:
    assert checkpoint_id(500, attempt=2) == "s500-a2"
    assert checkpoint_id(500, attempt=2, retry=1) == "s500-a2-r1"
    assert parse_id("s500-a2-r1") == (500, 2, 1)
    assert parse_id("s500-a2") == (500, 2, 0)


@pytest.mark.parametrize("name", ["", "s1", ".s1-a1.g1.writing", "s1-a1-r", "xs1-a1", "s1-a1/"])
def test_other_names_are_no_ids(name: str) -> None:
    assert parse_id(name) is None


def test_a_manifest_reads_back_equal(manifest: Manifest) -> None:
    assert parse_manifest(manifest_bytes(manifest), where="here") == manifest


def test_a_loss_that_is_no_number_is_null(make_draft: Callable[..., Manifest]) -> None:
    read = parse_manifest(manifest_bytes(sealed(make_draft(loss=float("nan")))), where="here")
    assert read.loss is None


def test_every_flipped_bit_is_refused(manifest: Manifest) -> None:
    raw = manifest_bytes(manifest)
    for position in range(len(raw) * 8):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(Corrupt):
            parse_manifest(bytes(flipped), where="here")


@pytest.mark.parametrize("change", [lambda raw: raw + b"\n", lambda raw: raw[:-1], lambda raw: b"", lambda raw: b"[]"])
def test_other_bytes_are_refused(manifest: Manifest, change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(Corrupt, match="here"):
        parse_manifest(change(manifest_bytes(manifest)), where="here")


def _resealed(manifest: Manifest, **changes: object) -> bytes:
    value = json.loads(canonical(asdict(manifest))) | changes
    del value["hash"]
    return canonical(value | {"hash": sha256_json(value)})


def test_fields_of_a_newer_surefoot_are_left_out(manifest: Manifest) -> None:
    assert parse_manifest(_resealed(manifest, weather="fine"), where="here").id == manifest.id


def test_another_format_version_is_refused_by_number(manifest: Manifest) -> None:
    with pytest.raises(Incompatible, match="format version 3, this surefoot reads 1 and 2"):
        parse_manifest(_resealed(manifest, format_version=3), where="here")


def test_an_older_format_version_is_read(manifest: Manifest) -> None:
    for version in (1, 2):
        assert parse_manifest(_resealed(manifest, format_version=version), where="here").format_version == version


def test_a_field_of_the_wrong_type_is_refused(manifest: Manifest) -> None:
    with pytest.raises(Incompatible, match="wrong type"):
        parse_manifest(_resealed(manifest, files=[{"name": "a"}]), where="here")


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Incomplete, match="not a finished checkpoint"):
        read_manifest(tmp_path)
    with pytest.raises(Incomplete):
        read_manifest(tmp_path / "absent")


@pytest.mark.parametrize(
    "change",
    [
        {"step": "../1"},
        {"step": -1},
        {"run": None},
        {"config_hashes": []},
        {"topology": {"world_size": "2"}},
        {"files": [{"name": "a", "num_bytes": -3, "xxh3_128": "0"}]},
        {"tensors": [{"key": "model.w", "dtype": "float32", "shape": [-2], "digest": "0"}]},
        {"tensors": [{"key": "model.w", "dtype": 3, "shape": [2], "digest": "0"}]},
    ],
)
def test_a_value_of_another_type_is_refused_where_it_comes_in(manifest: Manifest, change: dict[str, object]) -> None:
    with pytest.raises(Incompatible, match="wrong type"):
        parse_manifest(_resealed(manifest, **change), where="here")


@pytest.mark.parametrize(
    "change", [{"id": "../s1-a1"}, {"id": "s" + "1" * 5000 + "-a1"}, {"files": [{"name": "../a", "num_bytes": 3, "xxh3_128": "0"}]}]
)
def test_a_name_that_leads_elsewhere_is_refused(manifest: Manifest, change: dict[str, object]) -> None:
    with pytest.raises(Corrupt, match="no name of a checkpoint"):
        parse_manifest(_resealed(manifest, **change), where="here")


def test_a_file_or_a_tensor_that_stands_twice_is_refused(manifest: Manifest) -> None:
    for twice in ({"files": [asdict(manifest.files[0])] * 2}, {"tensors": [asdict(manifest.tensors[0])] * 2}):
        with pytest.raises(Corrupt, match="twice"):
            parse_manifest(_resealed(manifest, **twice), where="here")


def test_json_without_an_end_is_refused() -> None:
    with pytest.raises(Corrupt, match="nested too deep"):
        parse_manifest(b"[" * 100_000, where="here")
