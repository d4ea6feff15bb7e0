"""Every layout on 2 and 4 ranks against one process: losses, norms and logits; what each rank holds, and what it sends.

A row trains the same model in float64 and in float32, then looks at one step with the profiler. What a layout must hold and send is said by
`promised`, so one that silently falls back to whole tensors or to no exchange fails. Each row prints its bytes, collectives and distances:

    pytest -m campaign tests/ranks/test_matrix.py -s
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from surefoot.core.layouts import LAYOUT_AXES, pipeline_chunks, refusals
from surefoot.core.sections import DataSection, ModelSection, OptimizerSection, ParallelSection, RunConfig
from surefoot.guard.counting import agree_dealt
from surefoot.model.loss import loss_of
from surefoot.monitor.gradients import counted_gradients, squared_norm_and_nonfinite
from surefoot.parallel.clip import scale_gradients
from surefoot.parallel.cut import Cut
from surefoot.tensors.world import World
from surefoot.train.optimizers import build_optimizer
from tests.ranks.cutting import cut_model, local, world_of
from tests.ranks.documents import ATOMS_PER_STEP, SEQ_LEN, VOCAB_SIZE, atom_of, atoms_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
NUM_STEPS = {torch.float64: 20, torch.float32: 3}
NUM_STEPS_IN_CI = {torch.float64: 4, torch.float32: 3}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
EPS = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Adam's first step is lr * sign(gradient) but for eps: with 1e-8 rounding decides the sign of the smallest. One process is then 3e-6 off
its own float64 in the second norm, and tp2 is 6e-6 off that; with 1e-4 they are 2e-8 and 7e-8."""
ATOMS_SEEN = 4
"""Of the step under the profiler, on each data rank: as many as the longest pipeline here has stages."""

PLAIN = ModelSection(num_layers=2, d_model=32, num_heads=8, num_kv_heads=4, d_ff=44, init_std=0.1, tie_embeddings=True)
RICH = replace(PLAIN, tie_embeddings=False, qk_norm=True, window=6, attention_soft_cap=10.0, logit_soft_cap=15.0, z_loss=1e-3)
MODELS = {
    "plain-tied": PLAIN,
    "rich-untied": RICH,
    "uneven-tied": replace(PLAIN, d_ff=22, qk_norm=True),  # 11 rows of w1 on a rank of tp = 2: not to be halved
    "rich-tied": replace(RICH, tie_embeddings=True),
}


@dataclass(frozen=True)
class Row:
    parallel: ParallelSection
    model: str

    @property
    def section(self) -> ModelSection:
        """At least one layer for each piece of a pipeline."""
        model, parallel = MODELS[self.model], self.parallel
        return replace(model, num_layers=max(model.num_layers, parallel.pp * pipeline_chunks(parallel) if parallel.pp > 1 else 0))

    @property
    def factors(self) -> dict[str, Any]:
        """What is said of the layout, without what has no effect on it."""
        parallel = self.parallel
        stage = {"stage": parallel.zero_stage if parallel.dp_shard * parallel.cp > 1 else 0}
        schedule = {"schedule": parallel.pp_schedule if parallel.pp > 1 else ""}
        axes = {axis: getattr(parallel, axis) for axis in LAYOUT_AXES}
        return {**axes, **stage, **schedule, "recompute": parallel.recompute, "model": self.model}

    @property
    def meetings(self) -> set[tuple[Any, ...]]:
        """Any two things that are at work together, and the mesh."""
        at_work = [(name, value > 1 if name in LAYOUT_AXES else value) for name, value in self.factors.items()]
        return {*itertools.combinations(at_work, 2), tuple(self.factors[axis] for axis in LAYOUT_AXES)}

    def __str__(self) -> str:
        said = self.factors
        axes = [f"{axis.removeprefix('dp_')}{said[axis]}" for axis in LAYOUT_AXES if said[axis] > 1]
        stage = [f"stage{said['stage']}"] if said["stage"] in (1, 2) else []
        return "-".join([*axes, *stage, *filter(None, [said["schedule"]]), f"{said['recompute']}-recompute", self.model])


