from __future__ import annotations

import math

import torch
from torch import nn

from surefoot.monitor.gradients import Box, counted_gradients, deal_boxes, squared_norm_and_nonfinite


def parameters_with_gradients() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (1000, 10, 300, 7, 650)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    parameters.append(nn.Parameter(torch.zeros(3)))  # never used: no gradient
    return parameters


def test_every_element_is_counted_once_over_all_ranks() -> None:
    parameters = parameters_with_gradients()
    for world_size in (1, 2, 3, 4):
        shares = [counted_gradients(parameters, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert sum(gradient.numel() for share in shares for gradient in share) == 1967
        total = sum(float(squared_norm_and_nonfinite(share, device=torch.device("cpu"))[0]) for share in shares)
        reference = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        assert math.isclose(math.sqrt(total), float(reference), rel_tol=1e-6)


def test_a_tensor_that_is_not_finite_is_counted_and_a_finite_one_is_not() -> None:
    sick = torch.tensor([1.0, math.nan])
    _, num_nonfinite = squared_norm_and_nonfinite([torch.ones(3), sick, torch.tensor([math.inf])], device=torch.device("cpu"))
    assert int(num_nonfinite) == 2
    _, none = squared_norm_and_nonfinite([torch.ones(3)], device=torch.device("cpu"))
    assert int(none) == 0


def test_no_gradients_at_all_is_zero() -> None:
    squared, num_nonfinite = squared_norm_and_nonfinite([], device=torch.device("cpu"))
    assert (float(squared), float(num_nonfinite)) == (0.0, 0.0)


def box(*sizes: int, offset: int = 0) -> Box:
    return sizes, (offset, *(0 for _ in sizes[1:]))


def test_where_ranks_hold_different_parameters_each_box_is_dealt_once() -> None:
    """Two stages of two shards each; an embedding at both ends, and a shard that is empty."""
    first = [{"embed": box(5, 8), "low": box(2, 8)}, {"embed": box(5, 8, offset=5), "low": box(1, 8, offset=2)}]
    last = [{"embed": box(5, 8), "high": box(1)}, {"embed": box(5, 8, offset=5), "high": box(0, offset=1)}]
    dealt = deal_boxes([*first, *last])
    assert sorted(name for names in dealt for name in names) == ["embed", "embed", "high", "low", "low"]
    assert [("embed" in dealt[rank]) + ("embed" in dealt[rank + 2]) for rank in (0, 1)] == [1, 1]
    assert deal_boxes([*last, *first])[0] != set()  # whoever comes first


def test_only_what_was_dealt_to_this_rank_is_counted() -> None:
    parameters = parameters_with_gradients()
    counted = counted_gradients(parameters, rank=0, world_size=2, dealt={id(parameters[1]), id(parameters[5])})
    assert [gradient.numel() for gradient in counted] == [10]
