"""Building ours and somebody else's model, its first values, and how it is cut."""

from __future__ import annotations

import logging
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, cut_plan, materialise, shard_units
from surefoot.model.init import init_rules
from surefoot.model.transformer import Transformer
from surefoot.tensors.random import Constant, Normal

CPU = torch.device("cpu")


class Foreign(nn.Module):
    def __init__(self, section: ModelSection, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, section.d_model)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(section.d_model, section.d_model)) for _ in range(2))

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor, doc_ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSD: torch.Tensor = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return x_BSD @ self.embed.weight.T


def on_meta(section: ModelSection, vocab_size: int) -> nn.Module:
    with torch.device("meta"):
        return Foreign(section, vocab_size)


@pytest.fixture
def factories() -> Iterator[types.ModuleType]:
    """An importable module `somebody` with factories good and bad."""
    module = types.ModuleType("somebody")
    named: dict[str, object] = {"model": Foreign, "on_meta": on_meta, "nothing": lambda *_: None, "number": 3}
    for name, value in named.items():
        setattr(module, name, value)
    sys.modules["somebody"] = module
    yield module
    del sys.modules["somebody"]


def test_ours_comes_without_values_and_gets_the_same_ones_each_time(small: ModelSection) -> None:
    model = build_model(small, 100, seed=1)
    assert isinstance(model, Transformer)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, seed=1, device=CPU)
    again, other = (build_model(small, 100, seed=0) for _ in range(2))
    materialise(again, seed=1, device=CPU)
    materialise(other, seed=2, device=CPU)
    for (name, a), (_, b), (_, c) in zip(model.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) is name.endswith("norm.weight"), name


def test_first_values_follow_the_rules(small: ModelSection) -> None:
    section = replace(small, d_model=192, num_heads=6, d_ff=512, init_std=0.02, qk_norm=True, tie_embeddings=False)
    model = build_model(section, 1000, seed=0)
    materialise(model, seed=0, device=CPU)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = 0.02 / math.sqrt(2 * section.num_layers) if name.endswith(("wo.weight", "w2.weight")) else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.02), name
        assert abs(parameter.mean().item()) < 0.02 * std, name


def test_the_first_loss_is_that_of_a_guess_among_all_tokens(small: ModelSection, make_batch: Callable[..., object]) -> None:
    model = build_model(small, 100, seed=0)
    materialise(model, seed=0, device=CPU)
    tokens_BS = torch.arange(24).view(2, 12)
    logits_BSV = model(tokens_BS, tokens_BS % 12, torch.zeros_like(tokens_BS))
    loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS.flatten().roll(-1))
    assert loss.item() == pytest.approx(math.log(128), abs=0.05)


def test_rules_are_by_name(small: ModelSection) -> None:
    rule_for = init_rules(replace(small, num_layers=8, init_std=0.04))
    assert rule_for("blocks.3.attention_norm.weight") == Constant(1.0)
    assert rule_for("blocks.3.attention.q_norm.weight") == Constant(1.0)
    assert rule_for("norm.weight") == Constant(1.0)
    assert rule_for("embed.weight") == rule_for("blocks.0.attention.wq.weight") == Normal(0.04)
    assert rule_for("blocks.0.attention.wo.weight") == rule_for("blocks.7.feed_forward.w2.weight") == Normal(0.01)


def test_a_factory_is_called_with_the_section_and_seeded_by_the_run(factories: types.ModuleType, small: ModelSection) -> None:
    section = replace(small, factory="somebody:model")
    before = torch.get_rng_state()
    first, again, other = (build_model(section, 100, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(first, Foreign)
    assert isinstance(again, Foreign)
    assert isinstance(other, Foreign)
    assert first.embed.weight.shape == (100, small.d_model)
    values = first.embed.weight.detach().clone()
    materialise(first, seed=5, device=CPU)
    assert torch.equal(first.embed.weight, values)
    assert torch.equal(again.embed.weight, values)
    assert not torch.equal(other.embed.weight, values)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("somebody:absent", "cannot be imported"),
        ("nobody_has_this:model", "cannot be imported"),
        ("somebody:number", "not a function"),
        ("somebody:nothing", "returned a NoneType"),
        ("somebody", "names no function"),
    ],
)
def test_a_bad_factory_is_named(factories: types.ModuleType, small: ModelSection, factory: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        build_model(replace(small, factory=factory), 100, seed=0)
    assert raised.value.where == "[model] factory"


def test_a_foreign_model_without_values_is_refused(factories: types.ModuleType, small: ModelSection) -> None:
    model = build_model(replace(small, factory="somebody:on_meta"), 100, seed=0)
    with pytest.raises(ConfigError, match=r"5 tensors on the meta device, 'embed.weight' first"):
        materialise(model, seed=0, device=CPU)


def test_a_foreign_model_is_cut_along_its_module_lists(small: ModelSection, caplog: pytest.LogCaptureFixture) -> None:
    model = Foreign(small, 100)
    assert shard_units(model) == {"layers.0": model.layers[0], "layers.1": model.layers[1]}
    assert not caplog.records


def test_lists_inside_lists_belong_to_the_outer_one() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2)])
    model = nn.ModuleDict({"stack": nn.ModuleList([nn.ModuleDict({"parts": inner})])})
    assert list(shard_units(model)) == ["stack.0"]


def test_a_model_that_cannot_be_cut_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert shard_units(nn.Linear(2, 2)) == {}
    assert "gathered as a whole" in caplog.text


def test_the_plan_has_a_style_for_every_parameter_and_names_what_is_there(kind: ModelSection) -> None:
    """A parameter without a style would be no part of the mesh that the others are on."""
    model = build_model(kind, 100, seed=3)
    plan = cut_plan(model)
    styles = dict(plan.tensor_styles)
    assert len(styles) == len(plan.tensor_styles)
    assert {name.rpartition(".")[0] for name, _ in model.named_parameters()} <= styles.keys()
    for name in (*styles, *plan.attentions, plan.mask):
        model.get_submodule(name)
    assert len(plan.attentions) == kind.num_layers
    assert ("head" in styles) is not kind.tie_embeddings


def test_of_a_foreign_model_no_more_is_known_than_its_units() -> None:
    plan = cut_plan(nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])))
    assert plan.units == ("0.0",)
    assert (plan.tensor_styles, plan.attentions, plan.mask) == ((), (), "")
