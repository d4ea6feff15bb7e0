"""The corruption table: whatever happens to the bytes of a checkpoint is found and named, and 200 untouched copies are clean.

Every change is shown to `verify`, to a load, which must refuse it with the live state as before, and, once per row, to the real command.

| what happens | test |
| --- | --- |
| a bit flipped anywhere, every kind of file | test_flipped_bits |
| a file cut short, emptied, lost | test_a_cut_or_lost_file |
| two shards swapped | test_swapped_shards |
| two generations mixed, any one file | test_a_file_of_another_generation |
| a stale pointer: a renamed folder, another run's copy | test_a_renamed_folder |
| another dtype, manifest and checksums redone | test_another_dtype |
| a hole, checksums redone | test_a_hole |
| the optimizer lost, everything redone | test_the_optimizer_lost |
| one rank's random state lost, everything redone | test_a_random_state_lost |
| bytes appended or files added after the commit | test_written_after_the_commit |
| a changed value, all checksums of files redone | test_a_changed_moment_with_its_checksum_redone |
| another copy is good | test_recovery_goes_on_from_another_copy |

A change that redoes digests as well is another checkpoint, and only a replay of the steps after it can tell: tests/ranks/test_recovery.py.

The traps of stock DCP that our notes number, and where each is met:

| trap | test |
| --- | --- |
| P1 flipped bit loads | here test_flipped_bits; of stock folders test_audit.test_each_flipped_bit_of_a_value_is_found... |
| P2 lost writer thread | the uploader writes whole images and reads them back: test_upload; a hole in stock folders: test_audit |
| P3 overwritten in place | test_save_load.test_a_published_id_is_never_written_again, here test_a_file_of_another_generation |
| P4 no fsync of folders | test_save_crash_points |
| P5 fsync before the flush | no buffered writes are left; test_save_crash_points |
| P6 hole | here test_a_hole, test_planner.test_a_region_that_nobody_stored_is_refused |
| P7 dtype cast, extra keys | here test_another_dtype, test_planner.test_each_difference_is_refused_by_name |
| P8 fresh optimizer asks for nothing | here test_the_optimizer_lost, test_save_load.test_an_optimizer_without_state_cannot_hide... |
| P9 same name on all ranks is one value | test_checkpoint_ranks.test_every_rank_has_its_own_random_stream_back |
| P10 plan cache ignores dtypes | test_planner.test_a_second_save_is_not_described_by_the_first |
| P11 host copies used again | test_slot, test_staging: a slot is never claimed before its upload ended |
| P12 collectives in a thread | none: threads stage, ranks gather on their own group (test_save_plan) |
| P13 writer process without limits | test_agent_uploader |
| P14 a failed staging reported as done | test_staging |
| P15 pickles executed | test_verify.test_a_malicious_pickle_is_not_executed, test_parts, test_audit.test_nothing_is_executed |
| P16 own classes in .metadata | test_save_load.test_stock_dcp_opens_it |
| P17 extensions | cannot be met: none is written; read, they are refused by parts.PartReader |
| P18 safetensors shards without a commit | test_audit.test_a_sharded_safetensors_folder_says_what_cannot_be_known |
| P19 a load that fails half-way | here in every row: the live state is as before; test_save_load for the last check |
| P20 lists per rank, no commit | test_audit.test_others_are_refused_and_said_to_be_what_they_are |
| P21 planning on rank 0 | figures, not bits: benchmarks/checkpoint.py |
| P22 order of parts in a file | digests are by key and box: test_parts, test_checkpoint_ranks resharding |
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from surefoot.checkpoint.manifest import (
    EXTRAS_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    checksum_file,
    manifest_bytes,
    read_manifest,
    rng_key,
    sealed,
)
from surefoot.checkpoint.metadata import chunk_index, tensor_metadata
from surefoot.checkpoint.parts import PartReader
from surefoot.checkpoint.reader import listed
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.sources import FolderSource
from surefoot.checkpoint.state import LiveState, collect
from surefoot.checkpoint.verify import read_metadata, verify
from surefoot.cli.checkpoint import app
from surefoot.core.errors import CheckpointError, Corrupt
from surefoot.core.records import Problem
from surefoot.tensors.digest import state_digest
from surefoot.tensors.world import single_world

SHARDS = ["__0_0.distcp", "__1_0.distcp"]
FILES = [*SHARDS, METADATA_NAME, EXTRAS_NAME, MANIFEST_NAME]
WIDTH = 24
SAVER = Path(__file__).with_name("sharded_saver.py")

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Values:
    """Where the bytes of one stored part of a tensor lie."""

    file: str
    key: str
    start: int
    stop: int


@dataclass
class Table:
    """Two checkpoints of one training by two ranks, one a step after the other; tests change copies of the first."""

    first: Path
    second: Path
    values: list[Values]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.first, to / self.first.name))


def _two_checkpoints(root: Path, *, width: int) -> Table:
    processes = [
        subprocess.Popen(
            [sys.executable, str(SAVER), str(root / "checkpoints"), str(root / "store"), str(rank), "2", str(width)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, told = process.communicate(timeout=100)
        assert process.returncode == 0, told
    first = root / "checkpoints" / "s10-a1"
    return Table(first, root / "checkpoints" / "s20-a1", _where_values_lie(first))


def _where_values_lie(path: Path) -> list[Values]:
    metadata = read_metadata(path)
    files = listed(path, metadata)
    found = []
    with FolderSource(path) as folder:
        parts = PartReader(files, dict.fromkeys(files, folder))
        for key in metadata.state_dict_metadata:
            for chunk in tensor_metadata(metadata, key).chunks:
                part = parts.part(metadata.storage_data[chunk_index(key, chunk)])
                found.append(Values(part.file.name, key, part.offset, part.offset + part.layout.num_bytes))
    return [values for values in found if values.stop > values.start]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    return _two_checkpoints(tmp_path_factory.mktemp("corruption"), width=WIDTH)


@pytest.fixture(scope="module")
def live() -> LiveState:
    """What a restart would load into: the same model on one rank."""
    return _fresh_state(WIDTH)


def _fresh_state(width: int) -> LiveState:
    import importlib.util

    spec = importlib.util.spec_from_file_location("sharded_saver", SAVER)
    assert spec is not None
    assert spec.loader is not None
    saver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(saver)
    model = saver.new_model(width)
    return collect(model, torch.optim.AdamW(model.parameters()), for_load=True)


def _refused(path: Path, live: LiveState, **options: Any) -> CheckpointError:
    """What a load says; the live state must be as before."""
    before = {key: tensor.clone() for key, tensor in live.tensors.items()}
    with pytest.raises(CheckpointError) as caught:
        load(path, state=live, world=single_world(), **options)
    assert all(torch.equal(tensor, before[key]) for key, tensor in live.tensors.items())
    assert "not touched" in caught.value.hint
    return caught.value


def _found(path: Path, live: LiveState, *, by_command: bool = True) -> list[Problem]:
    """The problems of a folder, after a load and the real command refused it too."""
    problems = verify(path)
    assert problems, "silent"
    error = _refused(path, live)
    assert any(name and name in str(error) for problem in problems for name in (problem.file, problem.tensor)), error
    if by_command:
        done = CliRunner().invoke(app, ["verify", str(path), "--json"])
        assert done.exit_code == 1
        answer = json.loads(done.output)
        assert not answer["ok"]
        assert [(problem["kind"], problem["file"]) for problem in answer["problems"]] == [(p.kind, p.file) for p in problems]
    return problems


def _flip(file: Path, position: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(position // 8)
        (value,) = stream.read(1)
        stream.seek(position // 8)
        stream.write(bytes([value ^ 1 << position % 8]))


def _reseal(path: Path, **changes: Any) -> None:
    """A manifest that agrees with itself and with the files as they are now."""
    manifest = replace(read_manifest(path), **changes)
    digest = state_digest(tensor for tensor in manifest.tensors if not tensor.key.startswith("rng/"))
    files = tuple(
        replace(file, num_bytes=(path / file.name).stat().st_size, xxh3_128=checksum_file(path / file.name))
        for file in manifest.files
        if (path / file.name).exists()
    )
    (path / MANIFEST_NAME).write_bytes(manifest_bytes(sealed(replace(manifest, files=files, state_digest=digest))))


def _redo_metadata(path: Path, change: Callable[[Any], object]) -> None:
    metadata = read_metadata(path)
    change(metadata)
    (path / METADATA_NAME).write_bytes(pickle.dumps(metadata))


# --- the rows ---


def test_untouched_copies_are_clean(table: Table, tmp_path: Path, live: LiveState) -> None:
    for number in range(200):
        path = table.copy(tmp_path / str(number))
        assert verify(path) == []
        shutil.rmtree(path)
    load(table.copy(tmp_path), state=_fresh_state(WIDTH), world=single_world())
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "s10-a1")]).exit_code == 0


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits(table: Table, tmp_path: Path, live: LiveState, name: str) -> None:
    """40 of each kind; of the flips in shards half are in values, where the tensor is named too."""
    path = table.copy(tmp_path)
    _flip_and_look(path, live, table.values, name=name, num_flips=40)


def _flip_and_look(path: Path, live: LiveState, values: list[Values], *, name: str, num_flips: int) -> None:
    file = path / name
    chooser = random.Random(name)
    inside = [part for part in values if part.file == name]
    for number in range(num_flips):
        part = chooser.choice(inside) if inside and number % 2 else None
        start, stop = (part.start, part.stop) if part else (0, file.stat().st_size)
        position = chooser.randrange(start * 8, stop * 8)
        _flip(file, position)
        problems = _found(path, live, by_command=number < 4)
        assert name in {problem.file for problem in problems}, position
        hit = {part.key for part in inside if part.start * 8 <= position < part.stop * 8}
        assert hit <= {problem.tensor for problem in problems}, position
        if hit:
            assert next(iter(hit)) in str(_refused(path, live))
        _flip(file, position)
    assert verify(path) == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.8, 0.99, None])
def test_a_cut_or_lost_file(table: Table, tmp_path: Path, live: LiveState, name: str, keep: float | None) -> None:
    path = table.copy(tmp_path)
    if keep is None:
        (path / name).unlink()
    else:
        size = (path / name).stat().st_size
        os.truncate(path / name, int(size * keep) if isinstance(keep, float) else keep)
    problems = _found(path, live, by_command=keep in (0, None))
    kind = "missing-file" if keep is None else "bad-manifest" if name == MANIFEST_NAME else "wrong-size"
    assert (kind, name) in {(problem.kind, problem.file) for problem in problems}
    left = (path / name).stat().st_size if keep is not None else 0
    cut = {part.key for part in table.values if part.file == name and part.stop > left}
    assert cut <= {problem.tensor for problem in problems}


def test_swapped_shards(table: Table, tmp_path: Path, live: LiveState) -> None:
    path = table.copy(tmp_path)
    one, other = (path / name for name in SHARDS)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    problems = _found(path, live)
    assert set(SHARDS) <= {problem.file for problem in problems}
    assert any(problem.tensor.startswith("optim.") for problem in problems)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_generation(table: Table, tmp_path: Path, live: LiveState, name: str) -> None:
    path = table.copy(tmp_path)
    shutil.copy(table.second / name, path / name)
    if (path / name).read_bytes() == (table.first / name).read_bytes():
        assert name == METADATA_NAME  # the same tensors at the same places: the same bytes, so nothing is wrong
        assert verify(path) == []
        return
    problems = _found(path, live)
    assert name in {problem.file for problem in problems} or name == MANIFEST_NAME


def test_a_renamed_folder(table: Table, tmp_path: Path, live: LiveState) -> None:
    """By itself it is whole; the ledger's digest says that it is not the one that is meant."""
    path = table.copy(tmp_path)
    shutil.rmtree(path)
    shutil.copytree(table.second, path)
    assert verify(path) == []
    expected = read_manifest(table.first).state_digest
    error = _refused(path, live, expected_state_digest=expected)
    assert isinstance(error, Corrupt)
    assert expected in str(error)


