"""What the gradients say before the update, counted once however the parameters are replicated or sharded."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from surefoot.core.errors import SurefootError
from surefoot.core.records import GradientBound
from surefoot.tensors.exact_sum import NUM_LEVELS, square_levels

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(sizes, offsets) of what a rank holds of a tensor."""


def counted_parameters(
    parameters: Iterable[torch.nn.Parameter], *, rank: int, world_size: int, dealt: Collection[int] | None = None
) -> list[torch.nn.Parameter]:
    """Local. The parameters with a gradient that this rank counts, so that over all ranks each element is counted exactly once.

    A plain parameter is whole on every rank: they are dealt to ranks, largest first, which shares the reading too. A sharded one is counted
    where its shard is, by the first of the ranks that hold the same shard. Where ranks hold different parameters, as the stages of a
    pipeline do, `deal_boxes` says who counts which: `dealt` are the ids of this rank's.
    """
    whole: list[torch.nn.Parameter] = []
    counted: list[torch.nn.Parameter] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if dealt is not None:
            if id(parameter) in dealt:
                _refuse_partial(gradient)
                counted.append(parameter)
        elif isinstance(gradient, DTensor):
            if _is_first_replica(gradient) and gradient.to_local().numel():
                counted.append(parameter)
        else:
            whole.append(parameter)
    load = [0] * world_size
    for parameter in sorted(whole, key=lambda tensor: -tensor.numel()):
        owner = load.index(min(load))
        load[owner] += parameter.numel()
        if owner == rank:
            counted.append(parameter)
    return counted


def counted_gradients(
    parameters: Iterable[torch.nn.Parameter], *, rank: int, world_size: int, dealt: Collection[int] | None = None
) -> list[torch.Tensor]:
    """Local. The local gradients of the parameters that this rank counts."""
    return gradients_of(counted_parameters(parameters, rank=rank, world_size=world_size, dealt=dealt))


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Local. What this rank has of the gradient of each that has one."""
    return [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Local. What this rank has of it, without a graph."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def deal_boxes(held_by_ranks: Sequence[Mapping[str, Box]]) -> list[set[str]]:
    """Local, pure. Per rank the names of the parameters that it counts: each box by one of the ranks that hold it.

    Largest first, to the rank with the least to count so far: a matrix at both ends of a pipeline is counted at one of them.
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, held in enumerate(held_by_ranks):
        for name, box in held.items():
            holders.setdefault((name, box), []).append(rank)
    dealt: list[set[str]] = [set() for _ in held_by_ranks]
    load = [0] * len(held_by_ranks)
    for (name, (sizes, _)), ranks in sorted(holders.items(), key=lambda item: (-math.prod(item[0][1][0]), item[0])):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += math.prod(sizes)
        if math.prod(sizes):
            dealt[rank].add(name)
    return dealt


def norms_of(tensors: Sequence[torch.Tensor], *, device: torch.device) -> torch.Tensor:
    """Local. float64 [T] on `device`: the norm of each.

    Taken in float32 at least: float16 overflows at 65,504. A norm is 20 times cheaper than isfinite here and sees the same tensors.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    halves = any(tensor.dtype.itemsize < 4 for tensor in tensors)
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32 if halves else None)).to(torch.float64)


def squared_norm_and_nonfinite(gradients: Sequence[torch.Tensor], *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Local. float64 scalars on `device`: the sum of squares, and the number of tensors whose norm is not finite."""
    norms_T = norms_of(gradients, device=device)
    return norms_T.square().sum(), _num_nonfinite(norms_T)


def group_sums(values_T: torch.Tensor, *, groups: Sequence[int], num_groups: int) -> torch.Tensor:
    """Local. [G] on the device of `values_T`: what the values of each group come to."""
    index_T = torch.tensor(groups, dtype=torch.int64).to(values_T.device, non_blocking=True)
    return values_T.new_zeros(num_groups).index_add_(0, index_T, values_T)


def squared_norm_levels(
    gradients: Sequence[torch.Tensor], *, norms_T: torch.Tensor, device: torch.device, bound: GradientBound | None
) -> torch.Tensor:
    """Local. float64 [NUM_LEVELS + 1] on `device`: what the squares come to on each level, then the number of non-finite tensors.

    With a `bound` that all ranks agreed on, the levels of all ranks add up to the same bits however the elements were dealt to them. It
    counts the non-finite tensors too, of all ranks: to be told by one of them. Without one, all squares are one sum, on the first level,
    from the norms of the tensors.
    """
    if bound is not None:
        levels_L = square_levels(gradients, largest=bound.largest, num_values=bound.num_elements, device=device)
        return torch.cat((levels_L, levels_L.new_tensor([bound.num_nonfinite])))
    squared_norm = norms_T.square().sum()
    return torch.stack((squared_norm, *squared_norm.new_zeros(NUM_LEVELS - 1), _num_nonfinite(norms_T)))


def _num_nonfinite(norms_T: torch.Tensor) -> torch.Tensor:
    return (~norms_T.isfinite()).sum().to(torch.float64)


def _refuse_partial(gradient: torch.Tensor) -> None:
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        raise SurefootError(
            "a gradient is still a partial sum, so its norm is not known", where="gradients", hint="reduce it before guard.judge"
        )


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    _refuse_partial(tensor)
    return all(coordinate[axis] == 0 for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
