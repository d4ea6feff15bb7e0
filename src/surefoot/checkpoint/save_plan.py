"""Which rank stores which box: the plan of a save.

It follows stock DCP: its way to give each replica to the rank with the least to write, its metadata, its checks. Plans are
remembered under everything that decides them, on every rank: stock DCP's own cache ignores dtypes and is keyed by class name, so a second
save can be described by the first.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.image import Image, Part, lay_out
from surefoot.checkpoint.metadata import find_holes, tensor_metadata
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import Incompatible, Incomplete, SurefootError
from surefoot.tensors.digest import local_box
from surefoot.tensors.world import World, gather_json

_BOXES: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}
"""Boxes of this rank by (shape, mesh, placements): torch takes as long for one as a small tensor takes to copy."""
_OVERHEAD_PER_RANK_BYTES = 64 * 1024  # part records, metadata, manifest: generously


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """Who stores what. `image` is this rank's; the rest is equal on all ranks.

    `metadata` are the bytes of `.metadata`; `tensors` all keys with dtype and shape; `stored` per rank the keys of its parts, in order;
    `job_bytes` what all ranks write, generously.
    """

    image: Image
    metadata: bytes
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    stored: tuple[tuple[str, ...], ...]
    job_bytes: int


class SavePlans:
    """The newest plans of this process."""

    def __init__(self, *, num_kept: int = 2) -> None:
        self._num_kept = num_kept
        self._plans: dict[tuple[str, ...], PlannedSave] = {}

    def plan(self, tensors: Mapping[str, torch.Tensor], *, world: World, error: SurefootError | None = None) -> PlannedSave:
        """Collective over the save group: one small gather, a second one when a rank holds other boxes than before.

        All ranks raise Incompatible for ranks that disagree about a tensor and for the `error` of one, Incomplete for a box without a rank.
        """
        parts, unplanned = _parts(tensors)
        found = error or unplanned
        told = gather_json(world, [_fingerprint(parts), None if found is None else str(found)])
        if (refused := next(((rank, text) for rank, (_, text) in enumerate(told) if text is not None), None)) is not None:
            raise Incompatible(f"{refused[1]} (on rank {refused[0]})", where="the plan of the save") from found
        prints = tuple(fingerprint for fingerprint, _ in told)
        if (known := self._plans.pop(prints, None)) is None:
            known = plan_save([[_part_from_json(item) for item in items] for items in gather_json(world, _as_json(parts))], rank=world.rank)
        self._plans[prints] = known
        while len(self._plans) > self._num_kept:
            del self._plans[next(iter(self._plans))]
        return known


def _parts(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Part], Exception | None]:
    """This rank's parts, or why it has none: the others wait for an answer."""
    try:
        return [part for key, tensor in tensors.items() if (part := part_of(key, tensor)) is not None], None
    except (ValueError, TypeError, RuntimeError) as error:
        return [], error


def part_of(key: str, tensor: torch.Tensor) -> Part | None:
    """Local. This rank's box of `tensor`; None when it holds none."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.get_coordinate() is None:
            return None
        where = tuple(tensor.shape), tensor.device_mesh, tensor.placements
        if (found := _BOXES.get(where)) is None:
            found = _BOXES[where] = local_box(tensor)
        sizes, offsets = found
    else:
        sizes, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    return Part(key, tensor.dtype, tuple(tensor.shape), offsets, sizes)


def plan_save(parts_of_ranks: Sequence[Sequence[Part]], *, rank: int) -> PlannedSave:
    """Local, pure. Each box is stored once, whoever has it; equal on all ranks but for the image."""
    _refuse_disagreement(parts_of_ranks)
    local = [
        SavePlan([_write_item(part) for part in parts], planner_data={part.key: (part.key,) for part in parts}) for parts in parts_of_ranks
    ]
    try:
        final, metadata = DefaultSavePlanner().create_global_plan(local)
    except ValueError as error:
        raise Incomplete(str(error), where="the plan of the save") from error
    images = [lay_out([_part(item) for item in plan.items], rank=number) for number, plan in enumerate(final)]
    metadata.storage_data = {
        item.index: _StorageInfo(image.file, placed.archive_offset, placed.archive_bytes)
        for image, plan in zip(images, final, strict=True)
        for item, placed in zip(plan.items, image.placed, strict=True)
    }
    metadata.storage_meta = StorageMeta()  # stock DCP pickles the absolute path here; a checkpoint must not know where it lies
    metadata.version = CURRENT_DCP_VERSION
    for key in metadata.state_dict_metadata:
        if holes := find_holes(key, tensor_metadata(metadata, key), metadata.storage_data):
            raise Incomplete(holes[0].detail, where=key)
    return PlannedSave(
        image=images[rank],
        metadata=pickle.dumps(metadata),
        tensors=tuple(
            (key, dtype_name(entry.properties.dtype), tuple(entry.size))
            for key in sorted(metadata.state_dict_metadata)
            if (entry := tensor_metadata(metadata, key))
        ),
        stored=tuple(tuple(item.index.fqn for item in plan.items) for plan in final),
        job_bytes=sum(image.num_bytes + _OVERHEAD_PER_RANK_BYTES for image in images),
    )


def _refuse_disagreement(parts_of_ranks: Sequence[Sequence[Part]]) -> None:
    """Stock DCP takes one rank's word for a tensor; ranks that disagree about its dtype or shape are refused here."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, parts in enumerate(parts_of_ranks):
        for part in parts:
            first_rank, first = seen.setdefault(part.key, (rank, part.says))
            if part.says != first:
                raise Incompatible(f"{first} on rank {first_rank}, {part.says} on rank {rank}", where=part.key)


def _write_item(part: Part) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(part.key, torch.Size(part.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=torch.Size(part.sizes)),
            properties=TensorProperties(dtype=part.dtype),
            size=torch.Size(part.global_shape),
        ),
    )


def _part(item: WriteItem) -> Part:
    data = item.tensor_data
    assert data is not None
    return Part(item.index.fqn, data.properties.dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))


def _fingerprint(parts: Sequence[Part]) -> str:
    return str(xxhash.xxh3_128_hexdigest(repr(parts).encode()))


def _as_json(parts: Sequence[Part]) -> list[list[Any]]:
    return [[part.key, dtype_name(part.dtype), part.global_shape, part.offsets, part.sizes] for part in parts]


def _part_from_json(item: Sequence[Any]) -> Part:
    key, dtype, global_shape, offsets, sizes = item
    return Part(key, getattr(torch, dtype), tuple(global_shape), tuple(offsets), tuple(sizes))