@cache
def every_row() -> tuple[Row, ...]:
    """Every legal layout of 2 and 4 ranks, under every model here."""
    found: dict[tuple[Any, ...], Row] = {}
    sizes = [shape for shape in itertools.product((1, 2, 4), repeat=len(LAYOUT_AXES)) if math.prod(shape) in (2, 4)]
    schedules, stages, modes = ("1f1b", "interleaved", "zero_bubble"), (3, 1, 2), ("none", "selective", "full")
    for shape, schedule, stage, recompute, model in itertools.product(sizes, schedules, stages, modes, MODELS):
        settings: dict[str, Any] = dict(zip(LAYOUT_AXES, shape, strict=True))
        settings |= {"pp_schedule": schedule, "zero_stage": stage, "recompute": recompute}
        row = Row(ParallelSection(**settings), model)
        key = tuple(row.factors.values())
        if key not in found and not refusals(RunConfig(model=row.section, data=DataSection(seq_len=SEQ_LEN), parallel=row.parallel)):
            found[key] = row
    return tuple(found.values())


def layouts_of_models() -> list[Row]:
    """Every layout under every model once, with one way of recomputing after the other; then other numbers of ranks and of pieces."""
    groups: dict[Any, list[Row]] = {}
    for row in every_row():
        groups.setdefault(tuple(value for name, value in row.factors.items() if name != "recompute"), []).append(row)
    others = [ParallelSection(pp=3), ParallelSection(dp_shard=3), ParallelSection(dp_replicate=3)]
    others += [ParallelSection(pp=2, pp_schedule="interleaved", pp_chunks=3), ParallelSection(pp=2, pp_schedule="zero_bubble", pp_chunks=3)]
    return [rows[index % len(rows)] for index, rows in enumerate(groups.values())] + [Row(other, "rich-untied") for other in others]


def covering_rows() -> list[Row]:
    """A few among which all meetings are: the one that has most new ones, again and again."""
    meetings = {row: row.meetings for row in every_row()}
    missing = set().union(*meetings.values())
    chosen: list[Row] = []
    while missing:
        chosen.append(max(meetings, key=lambda row: len(meetings[row] & missing)))
        missing -= meetings[chosen[-1]]
    return chosen


Told = list[tuple[float, float]]
"""Per step (loss, norm of the mean gradient)."""


@dataclass(frozen=True)
class Seen:
    """By one rank. `held` are its elements of each parameter; `sent` how often each collective ran in one step."""

    told: dict[torch.dtype, Told]
    logits: torch.Tensor
    held: dict[str, int]
    sent: dict[str, int]


def train(section: ModelSection, parallel: ParallelSection, dtype: torch.dtype, *, world: World, num_steps: int) -> tuple[Told, Cut]:
    """As our own step does it: sums over live tokens, clipped by the global norm."""
    model_cut = cut_model(section, parallel, world=world, vocab_size=VOCAB_SIZE, dtype=dtype)
    place, parameters = model_cut.place, list(model_cut.module.parameters())
    optimizer = build_optimizer(model_cut.module, OptimizerSection(lr=0.001, eps=EPS[dtype]))
    dealt = agree_dealt(model_cut.module, optimizer, world=world)
    told: Told = []
    for step in range(num_steps):
        atoms = atoms_of(step, data_rank=place.data_rank, num_data_ranks=place.num_data_ranks)
        started: set[int] = set()
        nats = model_cut.runner.run(atoms, start=lambda atom: started.add(atom.atom), loss=partial(loss_of, z_loss=section.z_loss))  # noqa: B023
        assert started == {atom.atom for atom in atoms}
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


def train_here(
    *, rank: int, world_size: int, section: ModelSection, parallel: ParallelSection, num_steps: Mapping[torch.dtype, int]
) -> Seen:
    world = world_of(world_size)
    told: dict[torch.dtype, Told] = {}
    for dtype in (torch.float32, torch.float64):
        told[dtype], model_cut = train(section, parallel, dtype, world=world, num_steps=num_steps[dtype])
    held = {name: local(parameter).numel() for name, parameter in model_cut.module.named_parameters()}
    sent = collectives_of(model_cut, z_loss=section.z_loss)
    atom = atom_of(99, 0)
    logits = model_cut.runner.logits(atom.tokens_BS[:, :13], atom.positions_BS[:, :13], atom.doc_ids_BS[:, :13])
    return Seen(told, logits, held, sent)


def collectives_of(model_cut: Cut, *, z_loss: float) -> dict[str, int]:
    """Of one more step. Its last atom is a phantom: every rank sends the same for any."""
    atoms = [atom_of(0, index) for index in range(ATOMS_SEEN - 1)] + [atom_of(0, ATOMS_PER_STEP[0])]
    model_cut.runner.run(atoms, start=lambda _: None, loss=partial(loss_of, z_loss=z_loss))  # a pipeline sets up for so many atoms
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model_cut.runner.run(atoms, start=lambda _: None, loss=partial(loss_of, z_loss=z_loss))
    return {event.key.removeprefix("c10d::"): event.count for event in profiled.key_averages() if event.key.startswith("c10d::")}


