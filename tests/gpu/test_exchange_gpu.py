"""The vector of the step with device tensors, alone and through NCCL."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from surefoot.core.records import Signals
from surefoot.monitor.gradients import counted_gradients, squared_norm_and_nonfinite
from surefoot.monitor.vector import Flag, HostWords, Layout, encode, fold
from surefoot.tensors.exact_sum import NUM_LEVELS
from surefoot.tensors.world import World, broadcast_json, gather_json, gather_words, join_world, reduce_sum, single_world

pytestmark = pytest.mark.gpu

HOST = HostWords(
    generation=2, attempt=3, step=40, flags=Flag.LEAVE, blocklist_word=-5, num_live_tokens=1000, data_wait_s=0.25, forward_backward_s=0.5,
    step_clock_s=12.5, cpu_s=1.5, save_clock_s=60.0, save_stall_s=0.125, save_slot_free=True, lr=1e-3, lr_applied_ratio=0.75,
)  # fmt: skip
LAYOUT = Layout(groups=("embed", "blocks.0"), sums=("log_z_n:head", "log_z_sum:head"), maxima=("act_max:blocks.0",))
TAIL = (1.0 / 7.0, 1e-300, 1e-7, 2e-7, 1.0 / 3.0, 5.0, 64.0, 1.0 / 9.0, -0.5)
"""Squared norms of gradients, updates and weights by group, then what a probed step adds."""


@pytest.fixture
def nccl_world(device: torch.device, tmp_path: Path) -> Iterator[World]:
    """A group of one rank: NCCL allows one rank a device."""
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL: its collectives were NOT checked")
    where = (tmp_path / "store").as_uri()
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=where, rank=0, world_size=1, device_id=device)
    yield join_world(device=device, collective_limit_s=60.0)
    dist.destroy_process_group()


def exchanged(world: World, values: tuple[float, float, float]) -> Signals:
    """`values` are the loss, the squared norm and the number of non-finite tensors."""
    loss_sum, squared_norm, num_nonfinite = values
    fixed = (loss_sum, squared_norm, *(0.0,) * (NUM_LEVELS - 1), num_nonfinite, 0.25)
    on_device = torch.tensor((*fixed, *TAIL), dtype=torch.float64, device=world.device)
    return fold(gather_words(world, encode(HOST, device_values=on_device)), layout=LAYOUT)


@pytest.mark.parametrize("values", [(2.5e3, 1.0 / 3.0, 0.0), (-0.0, 1e300, 7.0)], ids=str)
def test_words_of_the_device_fold_as_those_of_the_host(device: torch.device, values: tuple[float, float, float]) -> None:
    assert exchanged(single_world(device), values) == exchanged(single_world(), values)


def test_a_loss_that_is_not_finite_survives_the_way(device: torch.device) -> None:
    signals = exchanged(single_world(device), (math.inf, math.nan, 1.0))
    assert math.isnan(signals.loss)
    assert math.isnan(signals.grad_norm)
    assert signals.num_nonfinite == 1


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_gather_into_tensor` is deprecated")
def test_words_go_through_nccl_unchanged(nccl_world: World) -> None:
    values = (2.5e3, 1.0 / 3.0, 0.0)
    assert exchanged(nccl_world, values) == exchanged(single_world(), values)
    assert reduce_sum(nccl_world, torch.ones(3, dtype=torch.float64, device=nccl_world.device)).tolist() == [1.0, 1.0, 1.0]
    assert broadcast_json(nccl_world, {"step": 40}) == {"step": 40}  # over gloo: a save never waits for a device
    assert gather_json(nccl_world, [None, 0.5]) == [[None, 0.5]]


def test_gradients_are_measured_as_on_the_host(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(512, 512), (7,), (3, 129), (65536,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    norms = {}
    for place in (torch.device("cpu"), device):
        copies = [torch.nn.Parameter(parameter.detach().to(place)) for parameter in parameters]
        for copy, original in zip(copies, parameters, strict=True):
            copy.grad = original.detach().to(place)
        squared_norm, num_nonfinite = squared_norm_and_nonfinite(counted_gradients(copies, rank=0, world_size=1), device=place)
        assert num_nonfinite.item() == 0
        norms[place.type] = squared_norm.item()
        copies[1].grad = torch.full_like(copies[1], math.nan)
        assert squared_norm_and_nonfinite(counted_gradients(copies, rank=0, world_size=1), device=place)[1].item() == 1
    assert norms[device.type] == pytest.approx(norms["cpu"], rel=1e-5)  # float32 norms per tensor, summed in another order


def test_ranks_on_different_steps_are_found_on_the_device_too(device: torch.device) -> None:
    zeros = torch.zeros(NUM_LEVELS + 3, dtype=torch.float64, device=device)
    rows = [encode(replace(HOST, step=step), device_values=zeros) for step in (40, 41)]
    with pytest.raises(Exception, match="ranks disagree on step"):
        fold(torch.stack(rows))
