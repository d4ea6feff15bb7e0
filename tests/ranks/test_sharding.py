"""The stages of full sharding over real ranks: what each holds between micro-steps and what it sends, and that none changes the sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from surefoot.core.sections import ModelSection, ParallelSection
from surefoot.model.build import build_model, materialise
from surefoot.model.loss import loss_of, loss_sum
from surefoot.parallel.cut import Cut
from surefoot.tensors.batch import Batch
from tests.ranks.cutting import cut_model, world_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
VOCAB_SIZE = 128
SECTION = ModelSection(num_layers=2, d_model=32, num_heads=2, d_ff=32, init_std=0.1)
NUM_UNITS = 3  # two blocks, and the root with the tied embedding and the last norm
MICRO_STEPS = 3


@dataclass(frozen=True)
class Held:
    """Bytes on this rank."""

    parameters: int
    gradients: int


@dataclass(frozen=True)
class Seen:
    """Of one step: what is held before each micro-step and at the end, and how often each collective ran."""

    held: list[Held]
    collectives: dict[str, int]
    bytes_of_model: int
    local_norm: float
    norm_alone: float


def atom(index: int) -> Batch:
    shape = (1, 8)
    tokens_BS = torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(index))
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS.roll(-1, dims=1),
        positions_BS=torch.arange(8).expand(shape),
        doc_ids_BS=torch.zeros(shape, dtype=torch.int64),
        sample_ids_B=torch.tensor([index]),
        num_live_tokens=8,
        atom=index,
    )


def cut_here(parallel: ParallelSection, *, world_size: int, section: ModelSection = SECTION) -> Cut:
    return cut_model(section, parallel, world=world_of(world_size), vocab_size=VOCAB_SIZE)


def local_bytes(tensors: list[torch.Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def held_here(module: nn.Module, shards: list[nn.Parameter]) -> Held:
    """What is registered now, gathered or not, and whatever gradients there are."""
    parameters = list({id(parameter): parameter for parameter in [*module.parameters(), *shards]}.values())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return Held(local_bytes(list(module.parameters())), local_bytes(gradients))


def one_step(*, rank: int, world_size: int, parallel: ParallelSection) -> Seen:
    """The second step: in the first, torch still sets up. Its gradients are compared with those of one process."""
    model_cut = cut_here(parallel, world_size=world_size)
    shards = list(model_cut.module.parameters())
    atoms = [atom(micro_step * world_size + rank) for micro_step in range(MICRO_STEPS)]
    model_cut.runner.run(atoms, start=lambda _: None, loss=loss_of)
    for parameter in shards:
        parameter.grad = None
    held: list[Held] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model_cut.runner.run(atoms, start=lambda _: held.append(held_here(model_cut.module, shards)), loss=loss_of)
    held.append(held_here(model_cut.module, shards))
    local_norm = gauged_norm(model_cut)
    compare_with_one_process(model_cut.module, num_atoms=MICRO_STEPS * world_size)
    model_cut.runner.evaluate(atoms, loss=loss_of)
    held.append(held_here(model_cut.module, shards))
    collectives = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("c10d::")}
    return Seen(
        held,
        collectives,
        bytes_of_model=sum(parameter.numel() * 4 for parameter in shards),
        local_norm=local_norm,
        norm_alone=norm_alone(atoms, sums_first=parallel.zero_stage == 1),
    )


def gauged_norm(model_cut: Cut) -> float:
    assert model_cut.gauges is not None
    return math.sqrt(float(model_cut.gauges.squared_local_norm()))


def norm_alone(atoms: list[Batch], *, sums_first: bool, section: ModelSection = SECTION, names: Collection[str] = ()) -> float:
    """Of the gradient that these atoms give one process, or of all their gradients beside each other; of `names` where there are any."""
    reference = build_model(section, VOCAB_SIZE, seed=4)
    materialise(reference, seed=4, device=CPU)
    squares = 0.0
    for index, one in enumerate(atoms):
        torch.autograd.backward(loss_sum(reference, one).objective)
        if index + 1 == len(atoms) or not sums_first:
            own = [parameter.grad for name, parameter in reference.named_parameters() if not names or name in names]
            squares += sum(float(gradient.square().sum()) for gradient in own if gradient is not None)
            reference.zero_grad()
    return math.sqrt(squares)


def local_norm_here(*, rank: int, world_size: int, parallel: ParallelSection) -> tuple[float, float]:
    """(measured, computed alone) of the second step: DDP sorts its buckets anew after the first."""
    section = replace(SECTION, tie_embeddings=False)  # a tied one has a part of its gradient from either end of a pipeline
    model_cut = cut_here(parallel, world_size=world_size, section=section)
    place = model_cut.place
    atoms = [atom(index * place.num_data_ranks + place.data_rank) for index in range(2)]
    for _ in range(2):
        for parameter in model_cut.module.parameters():
            parameter.grad = None
        model_cut.runner.run(atoms, start=lambda _: None, loss=loss_of)
    names = {name for name, _ in model_cut.module.named_parameters()}
    return gauged_norm(model_cut), norm_alone(atoms, sums_first=True, section=section, names=names)


@pytest.mark.parametrize(
    "parallel", [ParallelSection(dp_replicate=2), ParallelSection(pp=2), ParallelSection(pp=2, dp_shard=2)], ids=["ddp", "pp", "pp-fsdp"]
)
def test_a_rank_knows_its_own_gradient_before_others_are_added(run_ranks: RunRanks, parallel: ParallelSection) -> None:
    for measured, alone in run_ranks(local_norm_here, parallel.num_ranks, parallel=parallel):
        assert measured == pytest.approx(alone, rel=1e-4)


def compare_with_one_process(module: nn.Module, *, num_atoms: int) -> None:
    reference = build_model(SECTION, VOCAB_SIZE, seed=4)
    materialise(reference, seed=4, device=CPU)
    for index in range(num_atoms):
        torch.autograd.backward(loss_sum(reference, atom(index)).objective)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    found = dict(module.named_parameters())
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("copies", [1, 2], ids=["fsdp", "hsdp"])
def test_a_stage_holds_and_sends_what_it_promises(run_ranks: RunRanks, copies: int, stage: Any) -> None:
    parallel = ParallelSection(dp_replicate=copies, dp_shard=2, zero_stage=stage)
    for seen in run_ranks(one_step, parallel.num_ranks, parallel=parallel):
        assert seen.local_norm == pytest.approx(seen.norm_alone, rel=1e-4)
        whole, shard = seen.bytes_of_model, seen.bytes_of_model // 2
        reduced = shard if copies == 1 else 0  # fully_shard itself keeps the sum of a copy until the copies exchange theirs
        between = {
            1: Held(parameters=whole, gradients=whole),
            2: Held(parameters=whole, gradients=reduced),
            3: Held(parameters=shard, gradients=reduced),
        }[stage]
        assert seen.held == [Held(shard, 0), *[between] * (MICRO_STEPS - 1), Held(shard, shard), Held(shard, shard)]
        gathers = MICRO_STEPS * (2 * NUM_UNITS - 1) if stage == 3 else NUM_UNITS  # the root is gathered from its forward to its backward
        sums = NUM_UNITS * (MICRO_STEPS if stage > 1 else 1)
        between_copies = {"c10d::allreduce_": NUM_UNITS} if copies > 1 else {}
        assert seen.collectives == {"c10d::_allgather_base_": gathers, "c10d::_reduce_scatter_base_": sums, **between_copies}


def gradients_of(*, rank: int, world_size: int, parallel: ParallelSection) -> list[torch.Tensor]:
    """This rank's shards after one step."""
    model_cut = cut_here(parallel, world_size=world_size)
    atoms = [atom(micro_step * world_size + rank) for micro_step in range(2)]
    model_cut.runner.run(atoms, start=lambda _: None, loss=loss_of)
    gradients = [parameter.grad for parameter in model_cut.module.parameters()]
    return [gradient.to_local() if isinstance(gradient, DTensor) else torch.as_tensor(gradient) for gradient in gradients]


@pytest.mark.parametrize(
    "axes",
    [ParallelSection(dp_shard=2), ParallelSection(dp_shard=2, zero_stage=1), ParallelSection(dp_replicate=2)],
    ids=["fsdp-3", "fsdp-1", "ddp"],
)
def test_recomputation_keeps_the_bits_of_every_shard(run_ranks: RunRanks, axes: ParallelSection) -> None:
    kept = run_ranks(gradients_of, 2, parallel=axes)
    modes: tuple[Any, ...] = ("selective", "full")
    for mode in modes:
        recomputed = run_ranks(gradients_of, 2, parallel=replace(axes, recompute=mode))
        for ours, theirs in zip(recomputed, kept, strict=True):
            assert [torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)] == [True] * len(theirs)
