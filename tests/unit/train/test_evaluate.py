"""The held-out losses of our own loop, on one process: per source, on two sets, and beside rows that are looked at one by one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surefoot.core.ports import CanaryPort
from surefoot.core.sections import CanarySection, DataSection, ModelSection, RunConfig, RunSection, TrainSection
from surefoot.model.loss import loss_of
from surefoot.observe.metrics import read_steps
from surefoot.tensors.batch import IGNORED_LABEL
from surefoot.tensors.world import single_world
from surefoot.train.build import build_parts
from surefoot.train.loop import training_steps
from surefoot.train.step import Parts
from tests.three_sources import SOURCES, prepare_three


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "out")


def parts_of(data: Path, *, canary: CanarySection | None = None) -> Parts:
    config = RunConfig(
        data=DataSection(path=str(data), seq_len=32),
        model=ModelSection(num_layers=1, d_model=32, num_heads=2),
        train=TrainSection(global_batch_size=6, micro_batch_size=3, eval_num_samples=7),
        canary=canary or CanarySection(num_tokens=9 * 32, interval_steps=1000),
    )
    return build_parts(config, single_world(torch.device("cpu")))


def test_losses_per_source_are_those_of_their_rows(three: Path) -> None:
    parts = parts_of(three)
    held = parts.data.heldout_batches()
    assert any(len(set(rows) - {-1}) > 1 for rows in held.source_of_row)  # atoms at the border of two sources
    nats: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    with torch.no_grad():
        for atom, rows in zip(held.micro_batches, held.source_of_row, strict=True):
            for row, source in enumerate(rows):
                if source >= 0:
                    others = torch.arange(len(rows)) != row
                    labels_BS = atom.labels_BS.masked_fill(others[:, None], IGNORED_LABEL)
                    logits_BSV = parts.cut.module(atom.tokens_BS, atom.positions_BS, atom.doc_ids_BS)
                    nats[SOURCES[source]] += float(loss_of(logits_BSV, replace(atom, labels_BS=labels_BS)).nats)
                    tokens[SOURCES[source]] += int((labels_BS != IGNORED_LABEL).sum())
    found = parts.evaluation.held_out()
    assert found is not None
    assert found.num_tokens == sum(tokens.values())
    assert found.per_source == {name: pytest.approx(nats[name] / tokens[name], rel=1e-6) for name in tokens}
    assert found.loss == pytest.approx(sum(nats.values()) / sum(tokens.values()), rel=1e-6)
    assert len(set(found.per_source.values())) == len(SOURCES)


def test_the_canary_is_another_set_and_repeats_its_bits(three: Path) -> None:
    parts = parts_of(three)
    assert isinstance(parts.evaluation, CanaryPort)
    before = torch.get_rng_state()
    canary, held_out = parts.evaluation.canary(), parts.evaluation.held_out()
    assert canary is not None
    assert canary == parts.evaluation.canary() == parts_of(three).evaluation.canary()
    assert canary != held_out
    assert parts.cut.module.training
    assert torch.equal(before, torch.get_rng_state())
    with torch.no_grad():
        parts.parameters[0].mul_(1.5)
    assert parts.evaluation.canary() != canary


def test_a_canary_that_nobody_wants_is_none(three: Path) -> None:
    assert parts_of(three, canary=CanarySection(interval_steps=0)).evaluation.canary() is None


def test_rows_of_a_run_have_the_canary_where_it_was_asked_for(three: Path, tmp_path: Path) -> None:
    config = replace(
        parts_of(three, canary=CanarySection(num_tokens=9 * 32, interval_steps=2)).config,
        run=RunSection(dir=str(tmp_path / "run")),
        train=TrainSection(num_steps=5, global_batch_size=6, micro_batch_size=3, eval_num_samples=7, eval_interval_steps=3),
    )
    reports = list(training_steps(config))
    assert [report.step for report in reports if report.canary_loss is not None] == [2, 4]
    assert [report.step for report in reports if report.val_losses] == [3, 5]
    rows = read_steps(tmp_path / "run").to_pylist()
    assert [row["canary_loss"] for row in rows] == [report.canary_loss for report in reports]
    assert dict(rows[-1]["val_losses"]) == reports[-1].val_losses
    assert sorted(reports[-1].val_losses) == sorted(SOURCES)
