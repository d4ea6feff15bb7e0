"""A checkpoint of any layout goes on under any other with the same bits: stages, shards, whole copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from surefoot.checkpoint.commit import save
from surefoot.checkpoint.prove import prove
from surefoot.checkpoint.restore import load
from surefoot.checkpoint.state import collect
from surefoot.checkpoint.verify import verify
from surefoot.core.errors import CheckpointError
from surefoot.core.records import Manifest
from surefoot.core.sections import ModelSection, OptimizerSection, ParallelSection
from surefoot.model.loss import loss_of
from surefoot.tensors.batch import Batch
from surefoot.tensors.world import World
from surefoot.train.optimizers import build_optimizer
from tests.ranks.cutting import cut_model, world_of

RunRanks = Callable[..., list[Any]]

CPU = torch.device("cpu")
VOCAB_SIZE = 92
SECTION = ModelSection(num_layers=4, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=False)
TIED = ModelSection(num_layers=4, d_model=24, num_heads=2, d_ff=20, init_std=0.1, tie_embeddings=True)


def draft(name: str) -> Manifest:
    return Manifest(
        format_version=1, id=name, run="test", step=10, attempt=1, generation=1, parent=None, time_utc="", loss=1.0, tokens=1,
        state_digest="", config_hashes={}, data_hash="", code_version="0", topology={}, environment={}, ledger_seq=1, ledger_hash="",
        cursor={}, files=(), tensors=(),
    )  # fmt: skip


def build(
    section: ModelSection, parallel: ParallelSection, world: World, *, seed: int, num_steps: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = cut_model(section, parallel, world=world, vocab_size=VOCAB_SIZE, seed=seed)
    optimizer = build_optimizer(made.module, OptimizerSection(lr=0.01))
    for step in range(num_steps):
        tokens_BS = torch.randint(0, VOCAB_SIZE, (1, 8), generator=torch.Generator().manual_seed(step))
        positions_BS = torch.arange(8)[None]
        atom = Batch(tokens_BS, tokens_BS.roll(-1, dims=1), positions_BS, 0 * positions_BS, torch.tensor([0]), num_live_tokens=8, atom=0)
        made.runner.run([atom, atom], start=lambda _: None, loss=loss_of)
        optimizer.step()
        optimizer.zero_grad()
    return made.module, optimizer


def save_as(*, rank: int, world_size: int, root: Path, section: ModelSection, parallel: ParallelSection) -> tuple[str, int]:
    """The digest, and the bytes of parameters and moments that this rank holds."""
    world = world_of(world_size)
    model, optimizer = build(section, parallel, world, seed=1, num_steps=2)
    state = collect(model, optimizer)
    manifest = save(root, draft("s10-a1"), state=state, extras={}, world=world)
    return manifest.state_digest, len(state.tensors)


def load_and_save_as(*, rank: int, world_size: int, root: Path, section: ModelSection, parallel: ParallelSection, name: str) -> str:
    """The digest of a save of what was loaded here."""
    world = world_of(world_size)
    model, optimizer = build(section, parallel, world, seed=2, num_steps=0)
    load(root / "s10-a1", state=collect(model, optimizer, for_load=True), world=world)
    return save(root, draft(name), state=collect(model, optimizer), extras={}, world=world).state_digest


LAYOUTS = {
    "one": ParallelSection(),
    "ddp2": ParallelSection(dp_replicate=2),
    "fsdp2": ParallelSection(dp_shard=2),
    "fsdp3": ParallelSection(dp_shard=3),
    "pp2": ParallelSection(pp=2),
    "pp4": ParallelSection(pp=4),
    "interleaved": ParallelSection(pp=2, pp_schedule="interleaved"),
    "pp2-fsdp2": ParallelSection(pp=2, dp_shard=2),
    "pp2-dp2": ParallelSection(pp=2, dp_replicate=2),
    "fsdp4": ParallelSection(dp_shard=4),
    "tp2": ParallelSection(tp=2),
    "tp2-fsdp2": ParallelSection(tp=2, dp_shard=2),
    "tp2-dp2": ParallelSection(tp=2, dp_replicate=2),
    "tp2-fsdp3": ParallelSection(tp=2, dp_shard=3),
    "cp2-tp2": ParallelSection(cp=2, tp=2),
    "pp2-tp2": ParallelSection(pp=2, tp=2),
}
WAYS: list[tuple[str, list[str], bool]] = [
    ("pp2", ["one", "fsdp2"], False),
    ("pp2-fsdp2", ["fsdp3"], True),
    ("interleaved", ["pp4"], False),
    ("one", ["pp2"], True),
    ("tp2-fsdp2", ["fsdp4", "one", "tp2"], True),
    ("pp2-tp2", ["fsdp3"], False),
]
MORE_WAYS: list[tuple[str, list[str], bool]] = [
    ("pp2", ["one", "fsdp2", "ddp2"], True),
    ("pp2-fsdp2", ["fsdp3", "pp2-dp2"], False),
    ("pp2-dp2", ["interleaved", "fsdp3"], True),
    ("interleaved", ["pp4", "one"], True),
    ("pp4", ["interleaved", "pp2-fsdp2"], False),
    ("fsdp3", ["pp4", "pp2-fsdp2"], True),
    ("one", ["pp2", "interleaved"], False),
    ("tp2-fsdp3", ["tp2-fsdp2", "fsdp3"], False),
    ("cp2-tp2", ["tp2-dp2", "fsdp4"], True),
    ("tp2-dp2", ["pp2-tp2", "one"], True),
    ("one", ["tp2", "cp2-tp2", "tp2-fsdp3"], False),
    ("pp2-tp2", ["cp2-tp2", "tp2-fsdp2"], True),
    ("fsdp3", ["pp2-tp2", "tp2"], False),
]


@pytest.mark.parametrize(("source", "targets", "tied"), WAYS)
def test_what_one_layout_saved_another_loads_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path, source: str, targets: list[str], tied: bool
) -> None:
    reshard(run_ranks, tmp_path, source, targets, tied=tied)


@pytest.mark.campaign
@pytest.mark.parametrize(("source", "targets", "tied"), MORE_WAYS)
def test_all_ways_from_layout_to_layout(run_ranks: RunRanks, tmp_path: Path, source: str, targets: list[str], tied: bool) -> None:
    reshard(run_ranks, tmp_path, source, targets, tied=tied)


def reshard(run_ranks: RunRanks, tmp_path: Path, source: str, targets: list[str], *, tied: bool) -> None:
    section = TIED if tied else SECTION
    told = run_ranks(save_as, LAYOUTS[source].num_ranks, root=tmp_path, section=section, parallel=LAYOUTS[source])
    digests = {digest for digest, _ in told}
    assert len(digests) == 1
    assert verify(tmp_path / "s10-a1") == []
    for number, target in enumerate(targets):
        again = run_ranks(
            load_and_save_as,
            LAYOUTS[target].num_ranks,
            root=tmp_path,
            section=section,
            parallel=LAYOUTS[target],
            name=f"s{20 + number}-a1",
        )
        assert set(again) == digests
        assert verify(tmp_path / f"s{20 + number}-a1") == []


@pytest.mark.campaign
def test_each_stage_holds_its_own_part_only_and_the_checkpoint_is_of_the_whole(run_ranks: RunRanks, tmp_path: Path) -> None:
    ((_, num_tensors),) = run_ranks(save_as, 1, root=tmp_path / "one", section=SECTION, parallel=LAYOUTS["one"])
    stages = run_ranks(save_as, 2, root=tmp_path / "two", section=SECTION, parallel=LAYOUTS["pp2"])
    assert sum(number for _, number in stages) == num_tensors
    assert len({digest for digest, _ in stages}) == 1
    for num_ranks in (1, 3):
        proof = prove(tmp_path / "two" / "s10-a1", num_ranks=num_ranks)
        assert proof.ok, proof.problems


def load_with_another_model(*, rank: int, world_size: int, root: Path, num_layers: int) -> list[str]:
    """What a load says to a model with another number of layers."""
    world = world_of(world_size)
    section = replace(SECTION, num_layers=num_layers)
    model, optimizer = build(section, LAYOUTS["pp2"], world, seed=2, num_steps=0)
    with pytest.raises(CheckpointError) as raised:
        load(root / "s10-a1", state=collect(model, optimizer, for_load=True), world=world)
    return [raised.value.what.split(" (")[0], raised.value.hint]


@pytest.mark.parametrize(("num_layers", "kind", "block"), [(3, "extra-tensor", 3), (5, "missing-tensor", 4)])
def test_what_no_rank_takes_and_what_no_rank_finds_is_named_on_all(
    run_ranks: RunRanks, tmp_path: Path, num_layers: int, kind: str, block: int
) -> None:
    """Tensors of the other stage are no difference: the first thing that is named is of the layer that only one side has."""
    run_ranks(save_as, 1, root=tmp_path, section=SECTION, parallel=LAYOUTS["one"])
    told = run_ranks(load_with_another_model, 2, root=tmp_path, num_layers=num_layers)
    untouched = "the live state was not touched: fall back to another checkpoint"
    assert told == [[f"{kind} model.blocks.{block}.attention.wk.weight", untouched]] * 2
