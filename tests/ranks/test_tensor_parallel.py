"""Layers cut over real ranks, along heads, features, vocabulary and positions: losses and norms of one process, and what a rank holds.

Which collectives run, and that no rank falls back to whole tensors, is seen by the profiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from surefoot.core.errors import ConfigError
from surefoot.core.sections import ModelSection, OptimizerSection, ParallelSection
from surefoot.guard.counting import agree_dealt
from surefoot.model.build import build_model, cut_plan, materialise
from surefoot.model.loss import loss_of
from surefoot.model.precision import autocast_context
from surefoot.monitor.gradients import counted_gradients, squared_norm_and_nonfinite
from surefoot.parallel.clip import scale_gradients
from surefoot.parallel.cut import Cut, cut
from surefoot.parallel.mesh import place_of
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE, Batch
from surefoot.tensors.digest import combine, local_box, tensor_digest
from surefoot.tensors.world import World
from surefoot.train.optimizers import build_optimizer
from tests.ranks.cutting import cut_model, world_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
VOCAB_SIZE = 100  # 128 rows
NUM_LAYERS = 2
ROWS = ((5, 7, 4), (2, 10, 4))
"""Lengths of the documents in each sample: no cut of the 16 positions falls on a boundary of both."""
ATOMS_PER_STEP = (4, 3, 5, 1, 2)

PLAIN = ModelSection(num_layers=NUM_LAYERS, d_model=32, num_heads=8, num_kv_heads=4, d_ff=44, init_std=0.1, tie_embeddings=True)
RICH = replace(PLAIN, tie_embeddings=False, qk_norm=True, window=6, attention_soft_cap=10.0, logit_soft_cap=15.0, z_loss=1e-3)
UNEVEN = replace(PLAIN, d_ff=22, qk_norm=True)  # 11 rows of w1 on a rank of tp = 2: not to be halved

SECTIONS = {"plain-tied": PLAIN, "rich-untied": RICH, "uneven-tied": UNEVEN, "rich-tied": replace(RICH, tie_embeddings=True)}

TP2, TP4, CP2, CP4 = ParallelSection(tp=2), ParallelSection(tp=4), ParallelSection(cp=2), ParallelSection(cp=4)
LAYOUTS = {
    "tp2": TP2,
    "tp4": TP4,
    "tp2-fsdp2": replace(TP2, dp_shard=2),
    "tp2-fsdp2-stage1": replace(TP2, dp_shard=2, zero_stage=1),
    "tp2-copies2": replace(TP2, dp_replicate=2),
    "cp2": CP2,
    "cp4": CP4,
    "cp2-tp2": replace(CP2, tp=2),
    "cp2-fsdp2": replace(CP2, dp_shard=2),
    "cp2-copies2": replace(CP2, dp_replicate=2),
    "pp2-tp2": replace(TP2, pp=2),
    "pp2-cp2": replace(CP2, pp=2),
    "tp2-full": replace(TP2, recompute="full"),
    "tp2-selective": replace(TP2, recompute="selective"),
    "cp2-selective": replace(CP2, recompute="selective"),
    "pp2-tp2-zero-bubble": replace(TP2, pp=2, pp_schedule="zero_bubble"),
    "pp2-cp2-zero-bubble": replace(CP2, pp=2, pp_schedule="zero_bubble"),
    "cp2-tp2-full": replace(CP2, tp=2, recompute="full"),
}


def atom_of(step: int, index: int) -> Batch:
    """Atoms from the number of the step on are phantoms."""
    live = index < ATOMS_PER_STEP[step % len(ATOMS_PER_STEP)]
    doc_ids_BS = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in ROWS])
    tokens_BS = torch.randint(0, VOCAB_SIZE, doc_ids_BS.shape, generator=torch.Generator().manual_seed(1000 * step + index))
    labels_BS = tokens_BS.roll(-1, dims=1)
    labels_BS[doc_ids_BS != doc_ids_BS.roll(-1, dims=1)] = IGNORED_LABEL
    if not live:
        tokens_BS, labels_BS = torch.zeros_like(tokens_BS), torch.full_like(labels_BS, IGNORED_LABEL)
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        positions_BS=torch.stack([torch.cat([torch.arange(length) for length in row]) for row in ROWS]),
        doc_ids_BS=doc_ids_BS,
        sample_ids_B=torch.full((len(ROWS),), index if live else PHANTOM_SAMPLE),
        num_live_tokens=int((labels_BS != IGNORED_LABEL).sum()),
        atom=index,
    )


def atoms_of(step: int, *, data_rank: int, num_data_ranks: int) -> list[Batch]:
    num_micro_steps = -(-ATOMS_PER_STEP[step % len(ATOMS_PER_STEP)] // num_data_ranks)
    return [atom_of(step, micro_step * num_data_ranks + data_rank) for micro_step in range(num_micro_steps)]


def cut_here(section: ModelSection, parallel: ParallelSection, *, world: World, precision: Literal["fp32", "bf16"] = "fp32") -> Cut:
    autocast = autocast_context(precision, CPU, cpu_capabilities={"avx512_bf16": True})
    return cut_model(section, parallel, world=world, vocab_size=VOCAB_SIZE, seed=3, autocast=autocast)


Told = list[tuple[float, float]]
"""Per step (loss, norm of the mean gradient)."""


def train(section: ModelSection, parallel: ParallelSection, *, world: World, num_steps: int, eps: float = 1e-8) -> tuple[Told, Cut]:
    """As our own step does it: sums over live tokens, clipped by the global norm."""
    model_cut = cut_here(section, parallel, world=world)
    place, parameters = model_cut.place, list(model_cut.module.parameters())
    optimizer = build_optimizer(model_cut.module, OptimizerSection(lr=0.01, eps=eps))
    dealt = agree_dealt(model_cut.module, optimizer, world=world)
    told: Told = []
    for step in range(num_steps):
        atoms = atoms_of(step, data_rank=place.data_rank, num_data_ranks=place.num_data_ranks)
        nats = model_cut.runner.run(atoms, start=lambda _: None, loss=partial(loss_of, z_loss=section.z_loss))
        counted = counted_gradients(parameters, rank=world.rank, world_size=world.size, dealt=dealt)
        squares, _ = squared_norm_and_nonfinite(counted, device=CPU)
        num_tokens = sum(atom.num_live_tokens for atom in atoms) * place.counts_tokens
        sums = torch.stack((nats * place.counts_loss, squares, torch.tensor(float(num_tokens), dtype=torch.float64)))
        if world.size > 1:
            dist.all_reduce(sums)
        loss, norm = sums[0].item() / sums[2].item(), math.sqrt(sums[1].item()) / sums[2].item()
        scale_gradients(parameters, min(1.0, 1.0 / norm) / sums[2].item())
        optimizer.step()
        optimizer.zero_grad()
        told.append((loss, norm))
    return told, model_cut


@dataclass(frozen=True)
class Seen:
    """`matrices` and `norms` are the bytes of them on this rank, in float32; `logits` those of a sequence of 13 positions."""

    doubles: Told
    singles: Told
    logits: torch.Tensor
    matrices: int
    norms: int


def train_here(*, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection, steps: tuple[int, int]) -> Seen:
    world = world_of(world_size)
    # Adam's first step is lr * sign(gradient) but for eps: with 1e-8 rounding decides the sign of the smallest. Four layers of rich-untied
    # in float32 on one process are then 3e-6 in the second norm from float64, and 6e-6 from tp2; with 1e-4 they are 2e-8 and 7e-8.
    singles, _ = train(section, parallel, world=world, num_steps=steps[1], eps=1e-4)
    torch.set_default_dtype(torch.float64)
    doubles, model_cut = train(section, parallel, world=world, num_steps=steps[0])
    atom = atom_of(99, 0)
    logits = model_cut.runner.logits(atom.tokens_BS[:, :13], atom.positions_BS[:, :13], atom.doc_ids_BS[:, :13])
    parameters = list(model_cut.module.parameters())
    matrices, norms = (
        [local(parameter).numel() * 4 for parameter in parameters if (parameter.dim() > 1) is wide] for wide in (True, False)
    )
    return Seen(doubles, singles, logits, sum(matrices), sum(norms))


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def compare(ranks: Sequence[Seen], alone: Seen, *, parallel: ParallelSection) -> None:
    for seen in ranks:
        assert seen.doubles[0] == pytest.approx(alone.doubles[0], rel=1e-12, abs=0)  # before anything has grown
        for told, wanted, tolerance in ((seen.doubles, alone.doubles, 1e-9), (seen.singles, alone.singles, 1e-6)):
            for (loss, norm), (loss_alone, norm_alone) in zip(told, wanted, strict=True):
                assert loss == pytest.approx(loss_alone, rel=tolerance, abs=0)
                assert norm == pytest.approx(norm_alone, rel=tolerance, abs=0)
        assert seen.logits.shape == alone.logits.shape
        torch.testing.assert_close(seen.logits, alone.logits, rtol=0, atol=1e-9)
    if parallel.pp == 1:
        assert sum(seen.matrices for seen in ranks) == parallel.dp_replicate * alone.matrices
        assert sum(seen.norms for seen in ranks) == parallel.dp_replicate * parallel.tp * alone.norms
        assert max(seen.matrices for seen in ranks) <= 1.05 * alone.matrices * parallel.dp_replicate / parallel.num_ranks


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("tp2", "plain-tied"),
        ("tp4", "rich-untied"),
        ("tp2-fsdp2", "uneven-tied"),
        ("tp2-copies2", "rich-tied"),
        ("cp2", "rich-untied"),
        ("cp4", "plain-tied"),
        ("cp2-tp2", "rich-tied"),
        ("cp2-fsdp2", "uneven-tied"),
    ],
)
def test_losses_norms_and_logits_are_those_of_one_process(run_ranks: RunRanks, layout: str, kind: str) -> None:
    section, parallel = SECTIONS[kind], LAYOUTS[layout]
    (alone,) = run_ranks(train_here, 1, section=section, parallel=ParallelSection(), steps=(5, 3))
    compare(run_ranks(train_here, parallel.num_ranks, section=section, parallel=parallel, steps=(5, 3)), alone, parallel=parallel)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_every_model_stays_with_one_process(run_ranks: RunRanks, layout: str, kind: str) -> None:
    section, parallel = SECTIONS[kind], LAYOUTS[layout]
    if parallel.tp == 4 and section.d_ff % 4:
        pytest.skip("four ranks cannot share this width: refused before any process starts")
    if parallel.pp_schedule == "zero_bubble":
        section = replace(section, num_layers=4)  # two pieces on each rank
    (alone,) = run_ranks(train_here, 1, section=section, parallel=ParallelSection(), steps=(20, 3))
    ranks = run_ranks(train_here, parallel.num_ranks, section=section, parallel=parallel, steps=(20, 3))
    compare(ranks, alone, parallel=parallel)
    held = [seen.matrices + seen.norms for seen in ranks]
    print(f"\n{layout} {kind}: bytes of parameters per rank {held} of {alone.matrices + alone.norms}")


def collectives_of(*, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection) -> dict[str, int]:
    """Of the second step, so that torch has set up. Two atoms, the first a phantom: every rank sends the same for any."""
    model_cut = cut_here(section, parallel, world=world_of(world_size))
    atoms = [atom_of(0, ATOMS_PER_STEP[0]), atom_of(0, 0)]
    model_cut.runner.run(atoms, start=lambda _: None, loss=partial(loss_of, z_loss=section.z_loss))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model_cut.runner.run(atoms, start=lambda _: None, loss=partial(loss_of, z_loss=section.z_loss))
    return {event.key.removeprefix("c10d::"): event.count for event in profiled.key_averages() if event.key.startswith("c10d::")}


@pytest.mark.parametrize(("parallel", "kind"), [(TP2, "rich-tied"), (CP2, "rich-untied"), (replace(CP2, tp=2), "plain-tied")])
def test_a_layer_sends_its_positions_its_keys_and_nothing_else(run_ranks: RunRanks, parallel: ParallelSection, kind: str) -> None:
    section, num_atoms = SECTIONS[kind], 2
    wanted = dict.fromkeys(("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_"), 0)
    wanted |= dict.fromkeys(("_allgather_base_", "_reduce_scatter_base_"), 0)
    if parallel.tp > 1:
        # Positions: into and out of attention and feed-forward, out of the embedding, into the head; the other way in the backward.
        wanted["allgather_into_tensor_coalesced_"] = wanted["reduce_scatter_tensor_coalesced_"] = num_atoms * (4 * NUM_LAYERS + 2)
        num_norms = (4 if section.qk_norm else 2) * NUM_LAYERS + 1
        wanted["allreduce_"] = num_atoms * (num_norms + 2)  # of the loss: the largest logit, then the sums
    if parallel.cp > 1:
        num_units = NUM_LAYERS + (1 if section.tie_embeddings else 3)
        wanted["_allgather_base_"] = num_atoms * ((2 * num_units - 1) + 1 + NUM_LAYERS)  # parameters; documents; keys with values
        wanted["_reduce_scatter_base_"] = num_atoms * (num_units + NUM_LAYERS)
    for seen in run_ranks(collectives_of, parallel.num_ranks, section=section, parallel=parallel):
        assert seen == {name: count for name, count in wanted.items() if count}


def first_values(*, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection) -> dict[str, int]:
    """Digests of the boxes that this rank is the first to hold, after comparing each with what one process starts from."""
    whole = build_model(section, VOCAB_SIZE, seed=3)
    materialise(whole, seed=3, device=CPU)
    digests: dict[str, int] = {}
    for name, parameter in cut_here(section, parallel, world=world_of(world_size)).module.named_parameters():
        assert isinstance(parameter, DTensor)
        values = whole.get_parameter(name)
        assert torch.equal(parameter.full_tensor(), values), name
        sizes, offsets = local_box(parameter)
        box = values[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        assert torch.equal(parameter.to_local(), box), name
        copies = [
            axis
            for axis, placement in zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
            if placement.is_replicate()
        ]
        digests[name] = 0 if any(copies) else tensor_digest(parameter)
    return digests


@pytest.mark.parametrize(
    "parallel", [replace(TP2, dp_shard=2), replace(TP2, dp_replicate=2), replace(CP2, tp=2)], ids=["fsdp", "copies", "cp"]
)
def test_every_rank_starts_with_one_box_of_what_one_process_starts_from(run_ranks: RunRanks, parallel: ParallelSection) -> None:
    section = replace(UNEVEN, tie_embeddings=False)
    whole = build_model(section, VOCAB_SIZE, seed=3)
    materialise(whole, seed=3, device=CPU)
    parts = run_ranks(first_values, 4, section=section, parallel=parallel)
    for name, parameter in whole.named_parameters():
        assert combine(part[name] for part in parts) == tensor_digest(parameter.detach()), name


def in_bf16(*, rank: int, world_size: int, parallel: ParallelSection) -> tuple[float, torch.dtype]:
    model_cut = cut_here(RICH, parallel, world=world_of(world_size), precision="bf16")
    nats = model_cut.runner.run([atom_of(0, 0)], start=lambda _: None, loss=partial(loss_of, z_loss=RICH.z_loss))
    assert all(parameter.grad is not None and local(parameter.grad).dtype == torch.float32 for parameter in model_cut.module.parameters())
    assert all(local(parameter.grad).isfinite().all() for parameter in model_cut.module.parameters() if parameter.grad is not None)
    return nats.item(), model_cut.runner.logits(*[ids[:1, :1] for ids in (atom_of(0, 0).tokens_BS,) * 3]).dtype


@pytest.mark.parametrize("parallel", [TP2, CP2], ids=["tp", "cp"])
def test_bf16_stays_near_one_process(run_ranks: RunRanks, parallel: ParallelSection) -> None:
    ((alone, _),) = run_ranks(in_bf16, 1, parallel=ParallelSection())
    told = run_ranks(in_bf16, 2, parallel=parallel)
    total = sum(nats for nats, _ in told) if parallel.cp > 1 else told[0][0]
    assert total == pytest.approx(alone, rel=5e-3)  # 8 bits of significand
    assert total != alone


class Foreign(nn.Module):
    """A model of somebody else, who did not say how it may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


def refused(*, rank: int, world_size: int, parallel: ParallelSection) -> str:
    model = Foreign()
    with pytest.raises(ConfigError) as raised:
        cut(
            model,
            place_of(parallel, rank=rank, world_size=world_size),
            plan=cut_plan(model),
            parallel=parallel,
            materialise=lambda _: None,
            world=world_of(world_size),
            autocast=autocast_context("fp32", CPU),
            collective_limit_s=60.0,
        )
    return str(raised.value.where)


def test_a_model_that_does_not_say_how_is_refused(run_ranks: RunRanks) -> None:
    assert run_ranks(refused, 2, parallel=TP2) == ["[parallel] tp"] * 2
    assert run_ranks(refused, 2, parallel=CP2) == ["[parallel] cp"] * 2