@dataclass(frozen=True)
class Stage:
    """What a rank computes, by the names of its parameters."""

    num_blocks: int
    num_norms: int
    num_units: int
    has_first: bool
    has_last: bool

    @classmethod
    def of(cls, names: Collection[str], section: ModelSection) -> Stage:
        blocks = {name.split(".")[1] for name in names if name.startswith("blocks.")}
        has_first, has_last = "blocks.0.attention_norm.weight" in names, "norm.weight" in names
        # gathered together: each block; the embedding; the head; and what is left over, the last norm, with a tied embedding
        left_over = max(has_first, has_last) if section.tie_embeddings else has_last
        ends = 0 if section.tie_embeddings else has_first + has_last
        norms = [name for name in names if name.endswith("norm.weight")]
        return cls(len(blocks), len(norms), len(blocks) + ends + left_over, has_first, has_last)


Counts = dict[str, tuple[int, int]]
"""How often each collective runs at least and at most."""


def promised(row: Row, names: Collection[str]) -> Counts:
    """Of one step of `ATOMS_SEEN` atoms, on a rank with the parameters `names`. docs/layouts.md says the same in words."""
    parallel = row.parallel
    stage = Stage.of(names, row.section)
    counts: Counter[str] = Counter()
    spare: Counter[str] = Counter()
    reductions = ATOMS_SEEN if parallel.pp == 1 and parallel.zero_stage > 1 else 1
    if parallel.dp_replicate == parallel.num_ranks:
        return {"allreduce_": (1, 1)}  # one bucket
    if parallel.dp_replicate > 1:
        counts["allreduce_"] += stage.num_units
    if parallel.dp_shard * parallel.cp > 1:
        least, most = gathers_of_units(parallel, stage)
        counts["_allgather_base_"] += least
        spare["_allgather_base_"] += most - least
        counts["_reduce_scatter_base_"] += reductions * stage.num_units
    if parallel.tp > 1:
        # Positions: into and out of attention and feed-forward, out of the embedding, into the head; the other way in the backward. A block
        # that is computed again gathers again, and stops before it has to scatter what comes out of it.
        again = parallel.recompute != "none"
        ends = stage.has_first + stage.has_last
        counts["allgather_into_tensor_coalesced_"] += ATOMS_SEEN * ((4 + 2 * again) * stage.num_blocks + ends)
        counts["reduce_scatter_tensor_coalesced_"] += ATOMS_SEEN * ((4 + again) * stage.num_blocks + ends)
        # Norms see a part of the positions. Of the loss: the largest logit, then the sums.
        counts["allreduce_"] += (ATOMS_SEEN if parallel.zero_stage > 1 and parallel.pp == 1 else 1) * stage.num_norms
        counts["allreduce_"] += ATOMS_SEEN * 2 * stage.has_last
    if parallel.cp > 1:
        # Keys with values in each attention, and documents in each piece. Selective recomputation is a dispatch mode, under which the
        # profiler sees an operator twice.
        num_pieces = pipeline_chunks(parallel) if parallel.pp > 1 else 1
        seen = {"none": 1, "full": 2, "selective": 4}[parallel.recompute]
        counts["_allgather_base_"] += ATOMS_SEEN * (num_pieces + seen * stage.num_blocks)
        counts["_reduce_scatter_base_"] += ATOMS_SEEN * stage.num_blocks
    if parallel.pp > 1:
        tied = row.section.tie_embeddings and (stage.has_first or stage.has_last)
        num_sent = ATOMS_SEEN * (2 * pipeline_chunks(parallel) - stage.has_first - stage.has_last) + tied
        counts["send"] += num_sent
        counts["recv_"] += num_sent
    return {name: (number, number + spare[name]) for name, number in counts.items() if number}


def gathers_of_units(parallel: ParallelSection, stage: Stage) -> tuple[int, int]:
    """At least and at most. What is left over is gathered once and stays; under stages 1 and 2, and zero_bubble, so does everything."""
    num_units = stage.num_units
    if parallel.zero_stage < 3 or parallel.pp_schedule == "zero_bubble":
        return num_units, num_units
    if parallel.pp == 1:
        return ATOMS_SEEN * (2 * num_units - 1), ATOMS_SEEN * (2 * num_units - 1)
    # A forward frees what it used; a backward of a pipeline does not, so the next forward finds it.
    return num_units + stage.num_blocks, 2 * ATOMS_SEEN * num_units


