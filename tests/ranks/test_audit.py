"""The audit on real ranks that train: silent on healthy ones, and changes no bit; who is wrong is named, or said not to be known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.checkpoint.rng import capture_rng
from surefoot.checkpoint.state import collect
from surefoot.core.errors import ConfigError
from surefoot.core.records import Asks, Finding
from surefoot.core.sections import (
    DataSection,
    LaunchSection,
    ModelSection,
    MonitorSection,
    ParallelSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from surefoot.guard.audit import Audit
from surefoot.guard.state import TrainState
from surefoot.parallel.clip import scale_gradients
from surefoot.tensors.digest import tensor_digest
from surefoot.tensors.process_group import connected, set_threads
from surefoot.tensors.world import World
from surefoot.train.build import build_parts, make_deterministic
from surefoot.train.loop import open_run
from surefoot.train.recompute import Recompute
from surefoot.train.step import Parts, forward_backward

RunRanks = Callable[..., list[Any]]

EVERY = 2
NUM_STEPS = 4
BIAS = 1.001
FLIPPED = "blocks.0.attention.wk.weight"
SHARDED, COPIES = ParallelSection(dp_shard=3), ParallelSection(dp_replicate=3)


@dataclass(frozen=True)
class Case:
    """A run with audits or without, and what is wrong on `rank` from the start: its contribution, or once a bit at rest."""

    parallel: ParallelSection
    wrong: str = ""
    rank: int = -1
    audits: bool = True


@dataclass(frozen=True)
class Seen:
    findings: list[Finding]
    last_clean: int
    state: dict[str, int]


def config_of(data: Path, parallel: ParallelSection) -> RunConfig:
    return RunConfig(
        run=RunSection(name="audited", seed=3),
        data=DataSection(path=str(data), seq_len=32),
        model=ModelSection(num_layers=2, d_model=32, num_heads=2),
        train=TrainSection(num_steps=NUM_STEPS, global_batch_size=7, micro_batch_size=1, eval_interval_steps=0, eval_num_samples=1),
        parallel=parallel,
        monitor=MonitorSection(audit_interval_steps=EVERY),
        launch=LaunchSection(threads_per_rank=1),
    )


def audited(*, rank: int, world_size: int, data: Path, cases: list[Case]) -> list[Seen]:
    first = config_of(data, cases[0].parallel)
    set_threads(first.launch)
    make_deterministic(first.numerics)
    with connected(first.launch) as world:
        return [_run(config_of(data, case.parallel), case, world) for case in cases]


def _run(config: RunConfig, case: Case, world: World) -> Seen:
    parts = build_parts(config, world)
    state = TrainState(model=parts.cut.module, optimizer=parts.optimizer, data=parts.data)
    recompute = Recompute(parts, last_step=lambda: state.step - 1)
    audit = Audit(state, config=config, world=world, recorder=None, recompute=recompute)
    findings: list[Finding] = []
    if case.wrong == "contribution" and world.rank == case.rank:
        next(parts.cut.module.get_submodule("blocks").children()).register_forward_hook(lambda _module, _given, out: _bias(out))
    if case.wrong == "unsteady":
        next(parts.cut.module.get_submodule("blocks").children()).register_forward_hook(_make_unsteady(world.rank))
    while state.step < NUM_STEPS:
        _step(parts, state)
        if case.wrong == "bit" and world.rank == case.rank and state.step == NUM_STEPS:
            _flip_lowest_bit(parts.cut.module.get_parameter(FLIPPED))
        if case.audits and audit.due(state.step):
            findings += audit.run(state.step)
    live = collect(parts.cut.module, parts.optimizer)
    digests = {key: tensor_digest(tensor) for key, tensor in live.tensors.items()}
    digests |= {"rng": tensor_digest(capture_rng(world.device)), "next_sample": parts.data.next_sample}
    digests |= {f"gradient.{name}": 1 for name, parameter in parts.cut.module.named_parameters() if parameter.grad is not None}
    parts.data.close()
    return Seen(findings, state.last_clean_audit, digests)


def _step(parts: Parts, state: TrainState) -> None:
    batch = next(parts.data)
    forward_backward(parts, batch.micro_batches, step=state.step)
    scale_gradients(parts.parameters, 1e-3)
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    state.step += 1


def _bias(out: torch.Tensor) -> None:
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * BIAS)  # type: ignore[no-untyped-call]  # unannotated in torch


def _make_unsteady(rank: int) -> Callable[..., None]:
    """What no two calculations agree about, on whichever ranks."""
    biases = (1.0 + 1e-3 * (2 * number + rank) for number in count(1))

    def hook(_module: object, _given: object, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * next(biases))  # type: ignore[no-untyped-call]  # unannotated in torch

    return hook


def _flip_lowest_bit(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.view(-1).view(torch.int32)[7] ^= 1


@pytest.mark.parametrize("parallel", [SHARDED, COPIES], ids=["sharded", "copies"])
def test_on_three_ranks(parallel: ParallelSection, run_ranks: RunRanks, data_dir: Path) -> None:
    cases = [Case(parallel), Case(parallel, audits=False), Case(parallel, "contribution", rank=1)]
    cases += [Case(parallel, "bit", rank=2)] if parallel == COPIES else []
    by_rank = run_ranks(audited, 3, init=False, data=data_dir, cases=cases)
    for healthy, control, biased, *_ in by_rank:
        assert healthy.findings == []
        assert healthy.last_clean == NUM_STEPS
        assert healthy.state == control.state
        assert biased.state != control.state  # what the comparison above would see
        assert [finding.rule for finding in biased.findings] == ["recompute_differs"] * 3  # of steps 2, 3 and 4: closer after the first
        for finding in biased.findings:
            assert (finding.evidence["ranks"], finding.evidence["verdict"]) == ([1], "named")
            assert (finding.asks, finding.onset_step) == (Asks.ROLL_BACK, 1)
        assert biased.last_clean == 0
    for flipped in (cases[3] for cases in by_rank if parallel == COPIES):
        (finding,) = flipped.findings
        assert (finding.rule, finding.evidence["ranks"], finding.evidence["verdict"]) == ("replica_differs", [2], "named")
        assert finding.evidence["tensors"] == [f"model.{FLIPPED}"]
        assert (finding.onset_step, finding.evidence["last_clean_step"]) == (3, 2)


def test_two_ranks_know_that_and_not_who(run_ranks: RunRanks, data_dir: Path) -> None:
    copies = ParallelSection(dp_replicate=2)
    cases = [Case(copies), Case(copies, "contribution", rank=1), Case(copies, "bit", rank=0), Case(copies, "unsteady")]
    for healthy, biased, flipped, unsteady in run_ranks(audited, 2, init=False, data=data_dir, cases=cases):
        assert healthy.findings == []
        for finding in (*biased.findings, *flipped.findings):
            assert (finding.evidence["ranks"], finding.evidence["verdict"]) == ([0, 1], "inconclusive")
        assert [finding.rule for finding in flipped.findings] == ["replica_differs"]
        assert [(finding.rule, finding.asks) for finding in unsteady.findings] == [("bits_do_not_repeat", Asks.ALERT)] * 2
        assert [finding.evidence["ranks"] for finding in unsteady.findings] == [[], []]  # it says nothing of either


def refused(*, rank: int, world_size: int, config: RunConfig) -> tuple[str, object]:
    mine = replace(config, run=replace(config.run, seed=5)) if rank == 1 else config
    with pytest.raises(ConfigError) as told, open_run(mine) as (_, guard):
        guard.restore()
    return str(told.value), told.value.values["ranks"]


def test_a_rank_of_another_seed_is_refused_by_name_before_the_first_step(run_ranks: RunRanks, data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, SHARDED)
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    for message, ranks in run_ranks(refused, 3, init=False, config=config):
        assert message.startswith("rank 1 of 3: rank 1 has run.seed 5, rank 0 has 3 — give every rank the same config")
        assert list(ranks) == [1]
