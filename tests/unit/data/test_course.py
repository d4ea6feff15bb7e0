"""What a run goes through with its data: blocks over other data, shards that are gone, sources that end, cursors that are wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.core.blocking import Block, TokenSpan
from surefoot.core.errors import DataError
from surefoot.core.sections import DataSection, SourceSection, TrainSection
from surefoot.core.stages import Stage
from surefoot.data.course import Course
from surefoot.data.loader import ShardedLoader
from surefoot.data.prepare import prepare

from .conftest import make_text

NAMED = (("one", 2.0), ("two", 1.0))
Open = Callable[..., Course]


def two_sources(root: Path, *, num_two: int = 20, shard_bytes: int = 512) -> Path:
    """Several shards each."""
    for name, num_documents in (("one", 40), ("two", num_two)):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(num_documents):
            (root / name / f"{number:03d}.txt").write_text(f"{name} {number} {make_text(number, num_words=8 + number % 20)}")
    sources = [SourceSection(name=name, files=(str(root / name),)) for name in ("one", "two")]
    prepare(sources, out=root / "data", tokenizer="bytes", heldout_fraction=0.1, shard_bytes=shard_bytes, force=True)
    return root / "data"


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_sources(tmp_path_factory.mktemp("two"))


@pytest.fixture
def data(tmp_path: Path, prepared_once: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(prepared_once, tmp_path / "data")


@pytest.fixture
def open_course() -> Iterator[Open]:
    opened: list[Course] = []

    def open_one(path: Path, *, weights: Any = NAMED, num_steps: int = 50, **settings: Any) -> Course:
        sources = settings.pop("sources", tuple(SourceSection(name=name) for name, _ in weights))
        reserve = settings.pop("reserve_fraction", 0.0)
        course = Course(
            path,
            data=DataSection(seq_len=16, sources=sources, reserve_fraction=reserve),
            train=TrainSection(global_batch_size=4, num_steps=num_steps),
            stages=(Stage(0, weights, 16, 1e4, 1e-3),),
            seed=7,
            **settings,
        )
        opened.append(course)
        return course

    yield open_one
    for course in opened:
        course.close()


def walked(course: Course, num_steps: int) -> Course:
    for _ in range(num_steps):
        samples = course.next_samples()
        course.stream.rows(samples, seq_len=16)
        course.advance(samples)
    return course


def shard_block(course: Course, source: str, number: int, *, effective_sample: int) -> Block:
    shards = course.manifest.split(source, "train").shards
    start = sum(shard.tokens for shard in shards[:number])
    name = f"{source}/{shards[number].name}"
    span = TokenSpan(source, start, start + shards[number].tokens)
    return Block("shard", name, "mask", (span,), effective_sample=effective_sample, manifest_sha256=course.manifest.sha256)


def lose_shard(data: Path, name: str) -> None:
    source, _, shard = name.partition("/")
    (data / source / "train" / f"{shard}.tok").unlink()


def test_a_shard_that_is_gone_and_left_out_stops_neither_seek_nor_save(
    open_course: Open, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = walked(open_course(data), 12)
    cursor_before = before.cursor()
    block = shard_block(before, "one", 1, effective_sample=48)
    with_block = open_course(data)
    with_block.take(block)
    with_block.seek(cursor_before)
    cursor_after = walked(with_block, 10).cursor()
    lose_shard(data, block.name)

    plain = open_course(data)
    plain.seek(cursor_before)  # somebody may have asked to leave it out, which is taken next: until then it is only said
    assert "is not proven by its tokens" in caplog.text
    with pytest.raises(DataError, match="cannot open"):
        walked(plain, 30)
    for cursor in (cursor_before, cursor_after):
        course = open_course(data)
        course.take(block)
        course.seek(cursor)
        assert walked(course, 3).cursor()["next_sample"] == cursor["next_sample"] + 12


def test_the_probe_of_a_run_that_left_something_out_still_proves(open_course: Open, data: Path) -> None:
    course = open_course(data)
    block = shard_block(course, "one", 1, effective_sample=0)
    course.take(block)
    cursor = walked(course, 12).cursor()
    assert cursor["order_probe"]
    again = open_course(data)
    again.take(block)
    with pytest.raises(DataError, match="not those that the run consumed"):
        again.seek({**cursor, "order_probe": "0" * 64})
    again.seek(cursor)


def test_a_block_over_other_data_is_found_again_by_name(open_course: Open, data: Path) -> None:
    course = open_course(data)
    hits = course.locate(0)
    course.take(Block("document", "f" * 32, "mask", (TokenSpan("one", 0, 10**6),), manifest_sha256="0" * 64))  # gone, as its spans are
    assert course.locate(0) == hits
    course.take(Block("document", hits[0]["hash"], "mask", (TokenSpan("one", 0, 10**6),), manifest_sha256="0" * 64))
    assert [hit["masked"] for hit in course.locate(0)] == [hit["hash"] == hits[0]["hash"] for hit in hits]


def test_a_lookup_that_fails_is_no_lookup_that_finds_nothing(open_course: Open, data: Path) -> None:
    """A rank that shrugged here would train on what the others leave out."""
    course = open_course(data)
    name = course.locate(0)[0]["hash"]
    for file in data.glob("*/train/*.idx"):
        file.write_bytes(b"torn")
    for file in data.glob("*/train/*.src.parquet"):
        file.write_bytes(b"torn")
    with pytest.raises(DataError):
        course.take(Block("document", name, "mask", manifest_sha256="0" * 64))
    assert course.blocklist[0] == 0


def test_a_skip_that_leaves_too_little_of_a_source_is_refused(open_course: Open, data: Path) -> None:
    sources = (SourceSection(name="one"), SourceSection(name="two", exhaustion="stop"))
    ends_at = open_course(data, sources=sources, num_steps=1).order.ends_at
    assert ends_at is not None
    course = open_course(data, sources=sources, num_steps=ends_at // 4)
    course.check_enough()
    with pytest.raises(DataError, match="two used up at sample"):
        course.take(Block("samples", "20:60", "skip", samples=(20, 60)))
    assert course.blocklist[0] == 0
    with pytest.raises(DataError, match=rf"set train.num_steps = {ends_at // 4}"):
        open_course(data, sources=sources, num_steps=ends_at // 4 + 5).check_enough()


@pytest.mark.parametrize("choice", ["map", "restart-source"])
def test_shares_that_nobody_named_stay_when_the_data_grows(open_course: Open, data: Path, tmp_path: Path, choice: str) -> None:
    old = walked(open_course(data, weights=(), sources=()), 8)
    wider = two_sources(tmp_path / "new", num_two=60)
    course = open_course(wider, weights=(), sources=(), on_data_change=choice)
    course.seek(old.cursor())
    assert course.order.planned_shares(40) == old.order.planned_shares(40)
    assert open_course(wider, weights=(), sources=()).order.planned_shares(40) != old.order.planned_shares(40)
    later = open_course(wider, weights=(), sources=())
    later.seek(walked(course, 2).cursor())


@pytest.mark.parametrize(
    "spans", [(TokenSpan("wiki", 0, 5),), (TokenSpan("one", 5, 5),), (TokenSpan("one", 0, 10**12),), (TokenSpan("one", -1, 5),)]
)
def test_spans_that_the_data_does_not_have_are_refused(open_course: Open, data: Path, spans: tuple[TokenSpan, ...]) -> None:
    course = open_course(data)
    with pytest.raises(DataError, match="tokens"):
        course.take(Block("document", "d", "mask", spans))
    assert course.blocklist[0] == 0


def test_replacing_needs_a_reserve(open_course: Open, data: Path) -> None:
    block = Block("document", "d", "replace", (TokenSpan("one", 0, 5),))
    with pytest.raises(DataError, match="nothing is kept back"):
        open_course(data).take(block)
    open_course(data, reserve_fraction=0.05).take(block)


@pytest.mark.parametrize("change", [{"consumed_tokens": 7}, {"skip_ranges": [[2, 9]]}, {"next_step": 10**6}])
def test_a_cursor_with_wrong_totals_is_refused(open_course: Open, data: Path, change: dict[str, Any]) -> None:
    cursor = walked(open_course(data), 5).cursor()
    with pytest.raises(DataError):
        open_course(data).seek({**cursor, **change})
    open_course(data).seek(cursor)


def test_samples_may_be_asked_for_in_any_order(open_course: Open, data: Path) -> None:
    order = open_course(data).order
    assert order.at([1030, 5, 1031]) == [order.at([sample])[0] for sample in (1030, 5, 1031)]
    with pytest.raises(ValueError, match="count from 0"):
        order.at([-1])


def test_a_new_rotation_is_read_ahead_too(data: Path) -> None:
    train = TrainSection(global_batch_size=4, micro_batch_size=2, num_steps=50)
    section = DataSection(seq_len=16, sources=tuple(SourceSection(name=name) for name, _ in NAMED))
    loaders = [ShardedLoader(data, data=section, train=train, seed=7, rank=rank, num_ranks=2) for rank in range(2)]
    next(loaders[0])
    for loader in loaders:
        loader.rotation = 1
    next(loaders[1])
    moved = [next(loader).micro_batches[0].atom for loader in loaders]
    assert moved == [1, 0]
    for loader in loaders:
        loader.close()
