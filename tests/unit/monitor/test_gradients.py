from __future__ import annotations

import math

import torch
from torch import nn

from surefoot.monitor.gradients import counted_gradients, squared_norm_and_nonfinite


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
