"""Tensor, sequence and loss parallel: matrices cut along heads, features and vocabulary, positions cut between the layers.

DTensor does it, as the model's plan says. A layer costs an all-gather and a reduce-scatter of its positions for attention and for the
feed-forward, forward and backward alike; logits stay cut and the loss is taken of them so.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from surefoot.core.cut_plan import CutPlan, TensorStyle
from surefoot.core.errors import ConfigError

_POSITIONS = 1  # of x_BSD
_HEADS = 2  # of q_BSHE


def cut_tensors(model: nn.Module, mesh: DeviceMesh, *, plan: CutPlan) -> None:
    """Local. Cut parameters of `model` (on the meta device, or the same on every rank) over `mesh`, which has one axis.

    Raises ConfigError for a model that does not say how.
    """
    if not plan.tensor_styles:
        raise ConfigError(
            "the model does not say how its matrices may be cut", where="[parallel] tp", hint="leave it out: cut your own model by dp_shard"
        )
    for name, style in plan.tensor_styles:
        module = model.get_submodule(name)
        for part in _parts(style):
            parallelize_module(module, mesh, part, src_data_rank=None)  # every rank cuts its own: nothing is sent
        if style == "vocabulary_rows":
            # A view otherwise, and fully_shard warns of a unit that hands out views: one copy of x_BSD a forward.
            module.register_forward_hook(lambda _, __, x_BSD: x_BSD.clone())


def _parts(style: TensorStyle) -> tuple[ParallelStyle, ...]:
    match style:
        case "vocabulary_rows":
            return (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(_POSITIONS)),)
        case "columns":
            return (ColwiseParallel(),)
        case "rows":
            return (RowwiseParallel(output_layouts=Shard(_POSITIONS)),)
        case "gathered":
            return (PrepareModuleInput(input_layouts=Shard(_POSITIONS), desired_input_layouts=Replicate()),)
        case "norm":
            return (SequenceParallel(sequence_dim=_POSITIONS),)
        case "head_norm":
            return (SequenceParallel(sequence_dim=_HEADS, use_local_output=True),)
        case "last_norm":
            whole = PrepareModuleOutput(output_layouts=Shard(_POSITIONS), desired_output_layouts=Replicate(), use_local_output=False)
            return (SequenceParallel(sequence_dim=_POSITIONS), whole)
        case "vocabulary_columns":
            return (ColwiseParallel(use_local_output=False),)
