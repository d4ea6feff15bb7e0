"""The promise of this room: whatever a run goes through, it consumes the samples that an undisturbed one does, each once per epoch.

Three sources, stages at unaligned samples with other weights, lengths and batches, a source that is used up, a document blocked and a range
skipped on the way; resumes at random places, at the edges of stages and epochs, and back to back, over 1 to 4 ranks and any split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.blocking import Block, TokenSpan
from surefoot.core.sections import DataSection, SourceSection, TrainSection
from surefoot.core.stages import Stage
from surefoot.data.batches import StepBatch
from surefoot.data.loader import ShardedLoader
from surefoot.data.prepare import prepare
from surefoot.data.run_order import Sample
from surefoot.tensors.batch import IGNORED_LABEL, PHANTOM_SAMPLE

from .conftest import make_text

NUM_STEPS = 80
SOURCES = (
    SourceSection(name="web", weight=7),
    SourceSection(name="code", weight=2, exhaustion="redistribute"),
    SourceSection(name="books", weight=1),
)
STAGES = (
    Stage(0, (("web", 7.0), ("code", 2.0), ("books", 1.0)), 16, 1e4, 1e-3),
    Stage(201, (("web", 1.0), ("code", 2.0), ("books", 1.0)), 32, 5e5, 1e-3, 12),
    Stage(333, (("web", 3.0), ("code", 1.0)), 16, 5e5, 1e-3, 8),
)
SKIP = Block("samples", "90:123", "skip", samples=(90, 123), effective_sample=30)
MASK = Block("document", "d", "mask", (TokenSpan("web", 100, 300),), effective_sample=54)
TAKEN_BEFORE = {5: SKIP, 9: MASK}

Row = tuple[Any, ...]
Open = Callable[..., ShardedLoader]


@pytest.fixture(scope="module")
def three_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("three")
    for name, num_documents in (("web", 60), ("code", 25), ("books", 12)):
        (root / name).mkdir()
        for number in range(num_documents):
            (root / name / f"{number:03d}.txt").write_text(f"{name} {number} {make_text(number, num_words=5 + 7 * number % 60)}")
    sources = [SourceSection(name=source.name, files=(str(root / source.name),)) for source in SOURCES]
    prepare(sources, out=root / "data", tokenizer="bytes", heldout_fraction=0.1)
    return root / "data"


@pytest.fixture
def open_one(three_sources: Path) -> Iterator[Open]:
    opened: list[ShardedLoader] = []

    def open_loader(rank: int = 0, num_ranks: int = 1, *, micro_batch_size: int = 2, prefetch_steps: int = 2) -> ShardedLoader:
        loader = ShardedLoader(
            three_sources,
            data=DataSection(seq_len=16, sources=SOURCES, prefetch_steps=prefetch_steps),
            train=TrainSection(global_batch_size=6, micro_batch_size=micro_batch_size, num_steps=NUM_STEPS),
            seed=7,
            rank=rank,
            num_ranks=num_ranks,
            stages=STAGES,
        )
        opened.append(loader)
        return loader

    yield open_loader
    for loader in opened:
        loader.close()


def rows_of(steps: list[StepBatch]) -> list[Row]:
    """Everything that the model sees of one step over all ranks, in slot order, phantoms left out."""
    batches = sorted((batch for step in steps for batch in step.micro_batches), key=lambda batch: batch.atom)
    return [
        (
            *tuple(column[row].tolist() for column in (batch.tokens_BS, batch.labels_BS, batch.positions_BS, batch.doc_ids_BS)),
            int(batch.sample_ids_B[row]),
        )
        for batch in batches
        for row in range(len(batch.sample_ids_B))
        if batch.sample_ids_B[row] != PHANTOM_SAMPLE
    ]


def undisturbed(loader: ShardedLoader) -> tuple[list[list[Row]], list[dict[str, Any]], list[Sample]]:
    """(rows, cursor before, samples) of each step."""
    rows, cursors, samples = [], [], []
    for step in range(NUM_STEPS):
        take(loader, step)
        cursors.append(loader.cursor())
        samples += loader.course.order.at(loader.course.next_samples())
        rows.append(rows_of([next(loader)]))
    return rows, cursors, samples


def take(loader: ShardedLoader, step: int) -> None:
    block = TAKEN_BEFORE.get(step)
    if block is not None and loader.blocklist[0] == list(TAKEN_BEFORE).index(step):
        (loader.skip if block.kind == "samples" else loader.block)(block)


def resume(open_one: Open, cursor: dict[str, Any], step: int, rng: random.Random) -> list[ShardedLoader]:
    num_ranks, micro_batch_size, prefetch = rng.randint(1, 4), rng.randint(1, 5), rng.randint(0, 3)
    loaders = [open_one(rank, num_ranks, micro_batch_size=micro_batch_size, prefetch_steps=prefetch) for rank in range(num_ranks)]
    for loader in loaders:
        for at in TAKEN_BEFORE:
            if at <= step:
                take(loader, at)
        loader.seek(cursor)
    return loaders


def goes_on(
    open_one: Open, wanted: tuple[list[list[Row]], list[dict[str, Any]], list[Sample]], points: list[int], rng: random.Random
) -> None:
    """Walk to the end, and at every one of `points` as after a crash: from its cursor, with other loaders."""
    rows, cursors, _ = wanted
    step = points[0]
    loaders = resume(open_one, cursors[step], step, rng)
    while step < NUM_STEPS:
        for loader in loaders:
            take(loader, step)
        if step in points[1:]:
            assert all(loader.cursor() == cursors[step] for loader in loaders)
            for loader in loaders:
                loader.close()
            for _ in range(1 + rng.randint(0, 1)):  # back to back
                loaders = resume(open_one, cursors[step], step, rng)
        assert rows_of([next(loader) for loader in loaders]) == rows[step], f"step {step}"
        step += 1


def edges(cursors: list[dict[str, Any]]) -> list[int]:
    """The steps before which a stage began, an epoch ended, a range was skipped, or something was blocked."""
    found = set(TAKEN_BEFORE)
    for step in range(1, NUM_STEPS):
        before, after = cursors[step - 1], cursors[step]
        places = [(name, source["epoch"]) for name, source in before["per_source"].items()]
        if before["stages"] != after["stages"] or places != [(name, source["epoch"]) for name, source in after["per_source"].items()]:
            found |= {step - 1, step}
    return sorted(found)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign), pytest.param(2, marks=pytest.mark.campaign)])
def test_ids_are_those_of_no_disturbance(open_one: Open, seed: int) -> None:
    rng = random.Random(seed)
    wanted = undisturbed(open_one())
    near = edges(wanted[1])
    assert len(near) >= 6, "stages and epochs end within the run"
    for round_ in range(20 if seed else 4):
        points = sorted({rng.randrange(NUM_STEPS // 2), *rng.sample(range(NUM_STEPS), 4), *rng.sample(near, 2)})
        goes_on(open_one, wanted, points, random.Random(f"{seed} {round_}"))


def test_each_token_comes_once_per_epoch_blocked_ones_and_skipped_ones_aside(open_one: Open) -> None:
    rows, cursors, samples = undisturbed(open_one())
    numbers = [sample.sample for sample in samples]
    assert numbers == [number for number in range(numbers[-1] + 1) if not 90 <= number < 123]
    seen: set[tuple[str, int, int]] = set()
    for sample in samples:
        tokens = {(sample.source, sample.epoch, token) for start, count in sample.spans for token in range(start, start + count)}
        assert not tokens & seen
        seen |= tokens
    assert sum(len(step) for step in rows) == len(samples)
    assert cursors[-1]["per_source"]["code"]["epoch"] in (0, 1), "a source whose share went to the others is not read again"
    held = [sample for sample in samples if sample.source == "web" and any(s < 300 and s + n > 100 for s, n in sample.spans)]
    flat = {sample.sample: row for sample, row in zip(samples, [row for step in rows for row in step], strict=True)}
    for sample in held:
        start = sample.spans[0][0]
        for place, label in enumerate(flat[sample.sample][1]):
            if 100 <= start + place + 1 < 300 and sample.sample >= MASK.effective_sample and len(sample.spans) == 1:
                assert label == IGNORED_LABEL, "a blocked token is nobody's label"
    assert any(sample.sample >= MASK.effective_sample for sample in held)


def test_another_seed_of_the_order_goes_red(open_one: Open, three_sources: Path) -> None:
    rows, cursors, _ = undisturbed(open_one())
    loader = open_one()
    loader.seek({**cursors[3], "order_probe": ""})
    next(loader)
    assert rows_of([next(loader)]) != rows[3]
