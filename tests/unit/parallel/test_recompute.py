from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ModelSection
from surefoot.model.build import build_model, materialise
from surefoot.parallel.recompute import Mode, recompute

MODES: list[Mode] = ["none", "selective", "full"]


class DroppingBlock(nn.Module):
    """Draws before, inside and after attention, and counts its calls in a buffer."""

    num_calls: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x_BSD: torch.Tensor, *, p: float) -> torch.Tensor:
        with torch.no_grad():
            self.num_calls += 1
        q, k, v = self.into(F.dropout(x_BSD, p)).unsqueeze(1).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p).squeeze(1)
        return torch.as_tensor(x_BSD + F.dropout(self.out(F.silu(mixed)), p))


class Dropping(nn.Module):
    def __init__(self, *, num_blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock(width) for _ in range(num_blocks))

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BSD = block(x_BSD, p=0.5)
        return x_BSD


def build(mode: Mode) -> Dropping:
    torch.manual_seed(3)
    model = Dropping()
    recompute(list(model.blocks), mode=mode)
    return model


def two_micro_steps(model: nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for index in range(2):
        torch.manual_seed(100 + index)
        loss = model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(index))).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_losses_and_gradients_keep_their_bits_with_dropout(mode: Mode) -> None:
    losses, gradients = two_micro_steps(build("none"))
    again, recomputed = two_micro_steps(build(mode))
    assert again == losses
    assert recomputed.keys() == gradients.keys()
    assert all(torch.equal(recomputed[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("mode", MODES)
def test_random_streams_go_on_as_if_nothing_had_been_drawn_twice(mode: Mode) -> None:
    two_micro_steps(build("none"))
    wanted = torch.rand(4)
    two_micro_steps(build(mode))
    assert torch.equal(torch.rand(4), wanted)


@pytest.mark.parametrize("mode", MODES)
def test_names_and_buffers_are_those_of_the_model_itself(mode: Mode) -> None:
    model = build(mode)
    two_micro_steps(model)
    assert model.state_dict().keys() == Dropping().state_dict().keys()
    assert [int(block.get_buffer("num_calls")) for block in model.blocks] == [2, 2, 2]


@dataclass
class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """How often each operator ran."""

    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes of what autograd is given to keep inside, each storage once, parameters aside."""
    seen: dict[int, int] = {}
    total: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(seen.values()))


def transformer(mode: Mode, *, num_layers: int = 2) -> nn.Module:
    section = ModelSection(num_layers=num_layers, d_model=32, num_heads=2, init_std=0.1)
    model = build_model(section, 64, seed=1)
    recompute([model.get_submodule(f"blocks.{index}") for index in range(num_layers)], mode=mode)
    materialise(model, seed=1, device=torch.device("cpu"))
    return model


def cost(mode: Mode) -> tuple[int, dict[str, int], dict[str, int]]:
    """Bytes that the forward leaves behind, and the operators of forward and backward."""
    model = transformer(mode)
    tokens_BS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    with saved_bytes() as total, Counted() as forward:
        logits_BSV = model(tokens_BS, torch.arange(16).expand(2, 16), torch.zeros(2, 16, dtype=torch.int64))
    with Counted() as backward:
        logits_BSV.sum().backward()
    return total[0], forward.counts, backward.counts


def test_full_keeps_nothing_inside_a_block_and_computes_it_again() -> None:
    kept, forward, backward = cost("none")
    kept_full, _, backward_full = cost("full")
    assert kept_full < kept / 3
    again = {name: backward_full.get(name, 0) - backward.get(name, 0) for name in ("mm", "_scaled_dot_product_flash_attention_for_cpu")}
    products = forward["mm"] - 1  # the head is outside of the blocks
    assert again["_scaled_dot_product_flash_attention_for_cpu"] == forward["_scaled_dot_product_flash_attention_for_cpu"] == 2
    # Of each block all products but the last: nothing that the backward needs comes after its inputs.
    assert again["mm"] == products - 2


def test_selective_computes_no_product_and_no_attention_again() -> None:
    kept, _, backward = cost("none")
    kept_selective, _, backward_selective = cost("selective")
    for name in ("mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert backward_selective.get(name, 0) == backward.get(name, 0)
    assert backward_selective["silu"] == 2
    assert kept_selective < kept


def test_without_a_backward_nothing_is_kept_for_one() -> None:
    model = transformer("full")
    with torch.no_grad():
        logits_BSV = model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.int64))
    assert logits_BSV.grad_fn is None


def test_a_model_without_blocks_is_refused() -> None:
    recompute([], mode="none")
    with pytest.raises(ConfigError, match="no blocks"):
        recompute([], mode="full")
