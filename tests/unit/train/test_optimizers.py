"""The learning rate of each group under muP: its own share of whatever rate the schedule asks for, through a checkpoint too."""

from __future__ import annotations

import pytest
import torch

from surefoot.core.sections import ModelSection, OptimizerSection
from surefoot.model.build import build_model, materialise
from surefoot.train.optimizers import build_optimizer, set_learning_rate

WIDE = ModelSection(num_layers=1, d_model=64, num_heads=4, tie_embeddings=False, parametrization="mup", mup_base_width=16)


def optimizer_of(section: ModelSection) -> torch.optim.Optimizer:
    model = build_model(section, 256, seed=0)
    materialise(model, seed=0, device=torch.device("cpu"))
    return build_optimizer(model, OptimizerSection(lr=0.01), model_section=section)


@pytest.mark.parametrize("rate", [0.01, 0.003, 0.0])
def test_each_group_keeps_its_factor_at_every_rate(rate: float) -> None:
    optimizer = optimizer_of(WIDE)
    set_learning_rate(optimizer, 0.0)  # a warm-up begins there, and must not forget the factors
    set_learning_rate(optimizer, rate)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rate / 4, rate, rate])


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    optimizer = optimizer_of(WIDE)
    rates = [torch.tensor(float(group["lr"]), dtype=torch.float64) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_learning_rate(optimizer, 0.002)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    assert [float(rate) for rate in rates] == pytest.approx([0.0005, 0.002, 0.002])


def test_the_update_of_a_scaled_group_is_as_much_smaller() -> None:
    optimizer = optimizer_of(WIDE)
    set_learning_rate(optimizer, 0.01)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    before = [group["params"][0].detach().clone() for group in optimizer.param_groups]
    optimizer.step()
    moved = [float((was - group["params"][0].detach()).abs().max()) for was, group in zip(before, optimizer.param_groups, strict=True)]
    assert moved == pytest.approx([0.0025, 0.01, 0.01], rel=1e-3)  # Adam's first step is the rate itself
