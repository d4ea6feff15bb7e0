"""What the planner says a rank holds against what it does hold: parameters, gradients and moments by their storages, activations by what
autograd saves. Every rank trains one step of each model under each layout of two ranks, and alone.

    pytest -m campaign tests/ranks/test_planned_memory.py -s
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from surefoot.core.layouts import pipeline_chunks
from surefoot.core.model_sizes import resolve_sizes
from surefoot.core.sections import ModelSection, OptimizerSection, ParallelSection
from surefoot.model.loss import loss_of
from surefoot.parallel.cut import Cut
from surefoot.plan.memory.estimate import Memory, estimate
from surefoot.plan.memory.implementations import SUREFOOT_BF16, SUREFOOT_ON_CPU
from surefoot.plan.records import FP32, Layout, Workload
from surefoot.tensors.batch import Batch
from surefoot.tensors.world import World, single_world
from surefoot.train.optimizers import build_optimizer
from tests.ranks.cutting import cut_model, world_of
from tests.ranks.holding import Alive, Saved, storage_of

RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")
VOCAB_SIZE = 500
SEQ_LEN = 32
NUM_ATOMS = 3
TOLERANCE = 0.05

PLAIN = ModelSection(num_layers=4, d_model=64, num_heads=4, d_ff=176, tie_embeddings=True)
MODELS = {
    "plain-tied": PLAIN,
    "plain-untied": replace(PLAIN, tie_embeddings=False),
    "grouped": replace(PLAIN, num_heads=8, num_kv_heads=2, tie_embeddings=False),
    "head-norms": replace(PLAIN, num_heads=8, num_kv_heads=4, qk_norm=True, tie_embeddings=False),
    "wide": replace(PLAIN, d_model=96, d_ff=512, tie_embeddings=False),
    "deep": replace(PLAIN, num_layers=7, num_kv_heads=2),
}
LAYOUTS = {
    "alone": ParallelSection(),
    "shard2": ParallelSection(dp_shard=2),
    "tp2": ParallelSection(tp=2),
    "pp2": ParallelSection(pp=2),
}
MORE_LAYOUTS = {
    "shard2-full": ParallelSection(dp_shard=2, recompute="full"),
    "pp2-full": ParallelSection(pp=2, recompute="full"),
    "replicate2": ParallelSection(dp_replicate=2),
    "cp2": ParallelSection(cp=2),
    "tp2-full": ParallelSection(tp=2, recompute="full"),
    "interleaved2": ParallelSection(pp=2, pp_schedule="interleaved", pp_chunks=2),
}


@dataclass(frozen=True)
class Row:
    model: str
    layout: str
    precision: str = "fp32"

    @property
    def section(self) -> ModelSection:
        return MODELS[self.model]

    @property
    def parallel(self) -> ParallelSection:
        return {**LAYOUTS, **MORE_LAYOUTS}[self.layout]


@dataclass(frozen=True)
class Held:
    """Bytes on one rank. `saved`: the most that autograd had saved at once, without parameters."""

    stage: int
    parameters: int
    gradients: int
    optimizer: int
    saved: int


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def atom_of(index: int) -> Batch:
    tokens_BS = torch.randint(0, VOCAB_SIZE, (2, SEQ_LEN), generator=torch.Generator().manual_seed(index))
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=tokens_BS.roll(-1, dims=1),
        positions_BS=torch.arange(SEQ_LEN).expand(2, SEQ_LEN).contiguous(),
        doc_ids_BS=torch.zeros(2, SEQ_LEN, dtype=torch.int64),
        sample_ids_B=torch.arange(2),
        num_live_tokens=2 * SEQ_LEN,
        atom=index,
    )


def autocast_of(precision: str) -> Any:
    return nullcontext() if precision == "fp32" else torch.autocast("cpu", dtype=torch.bfloat16)


def cut_of(row: Row, *, world: World) -> tuple[Cut, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """The model, its optimizer, and what computes a step."""
    here = single_world(CPU) if row.parallel.num_ranks == 1 else world
    made = cut_model(row.section, row.parallel, world=here, vocab_size=VOCAB_SIZE, autocast=autocast_of(row.precision))
    step = partial(made.runner.run, [atom_of(index) for index in range(NUM_ATOMS)], start=lambda _: None, loss=loss_of)
    return made, build_optimizer(made.module, OptimizerSection(lr=0.001)), step


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]


def held_by_rank(row: Row, *, world: World) -> Held:
    made, optimizer, step = cut_of(row, world=world)
    parameters = list(made.module.parameters())
    with Saved(made.module).watching() as saved:
        step()
    gradients = bytes_of(parameter.grad for parameter in parameters if parameter.grad is not None)
    optimizer.step()
    return Held(made.place.coordinates["pp"], bytes_of(parameters), gradients, bytes_of(moments_of(optimizer)), saved.peak)


def hold_all(*, rank: int, world_size: int, rows: list[Row]) -> list[Held]:
    world = world_of(world_size)
    return [held_by_rank(row, world=world) for row in rows]


def planned(row: Row, *, stage: int, section: ModelSection | None = None) -> Memory:
    parallel = row.parallel
    layout = Layout(
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        dp_shard=parallel.dp_shard,
        dp_replicate=parallel.dp_replicate,
        pp_schedule=parallel.pp_schedule,
        pp_chunks=pipeline_chunks(parallel) if parallel.pp > 1 else 1,
        recompute=parallel.recompute,
        micro_batch_size=2,
    )
    workload = Workload(
        resolve_sizes(section or row.section, VOCAB_SIZE),
        seq_len=SEQ_LEN,
        global_batch_size=2 * NUM_ATOMS * layout.data_ranks,
        dtypes=FP32 if row.precision == "fp32" else SUREFOOT_BF16,
    )
    return estimate(workload, layout, stage=stage, implementation=SUREFOOT_ON_CPU)


def alive_by_plan(memory: Memory) -> float:
    """What stays until the backward: of a logit, fewer bytes than at the peak."""
    kept, peak = SUREFOOT_ON_CPU.logit_bytes
    logits = memory.logits_and_loss * kept / peak
    return memory.activations + memory.embedding_and_head + memory.cast_weights + logits


def saved_by_plan(row: Row, memory: Memory) -> float:
    """Tables of positions and the mask, which a block is computed again with, are alive but in a closure of torch's, not saved."""
    if row.parallel.recompute == "none":
        return alive_by_plan(memory)
    tokens, num_alive = 2 * SEQ_LEN, row.parallel.pp - memory.stage
    return alive_by_plan(memory) - num_alive * tokens * (4 * resolve_sizes(row.section, VOCAB_SIZE).head_dim + SEQ_LEN)


