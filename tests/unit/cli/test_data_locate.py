"""`surefoot data locate` over a run whose steps are recorded: batch ramp, two data ranks, a stage of shorter sequences, three sources."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.cli.locating import rows_of_document, rows_of_step
from surefoot.cli.main import run
from surefoot.cli.run_data import open_run_data
from surefoot.core.blocking import Block, next_head
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.core.sections import ParallelSection, SourceSection
from surefoot.data.atoms import deal
from surefoot.data.manifest import load_manifest
from surefoot.data.prepare import prepare
from surefoot.data.provenance import Provenance
from surefoot.data.recipe import RunOrder, run_order
from surefoot.data.reprocess import reprocess
from surefoot.data.steps import StepPlan
from surefoot.observe.blocks import taken_fields
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from tests.three_sources import SOURCES, config_of, corpus_file, make_run, prepare_three, record_attempt

Answer = Callable[..., dict[str, Any]]
KEYS = {"step", "rank", "row", "span", "document", "hash", "file", "offset", "record", "byte_length", "seen", "masked", "sample", "source"}
NUM_DONE = 12


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "data")


@pytest.fixture(scope="module")
def standing(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `run_dir`, to read only."""
    return made_in(tmp_path_factory.mktemp("standing"), data)


@pytest.fixture
def run_dir(data: Path, tmp_path: Path) -> Path:
    """60 steps are asked for, 12 are done."""
    return made_in(tmp_path, data)