def test_another_dtype(table: Table, tmp_path: Path, live: LiveState) -> None:
    path = table.copy(tmp_path)
    tensors = read_manifest(path).tensors
    _reseal(path, tensors=tuple(replace(t, dtype="bfloat16") if t.key == "optim.0.weight.exp_avg" else t for t in tensors))
    problems = _found(path, live)
    assert ("wrong-dtype", "optim.0.weight.exp_avg") in {(problem.kind, problem.tensor) for problem in problems}
    whole = table.copy(tmp_path / "whole")
    changed = _fresh_state(WIDTH)
    changed.tensors["model.0.weight"] = changed.tensors["model.0.weight"].double()
    assert "wrong-dtype model.0.weight" in str(_refused(whole, changed))


def test_a_hole(table: Table, tmp_path: Path, live: LiveState) -> None:
    key = "optim.0.weight.exp_avg"
    path = table.copy(tmp_path)
    _redo_metadata(path, lambda metadata: metadata.state_dict_metadata[key].chunks.pop())
    _reseal(path)
    assert [(problem.kind, problem.tensor) for problem in _found(path, live)] == [("hole", key)]


def test_the_optimizer_lost(table: Table, tmp_path: Path, live: LiveState) -> None:
    """Manifest, metadata and checksums agree that there is none."""
    path = table.copy(tmp_path)

    def forget(metadata: Any) -> None:
        for key in [key for key in metadata.state_dict_metadata if key.startswith("optim.")]:
            del metadata.state_dict_metadata[key]
        metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if not index.fqn.startswith("optim.")}

    _redo_metadata(path, forget)
    _reseal(path, tensors=tuple(tensor for tensor in read_manifest(path).tensors if not tensor.key.startswith("optim.")))
    assert "missing-tensor optim." in str(_refused(path, live))