def compared(row: Row, held: Held, *, section: ModelSection | None = None) -> dict[str, float]:
    """Planned over held, minus 1."""
    memory = planned(row, stage=held.stage, section=section)
    pairs = {
        "parameters": (memory.parameters, held.parameters),
        "gradients": (memory.gradients, held.gradients),
        "optimizer": (memory.optimizer, held.optimizer),
        "saved": (saved_by_plan(row, memory), held.saved),
    }
    return {name: told / found - 1.0 for name, (told, found) in pairs.items()}


def check(rows: list[Row], ranks: list[list[Held]]) -> None:
    errors = {(row, rank): compared(row, held[index]) for rank, held in enumerate(ranks) for index, row in enumerate(rows)}
    for (row, rank), error in errors.items():
        print(f"{row.model:<14}{row.layout:<14}{row.precision} rank {rank}", *(f"{name} {value:+.1%}" for name, value in error.items()))
    for (row, rank), error in errors.items():
        for name, value in error.items():
            assert abs(value) <= TOLERANCE, f"{name} of {row} on rank {rank}: {value:+.1%}"


@pytest.mark.campaign
def test_six_models_hold_what_is_planned_under_four_layouts(run_ranks: RunRanks) -> None:
    rows = [Row(model, layout) for model, layout in itertools.product(MODELS, LAYOUTS)]
    rows += [Row("grouped", "shard2", "bf16"), Row("grouped", "tp2", "bf16"), Row("deep", "pp2-full"), Row("wide", "shard2-full")]
    ranks = run_ranks(hold_all, 2, rows=rows)
    check(rows, ranks)
    # The control: the same counting with as many key heads as query heads is not within the tolerance of a model with fewer.
    held = ranks[0][rows.index(Row("grouped", "alone"))]
    wrong = compared(Row("grouped", "alone"), held, section=replace(MODELS["grouped"], num_kv_heads=8))
    assert wrong["parameters"] > TOLERANCE
    assert wrong["saved"] > TOLERANCE


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_every_model_layout_and_precision(run_ranks: RunRanks) -> None:
    rows = [Row(*names) for names in itertools.product(MODELS, {**LAYOUTS, **MORE_LAYOUTS}, ("fp32", "bf16"))]
    check(rows, run_ranks(hold_all, 2, timeout_s=400.0, rows=rows))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_is_alive_after_a_forward_is_what_is_planned(recompute: Any, precision: str) -> None:
    """What is computed again under "selective" is kept by torch outside of autograd."""
    row = Row("grouped", "alone", precision)
    made = cut_model(row.section, ParallelSection(recompute=recompute), world=single_world(CPU), vocab_size=VOCAB_SIZE)
    atom = atom_of(0)
    with Alive() as alive, autocast_of(precision):
        alive.remember(made.module.parameters())
        sums = loss_of(made.module(atom.tokens_BS, atom.positions_BS, atom.doc_ids_BS), atom)
    held = alive.num_bytes() - bytes_of(made.module.parameters())
    del sums
    sizes = resolve_sizes(row.section, VOCAB_SIZE)
    workload = Workload(sizes, SEQ_LEN, 2, dtypes=FP32 if precision == "fp32" else SUREFOOT_BF16)
    memory = estimate(workload, Layout(micro_batch_size=2, recompute=recompute), implementation=SUREFOOT_ON_CPU)
    assert alive_by_plan(memory) == pytest.approx(held, rel=TOLERANCE)


