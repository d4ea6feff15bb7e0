from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.monitor.ratios import AppliedRate, UpdateSizes

CPU = torch.device("cpu")
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in ((512, 384), (384,), (7, 300), (), (2048, 64))]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.AdamW(p, lr=1e-3), lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), lambda p: torch.optim.Adagrad(p)],
    ids=["adamw", "sgd", "adagrad"],
)
def test_sampled_sizes_are_near_the_true_ones(optimizer: Optimizer) -> None:
    """Five standard errors of the smallest sample, 2,048 elements of a normal distribution, are 8%."""
    made = parameters()
    groups = [0, 0, 1, 1, 2]
    sizes = UpdateSizes(num_groups=3)
    was = [parameter.detach().clone() for parameter in made]
    sizes.before(made, groups=groups)
    optimizer(made).step()
    sizes.after(step=5)
    updates_G, weights_G = sizes.take(step=5, device=CPU).view(2, 3)
    for group in range(3):
        own = [index for index, of in enumerate(groups) if of == group]
        true_update = math.sqrt(sum(float((made[index] - was[index]).detach().double().square().sum()) for index in own))
        true_weight = math.sqrt(sum(float(made[index].detach().double().square().sum()) for index in own))
        assert math.sqrt(updates_G[group]) == pytest.approx(true_update, rel=0.08)
        assert math.sqrt(weights_G[group]) == pytest.approx(true_weight, rel=0.08)


def test_a_sample_meets_all_columns_of_a_matrix() -> None:
    """With 384 columns a stride of 384 would meet one of them."""
    matrix = nn.Parameter(torch.zeros(2048, 384))
    sizes = UpdateSizes(num_groups=1)
    sizes.before([matrix], groups=[0])
    with torch.no_grad():
        matrix[:, 100:104] += 1.0
    sizes.after(step=1)
    assert float(sizes.take(step=1, device=CPU)[0]) == pytest.approx(2048 * 4, rel=0.35)


def test_a_small_update_of_large_weights_is_not_lost_in_half_precision() -> None:
    weights = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    sizes = UpdateSizes(num_groups=1)
    sizes.before([weights], groups=[0])
    with torch.no_grad():
        weights.add_(2.0**-7)
    sizes.after(step=1)
    update, weight = sizes.take(step=1, device=CPU).tolist()
    assert math.sqrt(update / weight) == pytest.approx(2.0**-7 / (1 + 2.0**-7), rel=1e-3)


def test_a_skip_and_a_roll_back_leave_nothing_to_tell() -> None:
    made = parameters()[:1]
    sizes = UpdateSizes(num_groups=1)
    assert sizes.take(step=0, device=CPU).tolist() == [0.0, 0.0]
    sizes.before(made, groups=[0])
    sizes.after(step=4)
    assert sizes.take(step=3, device=CPU).tolist() == [0.0, 0.0]
    assert sizes.take(step=4, device=CPU)[1] > 0


def test_reading_changes_nothing() -> None:
    made = parameters()
    was = [parameter.detach().clone() for parameter in made]
    sizes = UpdateSizes(num_groups=1)
    sizes.before(made, groups=[0] * len(made))
    sizes.after(step=1)
    assert all(torch.equal(parameter, before) for parameter, before in zip(made, was, strict=True))


def test_a_rate_that_is_applied_as_told_is_1_in_every_group() -> None:
    rate = AppliedRate()
    groups: list[dict[str, Any]] = [{"lr": 1e-3}, {"lr": torch.tensor(2.5e-4)}]  # the second follows at a factor of its own, as under mup
    rate.after(groups, told=1e-3, step=1)
    assert rate.take(step=1) == pytest.approx(1.0)
    rate.after([{"lr": 5e-4}, {"lr": 1.25e-4}], told=5e-4, step=2)
    assert rate.take(step=2) == pytest.approx(1.0)
    rate.after([{"lr": 5e-4}, {"lr": 1.25e-4 * 30}], told=5e-4, step=3)
    assert rate.take(step=3) == pytest.approx(30.0)


def test_with_a_ratio_of_the_optimizer_a_wrong_first_update_shows_too() -> None:
    rate = AppliedRate()
    rate.after([{"lr": 3e-2, "lr_ratio": 1.0}, {"lr": 1e-4, "lr_ratio": 0.1}], told=1e-3, step=1)
    assert rate.take(step=1) == pytest.approx(30.0)


@pytest.mark.parametrize("told", [None, 0.0, math.nan])
def test_a_rate_that_nobody_told_is_not_compared(told: float | None) -> None:
    rate = AppliedRate()
    rate.after([{"lr": 1.0}], told=told, step=1)
    assert math.isnan(rate.take(step=1))


def test_a_rate_is_of_its_own_step_alone() -> None:
    rate = AppliedRate()
    rate.after([{"lr": 1.0}], told=1.0, step=1)
    assert (rate.take(step=1), math.isnan(rate.take(step=2))) == (1.0, True)
