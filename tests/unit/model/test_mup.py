"""Sizes of activations after a few Adam steps, over widths: flat under mup, growing in the standard parametrization."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from surefoot.config.rules import broken_rules
from surefoot.core.errors import Incompatible
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.sections import ModelSection, OptimizerSection, RunConfig
from surefoot.model.build import build_model, materialise
from surefoot.model.hf_layout import hf_config
from surefoot.model.mup import attention_scale, grows_with_width, width_factor
from surefoot.train.optimizers import build_optimizer

WIDTHS = (64, 128, 256, 512)
VOCAB, NUM_STEPS = 64, 4
BASE = ModelSection(num_layers=2, d_model=64, num_heads=2, num_kv_heads=2, parametrization="mup", mup_base_width=64)
LR = OptimizerSection(lr=0.01, weight_decay=0.0)


def at_width(d_model: int, section: ModelSection = BASE) -> ModelSection:
    """Heads of one width: wider models have more."""
    return replace(section, d_model=d_model, num_heads=d_model // 32, num_kv_heads=d_model // 32)


def standard(section: ModelSection) -> ModelSection:
    return replace(section, parametrization="standard", mup_base_width=0, mup_base_head_dim=0)


def made(section: ModelSection, *, seed: int = 1) -> nn.Module:
    model = build_model(section, VOCAB, seed=seed)
    materialise(model, seed=seed, device=torch.device("cpu"))
    return model


def logits_of(model: nn.Module, tokens_BS: torch.Tensor) -> torch.Tensor:
    positions_BS = torch.arange(tokens_BS.shape[1]).expand(tokens_BS.shape)
    logits_BSV: torch.Tensor = model(tokens_BS, positions_BS, torch.zeros_like(tokens_BS))
    return logits_BSV


def changes(section: ModelSection) -> dict[str, float]:
    """How far a few updates moved what each part of the model puts out: root mean square over a batch that is seen every time."""
    model = made(section)
    optimizer = build_optimizer(model, LR, model_section=section)
    tokens_BS = torch.randint(VOCAB, (8, 17), generator=torch.Generator().manual_seed(3))
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("attention.wo", "attention.wq", "feed_forward.w2")):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach()}))
    seen["logits"] = logits_of(model, tokens_BS[:, :-1]).detach()
    before = dict(seen)
    for _ in range(NUM_STEPS):
        loss = F.cross_entropy(logits_of(model, tokens_BS[:, :-1]).flatten(0, 1), tokens_BS[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    seen["logits"] = logits_of(model, tokens_BS[:, :-1]).detach()
    return {name: float((seen[name] - before[name]).square().mean().sqrt()) for name in seen}


def growth(section: ModelSection) -> dict[str, float]:
    """The exponent of each change over the widths: 0 is flat, 1 is in proportion to the width."""
    log_widths = torch.tensor(WIDTHS, dtype=torch.float64).log()
    rows = [changes(at_width(width, section)) for width in WIDTHS]
    x = log_widths - log_widths.mean()
    logs = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64).log() for name in rows[0]}
    return {name: float((x * (y - y.mean())).sum() / (x * x).sum()) for name, y in logs.items()}


def test_updates_move_activations_alike_at_every_width_under_mup() -> None:
    assert max(abs(exponent) for exponent in growth(BASE).values()) < 0.25


def test_they_move_them_more_the_wider_the_model_without_it() -> None:
    found = growth(standard(BASE))
    assert min(found.values()) > 0.5, found


def test_gradients_fall_with_the_width_and_stay_far_above_the_eps_of_adam() -> None:
    tokens_BS = torch.randint(VOCAB, (8, 17), generator=torch.Generator().manual_seed(3))
    least = {}
    for width in (WIDTHS[0], WIDTHS[-1]):
        model = made(at_width(width))
        torch.autograd.backward(F.cross_entropy(logits_of(model, tokens_BS[:, :-1]).flatten(0, 1), tokens_BS[:, 1:].flatten()))
        inside = [parameter.grad for name, parameter in model.named_parameters() if grows_with_width(name)]
        least[width] = min(float(grad.square().mean().sqrt()) for grad in inside if grad is not None)
    assert least[64] > 2 * least[512]
    assert least[512] > 100 * LR.eps


def test_at_its_base_width_it_is_the_standard_parametrization_bit_for_bit() -> None:
    tokens_BS = torch.arange(32).reshape(2, 16)
    ours, theirs = made(BASE), made(standard(BASE))
    assert torch.equal(logits_of(ours, tokens_BS), logits_of(theirs, tokens_BS))
    groups = [build_optimizer(model, LR, model_section=section).param_groups for model, section in ((ours, BASE), (theirs, standard(BASE)))]
    assert [(len(group["params"]), group["lr"], group["lr_ratio"]) for group in groups[0]] == [
        (len(group["params"]), group["lr"], group["lr_ratio"]) for group in groups[1]
    ]


def test_matrices_inside_blocks_alone_have_another_rate_decay_and_spread() -> None:
    section = at_width(256)
    model = made(replace(section, tie_embeddings=False, qk_norm=True))
    optimizer = build_optimizer(model, OptimizerSection(lr=0.01, weight_decay=0.1), model_section=section)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside, head, others = ({names[id(parameter)] for parameter in group["params"]} for group in optimizer.param_groups)
    assert head == {"head.weight"}
    assert all(name.startswith("blocks.") and "norm" not in name for name in inside)
    assert {"embed.weight", "norm.weight", "blocks.0.attention.q_norm.weight", "blocks.1.attention_norm.weight"} <= others
    assert [group["lr_ratio"] for group in optimizer.param_groups] == pytest.approx([0.25, 1.0, 1.0])
    assert [group["lr"] * group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([1e-3, 1e-3, 0.0])
    spread = {name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if not name.endswith("norm.weight")}
    assert spread["blocks.0.attention.wq.weight"] == pytest.approx(0.02 / 4**0.5, rel=0.02)
    assert spread["head.weight"] == pytest.approx(0.02, rel=0.02)
    assert not grows_with_width("embed.weight")


@pytest.mark.parametrize(("base", "head_dim", "scale"), [(0, 64, None), (64, 64, None), (16, 64, 4 / 64)])
def test_attention_logits_are_divided_by_the_width_of_heads_that_are_not_the_base_s(base: int, head_dim: int, scale: float | None) -> None:
    section = replace(BASE, mup_base_head_dim=base)
    assert attention_scale(section, head_dim=head_dim) == scale
    assert attention_scale(standard(section), head_dim=head_dim) is None


def test_a_capped_attention_has_the_same_scale() -> None:
    section = replace(BASE, d_model=256, num_heads=2, num_kv_heads=2, mup_base_head_dim=32)
    tokens_BS = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        plain, capped = (logits_of(made(replace(section, attention_soft_cap=cap)), tokens_BS) for cap in (0.0, 1e6))
        other = logits_of(made(replace(section, mup_base_head_dim=0)), tokens_BS)
    torch.testing.assert_close(capped, plain, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(other, plain, rtol=1e-3, atol=1e-5)


def test_what_other_models_do_not_compute_is_not_exported_as_theirs() -> None:
    section = at_width(128)
    with pytest.raises(Incompatible, match="parametrization"):
        hf_config(section, resolve_sizes(section, VOCAB), dtype="float32", seq_len=16, eos_id=0)
    assert hf_config(BASE, resolve_sizes(BASE, VOCAB), dtype="float32", seq_len=16, eos_id=0)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("model", "optimizer", "setting"),
    [
        (replace(BASE, mup_base_width=0), OptimizerSection(), "model.mup_base_width"),
        (replace(BASE, parametrization="standard"), OptimizerSection(), "model.mup_base_width"),
        (replace(BASE, factory="a:b"), OptimizerSection(), "model.factory"),
        (BASE, OptimizerSection(factory="a:b"), "optimizer.factory"),
    ],
)
def test_a_config_that_mup_does_not_suit_is_refused(model: ModelSection, optimizer: OptimizerSection, setting: str) -> None:
    assert setting in {name for name, *_ in broken_rules(RunConfig(model=model, optimizer=optimizer))}
    assert not broken_rules(RunConfig(model=BASE))
    assert width_factor(at_width(256)) == 4.0