def made_in(folder: Path, data: Path) -> Path:
    made = make_run(folder, data)
    plan = order_of(made).steps
    record_attempt(made, attempt=1, base_step=0, next_samples=ends_of(plan, 1, NUM_DONE))
    return made


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str]) -> Answer:
    def ask(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
        assert run(["data", "locate", *map(str, arguments), "--json"]) == exit_code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return ask


def order_of(run_dir: Path, *blocks: Block) -> RunOrder:
    config = config_of(run_dir)
    return run_order(load_manifest(config.data.path), config, blocks=blocks)


def ends_of(plan: StepPlan, first: int, last: int) -> list[int]:
    """Where steps `first` to `last` end."""
    return [int(plan.samples(plan.span(step - 1)[0])[-1]) + 1 for step in range(first, last + 1)]


def samples_by_rank(run_dir: Path, step: int) -> dict[tuple[int, int], int]:
    """(rank, row) -> global sample, by playing the deal of the step out."""
    plan, found = order_of(run_dir).steps, {}
    samples = plan.samples(plan.span(step - 1)[0])
    for rank in range(2):
        row = 0
        for atom in deal(len(samples), micro_batch_size=3, num_ranks=2, rank=rank):
            for slot in range(atom.first_slot, atom.first_slot + atom.num_rows):
                found[rank, row + slot - atom.first_slot] = int(samples[slot])
            row += 3
    return found


@pytest.mark.parametrize("step", [1, 4, 5, NUM_DONE, NUM_DONE + 1, 20, 60])
def test_a_step_is_told_rank_by_rank_whether_it_was_or_will_be(step: int, standing: Path, asked: Answer) -> None:
    run_dir = standing
    answer = asked(run_dir, "--step", step)
    assert answer["schema_version"] == 1
    assert answer["seen"] == (step <= NUM_DONE)
    hits = answer["hits"]
    assert all(set(hit) >= KEYS for hit in hits)
    assert {(hit["rank"], hit["row"]): hit["sample"] for hit in hits} == samples_by_rank(run_dir, step)
    assert all(hit["seen"] == (step <= NUM_DONE) for hit in hits)
    seq_len = order_of(run_dir).seq_len_at(answer["first_sample"])
    for place in samples_by_rank(run_dir, step):
        spans = [hit["span"] for hit in hits if (hit["rank"], hit["row"]) == place]
        assert (spans[0][0], spans[-1][1]) == (0, seq_len)


def test_a_hit_names_the_bytes_of_its_text(data: Path, run_dir: Path, asked: Answer) -> None:
    hits = asked(run_dir, "--step", 7, "--rank", 1, "--row", 2, "--excerpt")["hits"]
    assert hits
    for hit in hits:
        line = corpus_file(data, hit["file"]).read_bytes()[hit["offset"] : hit["offset"] + hit["byte_length"]]
        assert hit["excerpt"].rstrip("\ufffd").lstrip("\ufffd") in json.loads(line)["text"]
    assert {(hit["rank"], hit["row"], hit["micro_step"]) for hit in hits} == {(1, 2, 0)}


def test_a_document_is_told_in_every_step_that_takes_it(run_dir: Path, asked: Answer) -> None:
    """The other way round: all steps asked for one by one say the same as the document."""
    opened, by_step = open_run_data(run_dir), hits_of_steps(run_dir, 1, 60)
    documents = sorted({hit["document"] for hit in by_step})
    assert len(documents) > 50
    for document in documents[::5]:
        _, hits = rows_of_document(opened, document)
        assert hits == [hit for hit in by_step if hit["document"] == document]
    shared = next(hit["hash"] for hit in by_step if len({one["source"] for one in by_step if one["hash"] == hit["hash"]}) == 2)
    answer = asked(run_dir, "--document", shared[:10])
    assert answer["hits"] == [hit for hit in by_step if hit["hash"] == shared]
    assert {entry["source"] for entry in answer["documents"]} == {"code", "web"}
    assert {hit["seen"] for hit in answer["hits"]} == {True, False}


def test_only_the_line_of_the_run_counts(run_dir: Path, asked: Answer) -> None:
    """A second attempt goes back to step 8 and has done one step; steps 10 to 12 of the first were given up."""
    plan = order_of(run_dir).steps
    record_attempt(run_dir, attempt=2, base_step=8, next_samples=ends_of(plan, 9, 9))
    told = {step: asked(run_dir, "--step", step) for step in (8, 9, 10)}
    assert [(told[step]["seen"], told[step]["attempt"]) for step in told] == [(True, 1), (True, 2), (False, None)]


def test_ranks_are_those_of_the_layout_that_did_the_step(run_dir: Path, asked: Answer) -> None:
    plan = order_of(run_dir).steps
    record_attempt(run_dir, attempt=2, base_step=8, next_samples=ends_of(plan, 9, 10), parallel=ParallelSection(dp_shard=4, tp=2))
    assert {hit["rank"] for hit in asked(run_dir, "--step", 8)["hits"]} == {0, 1}
    assert {hit["rank"] for hit in asked(run_dir, "--step", 9)["hits"]} == {0, 2, 4, 6}
    assert {tuple(hit["ranks"]) for hit in asked(run_dir, "--step", 9, "--rank", 3)["hits"]} == {(2, 3)}
    assert {hit["rank"] for hit in asked(run_dir, "--step", 11)["hits"]} == {0, 1}


def test_a_step_that_took_another_batch_is_told_by_its_record(run_dir: Path, asked: Answer) -> None:
    plan = order_of(run_dir).steps
    ends = ends_of(plan, 1, NUM_DONE)
    record_attempt(run_dir, attempt=2, base_step=NUM_DONE, next_samples=[ends[-1] + 4, ends[-1] + 8])
    ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="test")
    ledger.append(Event.CONFIG_ACCEPTED, generation=2, attempt=2, step=NUM_DONE, fields={"section": "train"})
    assert asked(run_dir, "--step", NUM_DONE)["num_samples"] == 10
    assert (asked(run_dir, "--step", 14)["first_sample"], asked(run_dir, "--step", 14)["num_samples"]) == (ends[-1] + 4, 4)
    assert asked(run_dir, "--step", 15)["first_sample"] == ends[-1] + 8
    hit = asked(run_dir, "--step", 14)["hits"][0]
    assert hit["step"] in {other["step"] for other in asked(run_dir, "--document", hit["document"])["hits"]}


def test_what_is_blocked_is_marked_and_what_is_skipped_is_in_no_step(data: Path, run_dir: Path, asked: Answer) -> None:
    now = order_of(run_dir).steps.span(NUM_DONE)[0]
    skipped = (now, now + 35)
    opened = open_run_data(run_dir)
    seen = {hit["document"] for hit in rows_of_step(opened, NUM_DONE)[1]}
    to_come = {hit["document"] for step in range(20, 60) for hit in rows_of_step(opened, step)[1]}
    document = min(seen & to_come)
    with Provenance(data) as provenance:
        (stored,) = provenance.find(document)
    take(
        run_dir,
        Block("document", stored.hash, "mask", (stored.span,), effective_sample=now),
        Block("samples", f"{now}:{now + 35}", "skip", samples=skipped, effective_sample=now),
    )
    assert asked(run_dir, "--step", NUM_DONE + 1)["first_sample"] == now + 35
    marks = {hit["sample"]: hit["masked"] for hit in asked(run_dir, "--document", document)["hits"]}
    assert set(marks.values()) == {True, False}
    assert all(is_masked == (sample >= now) for sample, is_masked in marks.items())
    assert not set(marks) & set(range(*skipped))