def peaks_of_all(*, rank: int, world_size: int, rows: list[Row]) -> list[tuple[int, int]]:
    """(stage, bytes) of the second step, when moments are there, in every tensor that an operator made."""
    world = world_of(world_size)
    found: list[tuple[int, int]] = []
    for row in rows:
        made, optimizer, step = cut_of(row, world=world)
        step()
        optimizer.step()
        optimizer.zero_grad()
        with Alive() as alive:
            alive.remember([*made.module.parameters(), *moments_of(optimizer)])
            step()
        found.append((made.place.coordinates["pp"], alive.peak))
    return found


def check_peaks(rows: list[Row], ranks: list[list[tuple[int, int]]]) -> None:
    """Exact alone and for whole copies. Where weights are sharded the plan counts the largest units gathered and reduced at the very moment
    when most activations are there, which at these sizes is up to a sixth too much; up to a third where pieces interleave, which have
    done all forwards of so few micro-batches before the first gradient is there."""
    for row, of_ranks in zip(rows, zip(*ranks, strict=True), strict=True):
        for stage, peak in of_ranks:
            over = planned(row, stage=stage).allocated / peak - 1.0
            print(f"{row.model:<14}{row.layout:<14}{row.precision} stage {stage} {over:+.1%}")
            exact, interleaved = row.layout in ("alone", "replicate2"), row.layout == "interleaved2"
            assert -0.02 <= over <= (0.02 if exact else 0.33 if interleaved else 0.17), row


def test_the_peak_of_all_tensors_is_not_above_the_plan_and_not_far_below(run_ranks: RunRanks) -> None:
    rows = [Row("grouped", layout) for layout in ("alone", "replicate2", "shard2", "tp2")] + [Row("grouped", "pp2", "bf16")]
    check_peaks(rows, run_ranks(peaks_of_all, 2, rows=rows))


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_peaks_of_more_layouts(run_ranks: RunRanks) -> None:
    rows = [Row(*names) for names in itertools.product(("grouped", "wide"), {**LAYOUTS, **MORE_LAYOUTS}, ("fp32", "bf16"))]
    check_peaks(rows, run_ranks(peaks_of_all, 2, timeout_s=400.0, rows=rows))
