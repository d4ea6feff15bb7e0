"""DCP planner of a load that knows what must be there: two-way strictness and full coverage. Plans of saves are in `save_plan`."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from surefoot.checkpoint.metadata import tensor_metadata
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import Incompatible, Incomplete
from surefoot.tensors.digest import local_box


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
