"""Plans of saves: who stores what, and that a plan is never used for another state."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from surefoot.checkpoint.image import Part
from surefoot.checkpoint.metadata import parse_metadata
from surefoot.checkpoint.save_plan import SavePlans, plan_save
from surefoot.core.errors import Incompatible, Incomplete
from surefoot.tensors.world import World


def box(key: str, *, offset: int, size: int, whole: int = 6, dtype: torch.dtype = torch.float32) -> Part:
    return Part(key, dtype, (whole, 2), (offset, 0), (size, 2))


def test_shards_stay_where_they_are_and_replicas_are_shared_out() -> None:
    ranks = [
        [box("a", offset=0, size=3), box("same", offset=0, size=6), box("same too", offset=0, size=6)],
        [box("a", offset=3, size=3), box("same", offset=0, size=6), box("same too", offset=0, size=6)],
    ]
    plans = [plan_save(ranks, rank=rank) for rank in range(2)]
    assert plans[0].stored == plans[1].stored
    assert sorted(plans[0].stored[0] + plans[0].stored[1]) == ["a", "a", "same", "same too"]
    assert all("a" in keys and len(keys) == 2 for keys in plans[0].stored)
    assert [tuple(placed.part.key for placed in plan.image.placed) for plan in plans] == list(plans[0].stored)
    assert plans[0].metadata == plans[1].metadata
    assert plans[0].tensors == (("a", "float32", (6, 2)), ("same", "float32", (6, 2)), ("same too", "float32", (6, 2)))


def test_metadata_says_where_each_part_lies() -> None:
    ranks = [[box("a", offset=0, size=3)], [box("a", offset=3, size=3), box("b", offset=0, size=6)]]
    plan = plan_save(ranks, rank=1)
    metadata = parse_metadata(plan.metadata, where="here")
    entry = metadata.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks] == [((0, 0), (3, 2)), ((3, 0), (3, 2))]
    found = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
    for placed in plan.image.placed:
        info = found[placed.part.key, placed.part.offsets]
        assert (info.relative_path, info.offset, info.length) == ("__1_0.distcp", placed.archive_offset, placed.archive_bytes)


def test_empty_shards_have_a_place_too() -> None:
    ranks = [[box("a", offset=0, size=1, whole=1)], [box("a", offset=1, size=0, whole=1)]]
    assert plan_save(ranks, rank=0).stored == (("a",), ("a",))


def test_ranks_that_disagree_are_refused_by_name() -> None:
    with pytest.raises(Incompatible, match=r"float32 \(6, 2\) on rank 0, float64 \(6, 2\) on rank 1") as caught:
        plan_save([[box("a", offset=0, size=3)], [box("a", offset=3, size=3, dtype=torch.float64)]], rank=0)
    assert caught.value.where == "a"


def test_a_box_that_nobody_holds_is_refused() -> None:
    with pytest.raises(Incomplete):
        plan_save([[box("a", offset=0, size=3)]], rank=0)


def test_boxes_that_overlap_are_refused() -> None:
    with pytest.raises(Incomplete):
        plan_save([[box("a", offset=0, size=4)], [box("a", offset=3, size=3)]], rank=0)


def test_the_same_state_is_planned_once(world: World) -> None:
    plans = SavePlans()
    tensors = {"a": torch.zeros(3, 2), "b": torch.tensor(1.0)}
    first = plans.plan(tensors, world=world)
    assert plans.plan({key: tensor + 1 for key, tensor in tensors.items()}, world=world) is first


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(3, 2, dtype=torch.bfloat16)},
        {"a": torch.zeros(2, 3)},
        {"A": torch.zeros(3, 2)},
        {"a": torch.zeros(3, 2), "b": torch.zeros(1)},
        {"a": torch.zeros(3, 2, dtype=torch.int32)},
    ],
    ids=["dtype", "shape", "name", "more", "same width"],
)
def test_another_state_is_planned_anew_and_the_first_is_remembered(world: World, other: dict[str, torch.Tensor]) -> None:
    plans = SavePlans()
    tensors = {"a": torch.zeros(3, 2)}
    first = plans.plan(tensors, world=world)
    second = plans.plan(other, world=world)
    assert second is not first
    assert second.tensors == plan_save([list(_parts(other))], rank=0).tensors
    assert plans.plan(tensors, world=world) is first


def _parts(tensors: dict[str, torch.Tensor]) -> list[Part]:
    return [Part(key, tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape)) for key, tensor in tensors.items()]


def test_what_keeps_a_rank_from_planning_is_said_with_its_number(world: World) -> None:
    with pytest.raises(Incompatible, match=r"no JSON form \(on rank 0\)"):
        SavePlans().plan({"a": torch.zeros(2)}, world=world, error=Incompatible("no JSON form"))
