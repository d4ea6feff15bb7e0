from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.checkpoint.state import submodules_of
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, materialise
from surefoot.model.loss import loss_sum
from surefoot.monitor.groups import group_names
from surefoot.monitor.probe_figures import head_group, head_group_names, probe_figures
from surefoot.monitor.probes import Probes, gradient_values, moment_values
from surefoot.monitor.vector import Layout
from surefoot.parallel.recompute import recompute
from surefoot.tensors.batch import Batch

CPU = torch.device("cpu")
SECTION = ModelSection(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, init_std=0.2)


def batch_of(seed: int = 0) -> Batch:
    tokens_BS = torch.randint(0, 64, (2, 96), generator=torch.Generator().manual_seed(seed))
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS.roll(-1, dims=1),
        positions_BS=torch.arange(96).expand(2, 96),
        doc_ids_BS=torch.zeros(2, 96, dtype=torch.int64),
        sample_ids_B=torch.arange(2),
        num_live_tokens=192,
        atom=0,
    )


def model_of(section: ModelSection = SECTION) -> nn.Module:
    model = build_model(section, 64, seed=1)
    materialise(model, seed=1, device=CPU)
    return model


def probes_of(model: nn.Module, *, narrow: torch.dtype | None = None) -> Probes:
    grouped = group_names([[name for name, _ in model.named_parameters()]])
    return Probes(submodules_of(model), grouped=grouped, narrow=narrow, head_part=(0, 1))


def figures_of(probes: Probes) -> dict[str, float]:
    layout = Layout(sums=tuple(probes.sums), maxima=tuple(probes.maxima))
    values = probes.take(layout, device=CPU).tolist()
    return probe_figures(dict(zip((*layout.sums, *layout.maxima), values, strict=True)))


def seen_by_hand(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name in ("blocks.0", "blocks.1", "logits"):
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.detach()}))
        if name.endswith("core"):
            module.register_forward_hook(lambda _, given, __, name=name: seen.update({name: [one.detach() for one in given]}))
    loss_sum(model, batch)
    return seen


def test_probes_are_what_a_look_by_hand_gives() -> None:
    model = model_of()
    seen = seen_by_hand(model, batch_of())
    probes = probes_of(model)
    probes.open()
    loss_sum(model, batch_of())
    figures = figures_of(probes)
    for block in ("blocks.0", "blocks.1"):
        leaving = seen[block].double()
        assert figures[f"act_rms:{block}"] == pytest.approx(float(leaving.square().mean().sqrt()), rel=1e-5)
        assert figures[f"act_max:{block}"] == float(leaving.abs().max())
        assert figures[f"act_kurtosis:{block}"] == pytest.approx(float(leaving.pow(4).mean() / leaving.square().mean() ** 2), rel=1e-5)
        assert figures[f"act_nonfinite:{block}"] == 0
        q_BHSE, k_BKTE, _ = seen[f"{block}.attention.core"]
        logits_BHST = q_BHSE @ k_BKTE.repeat_interleave(2, dim=1).transpose(-1, -2) / math.sqrt(8)
        rows = torch.arange(95, -1, -2)  # two samples apart: 96 positions, of which at most 64 are looked at
        causal_RT = torch.arange(96)[None, :] <= rows[:, None]
        largest_H = logits_BHST[:, :, rows].masked_fill(~causal_RT, -math.inf).amax(dim=(0, 2, 3))
        for head in range(2):
            assert figures[f"attn_logit_max:{block}.heads.{head}"] == pytest.approx(
                float(largest_H[2 * head : 2 * head + 2].max()), rel=1e-5
            )
        assert figures[f"attn_logit_max:{block}"] == pytest.approx(float(largest_H.max()), rel=1e-5)
    log_z = torch.logsumexp(seen["logits"][:, rows].double(), dim=-1).mean()
    assert figures["log_z"] == pytest.approx(float(log_z), rel=1e-5)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_looking_changes_no_bit_and_a_repeated_forward_is_not_seen(mode: Literal["none", "selective", "full"], autocast: bool) -> None:
    gradients: list[list[torch.Tensor]] = []
    told: list[dict[str, float]] = []
    for looks in (False, True):
        model = model_of()
        recompute([model.get_submodule("blocks.0"), model.get_submodule("blocks.1")], mode=mode)
        probes = probes_of(model)
        if looks:
            probes.open()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            objective = loss_sum(model, batch_of()).objective
        torch.autograd.backward(objective)
        told.append(figures_of(probes))
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert [torch.equal(one, other) for one, other in zip(*gradients, strict=True)] == [True] * len(gradients[0])
    plain = model_of()
    reference = probes_of(plain)
    reference.open()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_sum(plain, batch_of())
    assert told == [{}, figures_of(reference)]


