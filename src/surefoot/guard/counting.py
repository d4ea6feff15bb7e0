"""Who counts which gradient, where ranks hold different parameters."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.checkpoint.state import names_of
from surefoot.core.hashing import sha256_json
from surefoot.monitor.gradients import deal_boxes
from surefoot.tensors.digest import local_box
from surefoot.tensors.world import World, gather_json


def agree_dealt(model: nn.Module, optimizer: torch.optim.Optimizer, *, world: World) -> frozenset[int] | None:
    """Collective over the save group. The ids of the parameters that this rank counts; None where all ranks hold the same ones."""
    names = names_of(model)
    held = {names[id(parameter)]: parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names}
    if len(set(gather_json(world, sha256_json(sorted(held))))) == 1:
        return None
    told = gather_json(world, {name: local_box(parameter) for name, parameter in held.items()})
    boxes = [{name: (tuple(sizes), tuple(offsets)) for name, (sizes, offsets) in rank.items()} for rank in told]
    return frozenset(id(held[name]) for name in deal_boxes(boxes)[world.rank])
