"""The inventory: names that no wrapper changes, nothing twice, nothing missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from surefoot.checkpoint.optimizer_state import fill_empty_state
from surefoot.checkpoint.state import collect, compare_inventory, dtype_name
from surefoot.core.errors import Incompatible
from surefoot.core.records import ManifestTensor


class Net(nn.Module):
    """A submodule that is really called `module`, tied weights, both kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.module.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def _adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **options)


def test_keys_of_a_plain_model() -> None:
    model = Net()
    slots = ["exp_avg", "exp_avg_sq", "step"]
    expected = {"model.kept", "model.module.weight", "model.module.bias"}
    expected |= {f"optim.module.{name}.{slot}" for name in ("weight", "bias") for slot in slots}
    assert set(collect(model, _adamw(model)).tensors) == expected


def test_wrappers_do_not_change_keys() -> None:
    plain = Net()
    expected = set(collect(plain, _adamw(plain)).tensors)
    model: Any = Net()
    model.module = checkpoint_wrapper(model.module)
    model.head = torch.compile(model.head, backend="eager")  # an OptimizedModule; it compiles only when it is called
    compiled: Any = torch.compile(model, backend="eager")
    assert set(collect(compiled, _adamw(compiled)).tensors) == expected


def test_tensors_are_the_live_ones() -> None:
    model = Net()
    optimizer = _adamw(model)
    live = collect(model, optimizer)
    live.tensors["model.module.bias"].fill_(4.0)
    live.tensors["optim.module.bias.exp_avg"].fill_(5.0)
    assert model.module.bias.tolist() == [4.0] * 3
    assert optimizer.state[model.module.bias]["exp_avg"].tolist() == [5.0] * 3


def test_frozen_parameters_have_no_moments() -> None:
    model = Net()
    model.module.bias.requires_grad_(False)
    keys = collect(model, _adamw(model)).tensors
    assert "model.module.bias" in keys
    assert not [key for key in keys if key.startswith("optim.module.bias")]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_filled_state_is_what_the_first_step_starts_from(options: dict[str, Any]) -> None:
    """Slots, dtypes and all following bits equal those of a state that torch made by itself."""
    optimizers = []
    for fill in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = _adamw(model, **options)
        if fill:
            fill_empty_state(optimizer)
            fill_empty_state(optimizer)  # a second time changes nothing
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * 0.3
            optimizer.step()
        optimizers.append((model, optimizer))
    (_, lazy), (_, filled) = optimizers
    for ours, theirs in zip(filled.state.values(), lazy.state.values(), strict=True):
        assert list(ours) == list(theirs)
        for slot in ours:
            assert ours[slot].dtype == theirs[slot].dtype
            assert ours[slot].device == theirs[slot].device
            assert torch.equal(ours[slot], theirs[slot])
    for ours, theirs in zip(optimizers[1][0].parameters(), optimizers[0][0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    ],
)
def test_other_optimizers_have_all_their_slots_for_a_load(make: Callable[..., torch.optim.Optimizer]) -> None:
    trained, fresh = Net(), Net()
    optimizer = make(trained.parameters())
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fresh_optimizer = make(fresh.parameters())
    live = collect(fresh, fresh_optimizer, for_load=True)
    assert set(live.tensors) == set(collect(trained, optimizer).tensors)
    assert all(parameter.grad is None for parameter in fresh.parameters())
    assert fresh_optimizer.param_groups[0]["lr"] == 0.1


def test_plain_numbers_go_out_and_back() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slots = {"count": 3, "scale": 0.1, "ready": True, "nothing": None}
    optimizer.state[model.module.bias] = dict(slots)
    live = collect(model, optimizer)
    assert live.tensors["optim.module.bias.scale"].dtype == torch.float64
    assert "optim.module.bias.nothing" not in live.tensors
    for key in live.scalars:
        live.tensors[key].zero_()
    live.put_back_scalars()
    assert optimizer.state[model.module.bias] == {"count": 0, "scale": 0.0, "ready": False, "nothing": None}


def test_state_without_a_tensor_form_is_refused_by_name() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.module.bias] = {"history": [1, 2]}
    with pytest.raises(Incompatible, match=r"optim\.module\.bias\.history"):
        collect(model, optimizer)


def test_a_parameter_of_another_model_is_refused() -> None:
    with pytest.raises(Incompatible, match="not one of the model"):
        collect(Net(), _adamw(Net()))


def _stored(model: nn.Module) -> dict[str, ManifestTensor]:
    live = collect(model, _adamw(model))
    return {
        key: ManifestTensor(key=key, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), digest="0" * 16)
        for key, tensor in live.tensors.items()
    }


def test_an_equal_inventory_has_no_problem() -> None:
    model = Net()
    assert compare_inventory(collect(model, _adamw(model)), _stored(model).values()) == []


@pytest.mark.parametrize(
    ("kind", "key", "change"),
    [
        ("missing-tensor", "optim.module.bias.exp_avg", None),
        ("missing-tensor", "model.kept", None),
        ("wrong-dtype", "model.module.weight", {"dtype": "bfloat16"}),
        ("wrong-shape", "model.module.weight", {"shape": (9,)}),
    ],
)
def test_each_difference_is_named(kind: str, key: str, change: dict[str, Any] | None) -> None:
    model = Net()
    stored = _stored(model)
    old = stored.pop(key)
    if change is not None:
        stored[key] = replace(old, **change)
    (problem,) = compare_inventory(collect(model, _adamw(model)), stored.values())
    assert (problem.kind, problem.tensor) == (kind, key)


def test_an_item_too_many_is_named() -> None:
    model = Net()
    extra = ManifestTensor(key="model.other", dtype="float32", shape=(), digest="0" * 16)
    (problem,) = compare_inventory(collect(model, _adamw(model)), [*_stored(model).values(), extra])
    assert (problem.kind, problem.tensor) == ("extra-tensor", "model.other")