@pytest.mark.parametrize("jump", [0, 35])
def test_a_record_may_end_before_or_behind_a_skipped_range(jump: int, run_dir: Path, asked: Answer) -> None:
    now, end = ends_of(order_of(run_dir).steps, NUM_DONE, NUM_DONE + 2)[::2]
    take(run_dir, Block("samples", f"{end}:{end + 35}", "skip", samples=(end, end + 35), effective_sample=now))
    record_attempt(run_dir, attempt=2, base_step=NUM_DONE, next_samples=[now + 10, end + jump, end + 45])
    told = [asked(run_dir, "--step", step) for step in (14, 15, 16)]
    assert [(answer["first_sample"], answer["num_samples"]) for answer in told] == [(now + 10, 10), (end + 35, 10), (end + 45, 10)]


def take(run_dir: Path, *blocks: Block) -> None:
    ledger, head = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="test"), ZERO_HASH
    for count, block in enumerate(blocks, start=1):
        head = next_head(head, block)
        fields = taken_fields(block, asked=None, count=count, head=head)
        ledger.append(Event.BLOCK_TAKEN, generation=1, attempt=1, step=NUM_DONE, fields=fields)


def test_prepared_data_alone_knows_places_but_no_steps(data: Path, asked: Answer) -> None:
    hit = asked(data, "--document", "web/3", "--excerpt")["hits"][0]
    assert (hit["step"], hit["rank"], hit["row"], hit["split"]) == (None, None, None, "train")
    assert hit["excerpt"].startswith("web ")
    assert asked(data, "--step", 3, exit_code=2)["error"]["what"] == "prepared data has no steps"
    with Provenance(data, split="heldout") as heldout:
        held = heldout.documents(replace(heldout.span_of_shard("web/00000"), end=1))[0]
    assert asked(data, "--document", held.hash)["hits"][0]["split"] == "heldout"


def test_a_held_out_document_is_in_no_step(data: Path, run_dir: Path, asked: Answer) -> None:
    with Provenance(data, split="heldout") as heldout:
        held = heldout.documents(replace(heldout.span_of_shard("web/00000"), end=1))[0]
    assert "held out" in asked(run_dir, "--document", held.hash, exit_code=4)["error"]["what"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ((), 2, "--step N, or --document ID"),
        (("--step", 1, "--document", "web/1"), 2, "name one step or one document"),
        (("--document", "web/1", "--rank", 0), 2, "are of a step"),
        (("--step", 0), 2, "steps 1 to 60"),
        (("--step", 61), 2, "steps 1 to 60"),
        (("--step", 5, "--rank", 2), 2, "ranks 0 to 1"),
        (("--step", 5, "--rank", 1, "--row", 9), 2, "rank 1 has rows 0 to"),
        (("--step", 5, "--row", 77), 2, "its ranks have rows 0 to"),
        (("--document", "0123456789"), 4, "no document with hash"),
        (("--document", "pen"), 2, "names no document"),
        (("--document", "25e59f52"), 4, "give more digits"),
    ],
)
def test_what_cannot_be_told_says_what_is_there(
    arguments: tuple[object, ...], exit_code: int, words: str, standing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "locate", str(standing), *map(str, arguments)]) == exit_code
    assert words in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, asked: Answer) -> None:
    assert asked(tmp_path, "--step", 1, exit_code=2)["error"]["code"] == "config"
    assert asked(tmp_path / "nowhere", "--document", "web/1", exit_code=2)["error"]["what"] == "no such run folder"


def test_data_that_was_moved_is_named_and_other_data_is_refused(data: Path, tmp_path: Path, asked: Answer) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(data, mine)
    shutil.copytree(corpus_file(data, ""), corpus_file(mine, ""))
    run_dir = make_run(tmp_path, mine)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=[5])
    before = asked(run_dir, "--step", 2)
    mine.rename(tmp_path / "moved")
    assert "--data DIR" in asked(run_dir, "--step", 2, exit_code=4)["error"]["hint"]
    assert asked(run_dir, "--step", 2, "--data", tmp_path / "moved") == before
    frozen = Path(__file__).parents[1] / "data" / "frozen" / "format1" / "data"
    assert "other data" in asked(run_dir, "--step", 2, "--data", frozen, exit_code=4)["error"]["what"]


