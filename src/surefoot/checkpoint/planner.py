"""DCP planners that know what must be there: digests before a save, two-way strictness and full coverage before a load.

Plans are never cached: stock DCP's cache ignores dtypes and is keyed by class name, so a second save can be described by the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType

from surefoot.checkpoint.metadata import tensor_metadata
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import Incompatible, Incomplete
from surefoot.tensors.digest import box_digest, local_box


class DigestingSavePlanner(DefaultSavePlanner):
    """Takes the digest of every part that this rank will write, from the live tensor, before anything is written."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=False)
        self.digests: dict[MetadataIndex, int] = {}

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0. Stock DCP takes one rank's word for a tensor; ranks that disagree about its dtype or shape are refused here."""
        seen: dict[str, tuple[int, str]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                if item.tensor_data is None:
                    continue
                what = f"{dtype_name(item.tensor_data.properties.dtype)} {tuple(item.tensor_data.size)}"
                first_rank, first = seen.setdefault(item.index.fqn, (rank, what))
                if what != first:
                    raise Incompatible(f"{first} on rank {first_rank}, {what} on rank {rank}", where=item.index.fqn)
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.digests = {item.index: self._digest(item) for item in plan.items}
        return plan

    def _digest(self, item: WriteItem) -> int:
        if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
            raise Incompatible("only tensors are stored: an object would need a pickle", where=item.index.fqn)
        local = self.lookup_object(item.index)
        return box_digest(local, global_shape=item.tensor_data.size, offsets=item.tensor_data.chunk.offsets)


class StrictLoadPlanner(DefaultLoadPlanner):
    """Refuses what stock DCP lets pass: extra keys, another dtype, a region that no stored part covers.

    `may_be_left` tells which stored keys need not be asked for by this rank.
    """

    def __init__(self, *, may_be_left: Callable[[str], bool]) -> None:
        super().__init__()
        self._may_be_left = may_be_left

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        if missing := sorted(self.state_dict.keys() - stored):
            raise Incomplete("not in the checkpoint", where=missing[0], keys=missing)
        if extra := sorted(key for key in stored.keys() - self.state_dict if not self._may_be_left(key)):
            raise Incompatible("in the checkpoint, but nothing here takes it", where=extra[0], keys=extra)
        for key, tensor in self.state_dict.items():
            entry = tensor_metadata(self.metadata, key)
            have = f"{dtype_name(entry.properties.dtype)} {tuple(entry.size)}"
            want = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
            if have != want:
                raise Incompatible(f"stored as {have}, wanted {want}", where=key)
        plan = super().create_local_plan()
        self._check_coverage(plan)
        return plan

    def _check_coverage(self, plan: LoadPlan) -> None:
        covered = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            covered[item.dest_index.fqn] += math.prod(item.lengths)
        for key, tensor in self.state_dict.items():
            sizes, offsets = local_box(tensor)
            if covered[key] != math.prod(sizes):
                raise Incomplete(f"{covered[key]} of the {math.prod(sizes)} elements at {offsets} are stored", where=key)