def test_atoms_are_added_up_and_what_was_taken_is_gone() -> None:
    model = model_of()
    probes = probes_of(model)
    probes.open()
    means = []
    for seed in (1, 2):
        loss_sum(model, batch_of(seed))
        means.append(figures_of(probes)["act_rms:blocks.1"])
    for seed in (1, 2):
        loss_sum(model, batch_of(seed))
    assert figures_of(probes)["act_rms:blocks.1"] == pytest.approx(math.sqrt((means[0] ** 2 + means[1] ** 2) / 2), rel=1e-6)
    loss_sum(model, batch_of())
    probes.close()
    loss_sum(model, batch_of())
    assert figures_of(probes) == {}


def test_an_evaluation_is_not_seen() -> None:
    model = model_of()
    probes = probes_of(model)
    probes.open()
    with torch.no_grad():
        loss_sum(model, batch_of())
    assert figures_of(probes) == {}


class TwoLinears(nn.Module):
    """Somebody else's model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("narrow", "subnormal", "large"), [(None, 0.0, 0.0), (torch.float16, 0.25, 0.25)], ids=["float32", "float16"])
def test_limits_are_those_of_the_narrow_format(narrow: torch.dtype | None, subnormal: float, large: float) -> None:
    model = TwoLinears()
    with torch.no_grad():
        for layer in model.layers:
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(torch.eye(4))
            layer.bias.zero_()
    probes = probes_of(model, narrow=narrow)
    probes.open()
    model(torch.tensor([[1e-6, 0.0, 40_000.0, 1.0]]))
    figures = figures_of(probes)
    for layer_name in ("layers.0", "layers.1"):
        shares = [figures[f"act_{kind}:{layer_name}"] for kind in ("subnormal", "zero", "large", "nonfinite")]
        assert shares == [subnormal, 0.25, large, 0.0]
    model(torch.tensor([[math.nan, 0.0, math.inf, 1.0]]))
    figures = figures_of(probes)
    assert figures["act_nonfinite:layers.1"] >= 2
    assert math.isnan(figures["act_rms:layers.1"])


def test_gradients_and_moments_by_group() -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    for parameter, values in zip(parameters, ([1e-6, 0.0, 5e4, 1.0], [1.0] * 4, [0.0] * 4), strict=True):
        parameter.grad = torch.tensor(values)
    groups = [0, 0, 1]
    counts_KG = gradient_values(parameters, groups=groups, num_groups=2, narrow=torch.float16, device=CPU).view(4, 2)
    assert counts_KG.tolist() == [[8.0, 4.0], [1.0, 0.0], [1.0, 4.0], [1.0, 0.0]]
    state = {parameter: {"exp_avg": torch.full((4,), 0.5), "exp_avg_sq": torch.full((4,), 2.0)} for parameter in parameters[:2]}
    assert moment_values(parameters, state, groups=groups, num_groups=2, device=CPU).tolist() == [2.0, 0.0, 32.0, 0.0]
    assert moment_values([], {}, groups=[], num_groups=2, device=CPU).tolist() == [0.0] * 4


@pytest.mark.parametrize("num_key_heads", [1, 3, 8, 12, 96])
def test_every_key_head_has_a_group_and_every_group_one(num_key_heads: int) -> None:
    names = head_group_names("blocks.0", num_key_heads)
    groups = [head_group(head, num_key_heads) for head in range(num_key_heads)]
    assert sorted(set(groups)) == list(range(len(names)))
    assert groups == sorted(groups)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # unannotated in torch
    """The most elements of one tensor that was made, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in torch
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_look_takes_little_memory_whatever_the_size_and_the_layout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    leaving = torch.randn(4, 33, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaving[1, 2, 3] = 0.0
    told = []
    for chunk, output in ((1 << 20, leaving), (100, leaving), (100, leaving.transpose(0, 1).contiguous().transpose(0, 1))):
        monkeypatch.setattr("surefoot.monitor.probes.CHUNK_ELEMENTS", chunk)
        module = Passes()
        probes = Probes(submodules_of(module), grouped={"layers.0.weight": "layers.0"}, narrow=None, head_part=(0, 1))
        parameter = nn.Parameter(torch.zeros_like(output))
        parameter.grad = output
        probes.open()
        with Largest() as largest:
            of_gradient = gradient_values([parameter], groups=[0], num_groups=1, narrow=None, device=CPU)
            module.layers[0](output)
        assert largest.numel <= chunk
        told.append((figures_of(probes), of_gradient.tolist()))
    assert told[0][1] == told[1][1] == told[2][1]
    for figures, _ in told[1:]:
        assert figures == pytest.approx(told[0][0], rel=1e-5)
    assert told[0][0]["act_zero:layers.0"] == 1 / leaving.numel()


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])


def test_logits_of_long_sequences_and_large_vocabularies_are_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for most in (1 << 22, 2 * 96 * 3):
        monkeypatch.setattr("surefoot.model.attention._MAX_SCORES", most)
        monkeypatch.setattr("surefoot.model.transformer._MAX_LOGITS", most)
        model = model_of()
        probes = probes_of(model)
        probes.open()
        loss_sum(model, batch_of())
        told.append(figures_of(probes))
    assert told[1] == pytest.approx(told[0], rel=1e-6)