_ALONE: dict[tuple[ModelSection, bool], Seen] = {}
"""What one process said, once for all layouts."""


def against_one_process(run_ranks: RunRanks, row: Row, *, in_ci: bool) -> None:
    num_steps = NUM_STEPS_IN_CI if in_ci else NUM_STEPS
    section, parallel = row.section, row.parallel
    if (section, in_ci) not in _ALONE:
        (_ALONE[section, in_ci],) = run_ranks(train_here, 1, section=section, parallel=ParallelSection(), num_steps=num_steps)
    alone = _ALONE[section, in_ci]
    ranks: list[Seen] = run_ranks(train_here, parallel.num_ranks, section=section, parallel=parallel, num_steps=num_steps)
    distances = {dtype: max(distance(seen.told[dtype], alone.told[dtype]) for seen in ranks) for dtype in TOLERANCE}
    held = "/".join(str(4 * sum(seen.held.values())) for seen in ranks)
    sent = " ".join(f"{name.strip('_')} {number}" for name, number in sorted(ranks[-1].sent.items()))
    doubles, singles = distances[torch.float64], distances[torch.float32]
    print(f"\n{row!s:<62} {doubles:8.1e} {singles:8.1e}  {held} of {4 * sum(alone.held.values())}  {sent}")
    for dtype, tolerance in TOLERANCE.items():
        assert distances[dtype] <= tolerance
    for seen in ranks:
        assert all(told == ranks[0].told[dtype] for dtype, told in seen.told.items())
        torch.testing.assert_close(seen.logits, alone.logits, rtol=0, atol=1e-9)
        check_sent(seen.sent, promised(row, seen.held))
    check_held(row, [seen.held for seen in ranks], whole=alone.held)


def distance(told: Told, wanted: Told) -> float:
    """The largest relative difference of a loss or a norm."""
    assert len(told) == len(wanted)
    assert all(map(math.isfinite, itertools.chain.from_iterable(told)))
    return max(abs(one / other - 1.0) for step, same in zip(told, wanted, strict=True) for one, other in zip(step, same, strict=True))


def check_sent(sent: Mapping[str, int], promise: Counts) -> None:
    assert sent.keys() == promise.keys(), (sent, promise)
    for name, (least, most) in promise.items():
        assert least <= sent[name] <= most, (name, sent, promise)


def check_held(row: Row, held: Sequence[Mapping[str, int]], *, whole: Mapping[str, int]) -> None:
    """Every element is on as many ranks as there are copies of it, and no rank has much more than its share of what its stage has."""
    parallel = row.parallel
    shares = parallel.dp_shard * parallel.cp
    for name, num_elements in whole.items():
        copies = parallel.dp_replicate * (parallel.tp if name.endswith("norm.weight") else 1)
        at_both_ends = parallel.pp > 1 and row.section.tie_embeddings and name == "embed.weight"
        assert sum(names.get(name, 0) for names in held) == num_elements * copies * (1 + at_both_ends), name
    for names in held:
        fair = sum(whole[name] / shares / (1 if name.endswith("norm.weight") else parallel.tp) for name in names)
        assert sum(names.values()) <= 1.1 * fair


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not as decorators: every rank imports this file, and has no need of all rows."""
    rows_of = {"covering": covering_rows, "layout": layouts_of_models}
    for name in rows_of.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, rows_of[name](), ids=str)


def test_a_layout_is_one_process_shared_out(run_ranks: RunRanks, covering: Row) -> None:
    against_one_process(run_ranks, covering, in_ci=True)


@pytest.mark.campaign
def test_every_layout_is_one_process_shared_out(run_ranks: RunRanks, layout: Row) -> None:
    against_one_process(run_ranks, layout, in_ci=False)


def test_a_fallback_would_be_seen() -> None:
    """The control: what one layout sends and holds is not what another promises."""
    row, other = Row(ParallelSection(dp_shard=2), "plain-tied"), Row(ParallelSection(dp_shard=2, zero_stage=1), "plain-tied")
    names = {"embed.weight": 4, "norm.weight": 2, "blocks.0.attention_norm.weight": 2}
    sent = {name: least for name, (least, _) in promised(row, names).items()}
    check_sent(sent, promised(row, names))
    with pytest.raises(AssertionError):
        check_sent(sent, promised(other, names))
    check_held(row, [{name: number // 2 for name, number in names.items()}] * 2, whole=names)
    with pytest.raises(AssertionError):
        check_held(row, [names] * 2, whole=names)