def test_a_random_state_lost(table: Table, tmp_path: Path, live: LiveState) -> None:
    path = table.copy(tmp_path)
    lost = rng_key(1)

    def forget(metadata: Any) -> None:
        del metadata.state_dict_metadata[lost]
        metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != lost}

    _redo_metadata(path, forget)
    _reseal(path, tensors=tuple(tensor for tensor in read_manifest(path).tensors if tensor.key != lost))
    assert ("missing-tensor", lost) in {(problem.kind, problem.tensor) for problem in _found(path, live)}


@pytest.mark.parametrize("name", FILES)
def test_written_after_the_commit(table: Table, tmp_path: Path, live: LiveState, name: str) -> None:
    path = table.copy(tmp_path)
    with (path / name).open("ab") as file:
        file.write(b"x")
    assert name in {problem.file for problem in _found(path, live)}
    again = table.copy(tmp_path / "again")
    (again / f"{name}.bak").write_bytes(b"x")
    assert [(problem.kind, problem.file) for problem in _found(again, live)] == [("extra-file", f"{name}.bak")]


def test_a_changed_moment_with_its_checksum_redone(table: Table, tmp_path: Path) -> None:
    """The digest from before the save knows better; for a load that is the last check, so the live state is garbage, and said to be."""
    path = table.copy(tmp_path)
    part = next(part for part in table.values if part.key == "optim.0.weight.exp_avg")
    _flip(path / part.file, part.start * 8 + 3)
    _reseal(path)
    assert [(problem.kind, problem.tensor) for problem in verify(path)] == [("wrong-digest", part.key)]
    with pytest.raises(Corrupt, match=r"wrong-digest .* optim\.0\.weight\.exp_avg") as caught:
        load(path, state=_fresh_state(WIDTH), world=single_world())
    assert "garbage" in caught.value.hint


@pytest.mark.parametrize("name", FILES)
def test_recovery_goes_on_from_another_copy(table: Table, tmp_path: Path, name: str) -> None:
    path = table.copy(tmp_path)
    _flip(path / name, 99)
    with FolderSource(table.first, name="copy") as copy, FolderSource(path) as disk:
        loaded = load(path, state=_fresh_state(WIDTH), world=single_world(), sources=[disk, copy])
    assert name in {problem.file for problem in loaded.problems}
    assert loaded.manifest.state_digest == read_manifest(table.first).state_digest


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_a_thousand_flips_of_a_larger_one(tmp_path: Path, name: str) -> None:
    table = _two_checkpoints(tmp_path, width=2000)
    _flip_and_look(table.copy(tmp_path), _fresh_state(2000), table.values, name=name, num_flips=1000)