def test_steps_before_the_run_was_given_other_data_are_told_from_a_folder_that_has_the_old(
    data: Path, tmp_path: Path, asked: Answer
) -> None:
    files = {name: corpus_file(data, name) for name in SOURCES}
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps({"text": "what was not there before " * 9}) + "\n")
    sources = [SourceSection(name=name, files=(str(files[name]), *([str(more)] if name == "web" else []))) for name in SOURCES]
    prepare(sources, out=tmp_path / "other", tokenizer="bytes", heldout_fraction=0.1, workers=1)
    run_dir = make_run(tmp_path, data)
    ends = ends_of(order_of(run_dir).steps, 1, 9)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=ends[:5])
    before = asked(run_dir, "--step", 2)
    config = run_dir / "config.toml"
    config.write_text(re.sub(r'(?m)^path = ".*"', f'path = "{tmp_path}/other"', config.read_text()))
    config_of.cache_clear()
    record_attempt(run_dir, attempt=2, base_step=5, next_samples=ends[5:])
    assert "--data DIR" in asked(run_dir, "--step", 2, exit_code=4)["error"]["hint"]
    assert asked(run_dir, "--step", 2, "--data", data) == before
    assert len(asked(run_dir, "--step", 7)["hits"])
    for step in (7, 20):
        assert "which is not here" in asked(run_dir, "--step", step, "--data", data, exit_code=4)["error"]["what"]
    assert "other data" in asked(run_dir, "--document", before["hits"][0]["hash"], "--data", data, exit_code=4)["error"]["what"]


def test_steps_before_a_shard_was_made_anew_saw_what_was_there_then(data: Path, tmp_path: Path, asked: Answer) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(data, mine)
    shutil.copytree(corpus_file(data, ""), corpus_file(mine, ""))
    run_dir = make_run(tmp_path, mine)
    ends = ends_of(order_of(run_dir).steps, 1, 20)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=ends[:NUM_DONE])
    before = hits_of_steps(run_dir, 1, 20)
    mended = tmp_path / "mended.jsonl"
    mended.write_text(json.dumps({"text": "a mended text " * 40}) + "\n")
    reprocess(mine, shard="web/00000", inputs=[str(mended)], workers=1)
    assert hits_of_steps(run_dir, 1, 20) == before  # the run has not gone on with it yet
    record_attempt(run_dir, attempt=2, base_step=NUM_DONE, next_samples=ends[NUM_DONE:15])
    seen = [hit for hit in before if hit["step"] <= NUM_DONE]
    assert hits_of_steps(run_dir, 1, NUM_DONE) == seen
    gone = {hit["hash"] for hit in before if hit["shard"] == "web/00000"}
    later = hits_of_steps(run_dir, NUM_DONE + 1, 60)
    assert not gone & {hit["hash"] for hit in later}
    new = next(hit["hash"] for hit in later if hit["file"] == "mended.jsonl")
    assert asked(run_dir, "--document", new)["hits"] == [hit for hit in later if hit["hash"] == new]
    old = next(hit["hash"] for hit in seen if hit["hash"] in gone)
    assert asked(run_dir, "--document", old)["hits"] == [hit for hit in seen if hit["hash"] == old]


def hits_of_steps(run_dir: Path, first: int, last: int) -> list[dict[str, Any]]:
    opened = open_run_data(run_dir)
    return [hit for step in range(first, last + 1) for hit in rows_of_step(opened, step)[1]]


def test_people_read_a_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "locate", str(run_dir), "--step", "20", "--excerpt"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("step 20, still to come: 10 samples from")
    assert told[1].split()[:5] == ["step", "rank", "row", "span", "document"]
    assert all(line.isprintable() for line in told)
    assert run(["data", "locate", str(run_dir), "--document", "web/2"]) == 0
    assert "is web/2: web/part-0.jsonl record" in capsys.readouterr().out


def test_nothing_is_written_in_the_run(run_dir: Path, asked: Answer) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    asked(run_dir, "--step", 3)
    asked(run_dir, "--document", "web/3")
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_steps_are_far_and_cost_no_walk(data: Path, tmp_path: Path, asked: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 100-millionth step, at sample 10**9, and a document's passes near it, by a bounded number of looks at the plan."""
    run_dir = make_run(tmp_path, data, num_steps=100_000_000)
    looks = 0
    real = StepPlan.samples

    def counted(plan: StepPlan, first_sample: int) -> np.ndarray[Any, Any]:
        nonlocal looks
        looks += 1
        return real(plan, first_sample)

    monkeypatch.setattr(StepPlan, "samples", counted)
    answer = asked(run_dir, "--step", 99_999_999)
    assert answer["first_sample"] > 999_000_000
    assert looks < 50
