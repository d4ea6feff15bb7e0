"""A save and a load in one process: same bits back, or a refusal by name with nothing touched and nothing left."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.manifest import EXTRAS_NAME, MANIFEST_NAME, manifest_bytes, read_manifest, sealed
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.slot import Slot
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError, Corrupt, Incompatible, Incomplete
from surefoot.core.records import Manifest
from surefoot.tensors.world import World

EXTRAS = {"cursor": {"next_sample": 7}, "monitor": {"in_a_row": 0}}
Draft = Callable[..., Manifest]


def _bits(training: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in collect(training.model, training.optimizer).tensors.items()}


def _assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


def _save(root: Path, draft: Manifest, training: Any, world: World, *, slot: Slot | None = None) -> Manifest:
    return save(root, draft, state=collect(training.model, training.optimizer), extras=EXTRAS, world=world, slot=slot)


def test_a_load_gives_the_bits_of_the_save(committed: Path, training: Any, make_training: Callable[..., Any], world: World) -> None:
    fresh = make_training(seed=5)
    loaded = load(committed, state=collect(fresh.model, fresh.optimizer, for_load=True), world=world)
    _assert_same(_bits(fresh), _bits(training))
    assert loaded.extras == {"cursor": {"next_sample": 7, "count": 3}, "monitor": {"in_a_row": 0}}
    assert loaded.manifest == read_manifest(committed)
    assert loaded.manifest.topology == {"dp_replicate": 1, "world_size": 1}
    assert loaded.manifest.cursor == loaded.extras["cursor"]
    assert (loaded.rng_restored, loaded.notes) == (True, ())


def test_random_streams_go_on_where_they_were_at_the_save(tmp_path: Path, training: Any, make_draft: Draft, world: World) -> None:
    _save(tmp_path, make_draft(), training, world)
    expected = (torch.randn(2).tolist(), random.random())
    load(tmp_path / "s10-a1", state=collect(training.model, training.optimizer, for_load=True), world=world)
    assert (torch.randn(2).tolist(), random.random()) == expected


def test_training_goes_on_the_same_after_a_load(committed: Path, training: Any, make_training: Callable[..., Any], world: World) -> None:
    fresh = make_training(seed=5)
    load(committed, state=collect(fresh.model, fresh.optimizer, for_load=True), world=world)
    for both in (fresh, training):
        both.step(seed=8)
    _assert_same(_bits(fresh), _bits(training))


def test_a_save_before_the_first_step_loads(tmp_path: Path, make_training: Callable[..., Any], make_draft: Draft, world: World) -> None:
    started, fresh = make_training(), make_training(seed=5)
    _save(tmp_path, make_draft(), started, world)
    load(tmp_path / "s10-a1", state=collect(fresh.model, fresh.optimizer, for_load=True), world=world)
    _assert_same(_bits(fresh), _bits(started))


def test_stock_dcp_opens_it(committed: Path, training: Any) -> None:
    expected = _bits(training)
    state = {key: torch.full_like(tensor, 9) for key, tensor in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(state, checkpoint_id=committed)
    _assert_same(state, expected)


def test_no_path_of_this_machine_is_stored(committed: Path) -> None:
    for file in committed.iterdir():
        assert str(committed.parents[1]).encode() not in file.read_bytes()
    assert FileSystemReader(committed).read_metadata().storage_meta.checkpoint_id is None  # type: ignore[union-attr]


def test_only_the_published_folder_is_left(committed: Path) -> None:
    assert [entry.name for entry in committed.parent.iterdir()] == ["s10-a1"]
    assert {entry.name for entry in committed.iterdir()} == {".metadata", "__0_0.distcp", EXTRAS_NAME, MANIFEST_NAME}


def test_saving_the_same_state_twice_gives_the_same_digest(committed: Path, training: Any, make_draft: Draft, world: World) -> None:
    again = _save(committed.parent, make_draft("s10-a1-r1"), training, world)
    assert again.state_digest == read_manifest(committed).state_digest


@pytest.mark.parametrize("key", ["model.0.weight", "optim.2.weight.exp_avg_sq", "model.1.running_mean"])
def test_one_flipped_bit_changes_the_state_digest(committed: Path, training: Any, make_draft: Draft, world: World, key: str) -> None:
    collect(training.model, training.optimizer).tensors[key].view(torch.uint8).view(-1)[0] ^= 1
    changed = _save(committed.parent, make_draft("s11-a1"), training, world)
    before = read_manifest(committed)
    assert changed.state_digest != before.state_digest
    different = {new.key for new, old in zip(changed.tensors, before.tensors, strict=True) if new.digest != old.digest}
    assert different - {"rng/rank_00000"} == {key}


def test_a_published_id_is_never_written_again(committed: Path, training: Any, make_draft: Draft, world: World) -> None:
    before = {file.name: file.read_bytes() for file in committed.iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        _save(committed.parent, make_draft(), training, world)
    assert {file.name: file.read_bytes() for file in committed.iterdir()} == before


@pytest.mark.parametrize("name", ["latest", "../s1-a1", ""])
def test_other_names_are_refused(tmp_path: Path, training: Any, make_draft: Draft, world: World, name: str) -> None:
    with pytest.raises(CheckpointError, match="checkpoint id"):
        _save(tmp_path / "checkpoints", make_draft(name), training, world)
    assert list(tmp_path.iterdir()) == []


# --- refusals of a load: by name, and before a live tensor is touched ---


def _refused(path: Path, training: Any, world: World, kind: type[CheckpointError], **options: Any) -> CheckpointError:
    live = collect(training.model, training.optimizer, for_load=True)
    before = _bits(training)
    with pytest.raises(kind) as caught:
        load(path, state=live, world=world, **options)
    _assert_same(_bits(training), before)
    assert "not touched" in caught.value.hint
    return caught.value


def test_a_missing_moment_is_refused_by_name(
    tmp_path: Path, training: Any, make_training: Callable[..., Any], make_draft: Draft, world: World
) -> None:
    live = collect(training.model, training.optimizer)
    del live.tensors["optim.0.bias.exp_avg"]
    save(tmp_path, make_draft(), state=live, extras=EXTRAS, world=world)
    error = _refused(tmp_path / "s10-a1", make_training(), world, Incomplete)
    assert "optim.0.bias.exp_avg" in str(error)


def test_an_optimizer_without_state_cannot_hide_that_all_of_it_is_lost(
    tmp_path: Path, training: Any, make_training: Callable[..., Any], make_draft: Draft, world: World
) -> None:
    live = collect(training.model, training.optimizer)
    live.tensors = {key: tensor for key, tensor in live.tensors.items() if key.startswith("model.")}
    save(tmp_path, make_draft(), state=live, extras=EXTRAS, world=world)
    assert "optim." in str(_refused(tmp_path / "s10-a1", make_training(), world, Incomplete))


def test_another_shape_is_refused_by_name(committed: Path, make_training: Callable[..., Any], world: World) -> None:
    error = _refused(committed, make_training(width=6), world, Incompatible)
    assert "model.0.bias" in str(error)
    assert "(6,)" in str(error)


def test_another_dtype_is_refused_by_name(committed: Path, make_training: Callable[..., Any], world: World) -> None:
    training = make_training()
    training.model.to(torch.float64)
    error = _refused(committed, training, world, Incompatible)
    assert "stored float32, expected float64" in str(error)


def test_items_that_nothing_here_takes_are_refused_by_name(committed: Path, world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 5))
    error = _refused(committed, _Pair(model, torch.optim.AdamW(model.parameters())), world, Incompatible)
    assert "extra-tensor model.1.bias" in str(error)


class _Pair:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer


def test_another_state_digest_than_the_ledgers_is_refused(committed: Path, make_training: Callable[..., Any], world: World) -> None:
    error = _refused(committed, make_training(), world, Corrupt, expected_state_digest="sf1:00")
    assert "the ledger says sf1:00" in str(error)
    fresh = make_training()
    digest = read_manifest(committed).state_digest
    load(committed, state=collect(fresh.model, fresh.optimizer, for_load=True), world=world, expected_state_digest=digest)


def test_a_lost_random_stream_is_refused_by_name(committed: Path, make_training: Callable[..., Any], world: World) -> None:
    manifest = read_manifest(committed)
    committed.joinpath(MANIFEST_NAME).write_bytes(manifest_bytes(sealed(replace(manifest, topology={"world_size": 2}))))
    assert "rng/rank_00001" in str(_refused(committed, make_training(), world, Incomplete))


def test_a_rewritten_digest_is_found_by_the_loaded_bits(committed: Path, make_training: Callable[..., Any], world: World) -> None:
    """Manifest and hash agree, files are whole, only the tensor is not what the manifest says: the last check sees it."""
    from surefoot.tensors.digest import state_digest

    manifest = read_manifest(committed)
    tensors = tuple(replace(tensor, digest="0" * 16) if tensor.key == "model.0.bias" else tensor for tensor in manifest.tensors)
    digest = state_digest(tensor for tensor in tensors if not tensor.key.startswith("rng/"))
    committed.joinpath(MANIFEST_NAME).write_bytes(manifest_bytes(sealed(replace(manifest, tensors=tensors, state_digest=digest))))
    training = make_training()
    with pytest.raises(Corrupt, match=r"wrong-digest __0_0\.distcp model\.0\.bias") as caught:
        load(committed, state=collect(training.model, training.optimizer, for_load=True), world=world)
    assert "garbage" in caught.value.hint


# --- saves that the system refuses ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a tmpfs of so many KiB; unmounted afterwards."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kibibytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("needs the right to mount a tmpfs: the full-disk test was NOT run")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


def test_too_little_room_is_said_before_a_byte_is_written(
    small_disk: Callable[[int], Path], training: Any, make_draft: Draft, world: World
) -> None:
    root = small_disk(64) / "checkpoints"
    with pytest.raises(CheckpointError, match="too little room") as caught:
        _save(root, make_draft(), training, world)
    needed, free = caught.value.values["needed_bytes"], caught.value.values["free_bytes"]
    assert isinstance(needed, int)
    assert isinstance(free, int)
    assert free <= 64 * 1024 < needed
    assert not root.exists()


def test_a_disk_that_fills_up_during_the_save_loses_nothing(small_disk: Callable[[int], Path], make_draft: Draft, world: World) -> None:
    """Room is measured, then taken by somebody else: a tmpfs that runs out of inodes refuses files although bytes are free."""
    disk = small_disk(4096)
    subprocess.run(["mount", "-o", "remount,nr_inodes=8", str(disk)], check=True, capture_output=True)
    training = _Pair(model := nn.Linear(8, 8), torch.optim.AdamW(model.parameters()))
    root = disk / "checkpoints"
    _save(root, make_draft("s1-a1"), training, world)
    with pytest.raises(CheckpointError, match="No space left on device"):
        _save(root, make_draft("s2-a1"), training, world)
    assert [entry.name for entry in root.iterdir()] == ["s1-a1"]
    assert verify(root / "s1-a1") == []


def test_a_write_that_the_system_cuts_off_is_named_and_cleaned_up(
    committed: Path, make_training: Callable[..., Any], make_draft: Draft, world: World
) -> None:
    """The limit on file sizes stands for a quota: writes fail in the middle of the data file."""
    training = make_training(width=20_000)
    slot = Slot.create(rank=0, number=0)
    slot.reserve(8 << 20)  # the limit counts for memory files too
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            _save(committed.parent, make_draft("s11-a1"), training, world, slot=slot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "are free" in caught.value.what
    assert caught.value.values["needed_bytes"]
    assert [entry.name for entry in committed.parent.iterdir()] == ["s10-a1"]
    assert verify(committed) == []
    _save(committed.parent, make_draft("s11-a1-r1"), training, world, slot=slot)
    assert verify(committed.parent / "s11-a1-r1") == []
    slot.close()
