"""What stock DCP lets pass, our planners refuse: each guard fires by name and stays silent on a whole checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.dcp import dcp_errors
from surefoot.checkpoint.manifest import read_manifest
from surefoot.checkpoint.planner import StrictLoadPlanner
from surefoot.checkpoint.reader import Reader
from surefoot.checkpoint.state import LiveState
from surefoot.checkpoint.verify import read_metadata
from surefoot.core.errors import CheckpointError, Corrupt, Incompatible, Incomplete
from surefoot.core.records import Manifest
from surefoot.tensors.world import World


@pytest.fixture
def stored(tmp_path: Path, make_draft: Callable[..., Manifest], world: World) -> Path:
    state = LiveState({"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.tensor(5)})
    save(tmp_path, make_draft(), state=state, extras={}, world=world)
    return tmp_path / "s10-a1"


def _load(path: Path, tensors: dict[str, torch.Tensor], world: World, *, change: Callable[[Metadata], object] = lambda _: None) -> None:
    metadata = read_metadata(path)
    change(metadata)
    with dcp_errors(world, what="loading"):
        dcp_load(
            tensors,
            storage_reader=Reader(path, metadata=metadata),
            planner=StrictLoadPlanner(may_be_left=lambda key: key.startswith("rng/")),
            no_dist=True,
        )


def _targets(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"model.a": torch.zeros(2, 3), "model.b": torch.tensor(0), **{f"model.{name}": tensor for name, tensor in changes.items()}}


def test_a_whole_checkpoint_passes(stored: Path, world: World) -> None:
    targets = _targets()
    _load(stored, targets, world)
    assert targets["model.a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert targets["model.b"].item() == 5


@pytest.mark.parametrize(
    ("targets", "kind", "where"),
    [
        (_targets(c=torch.zeros(1)), Incomplete, "model.c"),
        ({"model.a": torch.zeros(2, 3)}, Incompatible, "model.b"),
        (_targets(a=torch.zeros(2, 3, dtype=torch.bfloat16)), Incompatible, "model.a"),
        (_targets(a=torch.zeros(3, 2)), Incompatible, "model.a"),
    ],
    ids=["missing", "extra", "dtype", "shape"],
)
def test_each_difference_is_refused_by_name(
    stored: Path, world: World, targets: dict[str, torch.Tensor], kind: type[CheckpointError], where: str
) -> None:
    with pytest.raises(kind) as caught:
        _load(stored, targets, world)
    assert caught.value.where == where


def test_a_region_that_nobody_stored_is_refused(stored: Path, world: World) -> None:
    def forget(metadata: Any) -> None:
        metadata.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([1, 3])

    with pytest.raises(Incomplete, match="3 of the 6 elements") as caught:
        _load(stored, _targets(), world, change=forget)
    assert caught.value.where == "model.a"


def test_unreadable_bytes_name_tensor_and_file(stored: Path, world: World) -> None:
    raw = bytearray((stored / "__0_0.distcp").read_bytes())
    raw[: len(raw) // 2] = bytes(len(raw) // 2)
    (stored / "__0_0.distcp").write_bytes(raw)
    with pytest.raises(Corrupt) as caught:
        _load(stored, _targets(), world)
    assert caught.value.where == "__0_0.distcp"
    assert str(caught.value.values["tensor"]).startswith("model.")


def test_a_second_save_is_not_described_by_the_first(stored: Path, make_draft: Callable[..., Manifest], world: World) -> None:
    """Stock DCP's plan cache ignores dtypes: a second save in bf16 was recorded as float32."""
    state = LiveState({"model.a": torch.arange(6.0).view(2, 3).bfloat16(), "model.b": torch.tensor(5)})
    save(stored.parent, make_draft("s20-a1"), state=state, extras={}, world=world)
    assert {tensor.key: tensor.dtype for tensor in read_manifest(stored.parent / "s20-a1").tensors}["model.a"] == "bfloat16"
