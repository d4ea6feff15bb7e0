"""`surefoot data block`: what is resolved, said, refused and ledgered. What a run does with it is for the tests of the guard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.cli.ledgering import user_name
from surefoot.cli.main import run
from surefoot.cli.run_data import open_run_data
from surefoot.coordinate.lock import RunLock
from surefoot.core.blocking import block_from_json, next_head
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.hashing import ZERO_HASH
from surefoot.data.provenance import Provenance, StoredDocument
from surefoot.observe.blocks import fold_blocks, refused_fields, taken_fields
from surefoot.observe.ledger import LEDGER_NAME, Ledger, read_ledger
from surefoot.observe.wishes import open_wish
from tests.three_sources import make_run, prepare_three, record_attempt

Answer = Callable[..., dict[str, Any]]
NUM_DONE = 6
NEXT_SAMPLE = 40
"""Steps of 5 up to sample 20, then of 10."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "data")


@pytest.fixture(scope="module")
def standing(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as `run_dir`, to ask for nothing."""
    return made_in(tmp_path_factory.mktemp("standing"), data)


@pytest.fixture
def run_dir(data: Path, tmp_path: Path) -> Path:
    return made_in(tmp_path, data)


def made_in(folder: Path, data: Path) -> Path:
    made = make_run(folder, data, reserve=0.05)
    record_attempt(made, attempt=1, base_step=0, next_samples=[5, 10, 15, 20, 30, NEXT_SAMPLE])
    commit(made, step=NUM_DONE)
    return made


def commit(run_dir: Path, *, step: int, parent: str | None = None) -> None:
    fields = {"id": f"s{step}-a1", "step": step, "attempt": 1, "parent": parent, "state_digest": "sf1:0", "num_bytes": 1}
    ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="test")
    ledger.append(Event.CHECKPOINT_COMMITTED, generation=1, attempt=1, step=step, fields=fields)


@pytest.fixture
def blocked(capsys: pytest.CaptureFixture[str]) -> Answer:
    def ask(*arguments: object, exit_code: int = 0) -> dict[str, Any]:
        assert run(["data", "block", *map(str, arguments), "--json"]) == exit_code
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return ask


def stored_at(data: Path, number: int, *, source: str = "web") -> StoredDocument:
    with Provenance(data) as provenance:
        return provenance.find(f"{source}/{number}")[0]


def asked_entries(run_dir: Path) -> list[dict[str, Any]]:
    return [dict(wish.block) for wish in fold_blocks(read_ledger(run_dir / LEDGER_NAME)).open]


def answer_first(run_dir: Path, *, effective_sample: int | None = None) -> None:
    """Take the open wish from `effective_sample` on, or refuse it."""
    (wish,) = fold_blocks(read_ledger(run_dir / LEDGER_NAME)).open
    block = block_from_json(wish.block)
    ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="rank 0")
    if effective_sample is None:
        fields = refused_fields(asked=wish.seq, block=wish.block)
        ledger.append(Event.BLOCK_REFUSED, generation=1, attempt=1, step=NUM_DONE, reason="cannot be honoured", fields=fields)
        return
    taken = replace(block, effective_sample=effective_sample)
    fields = taken_fields(taken, asked=wish.seq, count=1, head=next_head(ZERO_HASH, taken))
    ledger.append(Event.BLOCK_TAKEN, generation=1, attempt=1, step=NUM_DONE, fields=fields)


def test_a_document_is_asked_for_with_all_that_is_known_of_it(data: Path, run_dir: Path, blocked: Answer) -> None:
    stored = stored_at(data, 3)
    answer = blocked(run_dir, "--document", stored.hash[:9], "--reason", "a table of digits", "--evidence-step", 5)
    assert answer["asked"] is True
    (entry,) = asked_entries(run_dir)
    assert entry == answer["block"]
    block = block_from_json(entry)
    assert (block.kind, block.name, block.mode, block.spans) == ("document", stored.hash, "mask", (stored.span,))
    assert (block.reason, block.by, block.evidence_step, block.effective_sample) == ("a table of digits", user_name(), 5, 0)
    with Provenance(data) as provenance:
        assert block.manifest_sha256 == provenance.manifest.sha256
        total = provenance.manifest.sources["web"].splits["train"].tokens
    assert (answer["documents"], answer["tokens"]) == (1, stored.end - stored.start)
    assert answer["shares"] == {"web": pytest.approx((stored.end - stored.start) / total)}
    last = read_ledger(run_dir / LEDGER_NAME)[-1]
    assert (last.event, last.seq, last.by, last.rule, last.reason) == (
        Event.BLOCK_ASKED,
        answer["seq"],
        user_name(),
        "data block",
        "a table of digits",
    )


def test_samples_of_the_run_are_counted_before_and_behind_where_it_stands(data: Path, run_dir: Path, blocked: Answer) -> None:
    order = open_run_data(run_dir).order
    for number in (0, 5, 11):
        stored = stored_at(data, number)
        held = order.holding("web", stored.start, stored.end, first=0, until=577)
        answer = blocked(run_dir, "--document", stored.id, "--dry-run")
        assert (answer["samples_seen"], answer["samples_to_come"]) == ((held < NEXT_SAMPLE).sum(), (held >= NEXT_SAMPLE).sum())
        later = blocked(run_dir, "--document", stored.id, "--dry-run", "--from-sample", 300)
        assert later["samples_to_come"] == (held >= 300).sum()
    assert asked_entries(run_dir) == []


def test_a_document_is_its_text_in_whatever_source(data: Path, run_dir: Path, blocked: Answer) -> None:
    with Provenance(data) as provenance:
        (shared,) = {
            stored.hash
            for stored in provenance.documents(replace(provenance.span_of_shard("code/00000"), start=0, end=total_of(provenance, "code")))
            if len(provenance.find(stored.hash)) == 2
        }
        places = provenance.find(shared)
    answer = blocked(run_dir, "--document", places[1].id, "--reason", "twice")
    assert [span["source"] for span in answer["block"]["spans"]] == ["code", "web"]
    assert answer["documents"] == 2


def total_of(provenance: Provenance, source: str) -> int:
    return provenance.manifest.sources[source].splits["train"].tokens


def test_files_and_shards_are_blocked_whole(data: Path, run_dir: Path, blocked: Answer) -> None:
    with Provenance(data) as provenance:
        file, shard = provenance.spans_of_file("prose/part-1.jsonl"), provenance.span_of_shard("web/00001")
        num_documents = len(provenance.documents(shard))
    answer = blocked(run_dir, "--file", "prose/part-1.jsonl", "--reason", "wrong encoding")
    assert block_from_json(answer["block"]).spans == tuple(file)
    assert 0.2 < answer["shares"]["prose"] < 0.8
    answer = blocked(run_dir, "--shard", "web/00001", "--mode", "replace", "--reason", "wrong encoding")
    block = block_from_json(answer["block"])
    assert (block.kind, block.name, block.mode, block.spans) == ("shard", "web/00001", "replace", (shard,))
    assert answer["documents"] == num_documents


def test_samples_are_skipped(run_dir: Path, blocked: Answer) -> None:
    answer = blocked(run_dir, "--samples", "50:70", "--reason", "spike")
    block = block_from_json(answer["block"])
    assert (block.kind, block.name, block.mode, block.samples, block.spans) == ("samples", "50:70", "skip", (50, 70), ())
    assert (answer["samples_to_come"], answer["samples_seen"]) == (20, 0)


@pytest.mark.parametrize(("step", "samples"), [(2, (5, 10)), (6, (30, 40)), (8, (50, 60))])
def test_a_step_is_its_samples(step: int, samples: tuple[int, int], run_dir: Path, blocked: Answer) -> None:
    answer = blocked(run_dir, "--step", step, "--reason", "spike")
    assert block_from_json(answer["block"]).samples == samples
    assert ("refused else" in answer["holds"]) == (samples[1] <= NEXT_SAMPLE)


def test_a_live_run_is_not_asked_for_what_it_must_refuse(run_dir: Path, blocked: Answer) -> None:
    with training(run_dir):
        error = blocked(run_dir, "--step", 2, "--reason", "spike", exit_code=2)["error"]
        assert "it is at sample 40" in error["what"]
        assert asked_entries(run_dir) == []
        assert "running job" in blocked(run_dir, "--document", "web/2", "--reason", "spike")["holds"]
        holds = blocked(run_dir, "--samples", "35:45", "--reason", "spike")["holds"]
        assert "unless it has gone past sample 44 by then and refuses it" in holds
        assert f"`surefoot data block {run_dir} --list` tells its answer" in holds
    assert "next start" in blocked(run_dir, "--document", "web/4", "--reason", "spike")["holds"]


def test_a_finished_run_is_told_when_it_would_hold(run_dir: Path, blocked: Answer) -> None:
    ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="test")
    ledger.append(Event.RUN_FINISHED, generation=1, attempt=1, step=60)
    assert "finished" in blocked(run_dir, "--document", "web/2", "--reason", "spike")["holds"]


def test_a_standing_run_is_told_from_where_its_checkpoint_stands(data: Path, tmp_path: Path, blocked: Answer) -> None:
    """Six steps are done, and the last two of them were not saved: the next start does them again."""
    run_dir = make_run(tmp_path, data)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=[5, 10, 15, 20, 30, NEXT_SAMPLE])
    holds = blocked(run_dir, "--document", "web/2", "--dry-run")["holds"]
    assert "from sample 0 on (a start goes on at sample 0, the newest step ended at 40)" in holds
    commit(run_dir, step=2)
    commit(run_dir, step=4, parent="s2-a1")
    holds = blocked(run_dir, "--document", "web/2", "--dry-run")["holds"]
    assert "from sample 20 on (a start goes on at sample 20, the newest step ended at 40)" in holds
    assert "skipping samples 30 to 39" in blocked(run_dir, "--step", 6, "--dry-run")["holds"]
    holds = blocked(run_dir, "--step", 4, "--dry-run")["holds"]
    assert "refused else" in holds
    assert "--resume-from 2" in holds
    with training(run_dir):
        assert "from sample 40 on" in blocked(run_dir, "--document", "web/2", "--dry-run")["holds"]
    ledger = Ledger(run_dir / LEDGER_NAME, clock=SystemClock(), by="eve")
    ledger.append(Event.RESUME_ASKED, generation=1, attempt=1, step=NUM_DONE, fields={"id": "s2-a1"})
    assert "from sample 10 on" in blocked(run_dir, "--document", "web/2", "--dry-run")["holds"]


def test_going_back_without_samples_and_a_document_is_one_line(run_dir: Path) -> None:
    """So that a kill leaves the way back with what is left out from there, or neither."""
    commit(run_dir, step=2)
    before = len(read_ledger(run_dir / LEDGER_NAME))
    assert run(["rollback", str(run_dir), "--to", "2", "--skip", "3:4", "--block", "web/2", "--reason", "odd", "--yes"]) == 0
    entries = read_ledger(run_dir / LEDGER_NAME)
    (asked,) = [entry for entry in entries[before:] if entry.event in (Event.RESUME_ASKED, Event.BLOCK_ASKED)]
    assert open_wish(entries) is not None
    assert [(wish.seq, wish.block["kind"]) for wish in fold_blocks(entries).open] == [(asked.seq, "samples"), (asked.seq, "document")]


def test_what_a_live_run_took_may_be_asked_for_again_when_it_went_back_behind_it(run_dir: Path, blocked: Answer) -> None:
    """A run whose replay differs goes back by itself: there the entry does not hold yet."""
    blocked(run_dir, "--document", "web/2", "--reason", "spike")
    answer_first(run_dir, effective_sample=NEXT_SAMPLE)
    record_attempt(run_dir, attempt=2, base_step=4, next_samples=[30])
    with training(run_dir):
        assert blocked(run_dir, "--document", "web/2", "--reason", "spike")["asked"] is True
        assert blocked(run_dir, "--document", "web/2", "--reason", "spike")["asked"] is False
        assert blocked(run_dir, "--document", "web/2", "--reason", "later", "--from-sample", NEXT_SAMPLE)["asked"] is False


def test_the_same_is_asked_for_once(run_dir: Path, blocked: Answer) -> None:
    first = blocked(run_dir, "--document", "web/2", "--reason", "spike")
    again = blocked(run_dir, "--document", "web/2", "--reason", "spike")
    assert (again["asked"], again["seq"], again["before"]) == (False, first["seq"], first["seq"])
    answer_first(run_dir, effective_sample=NEXT_SAMPLE)
    with training(run_dir):
        assert blocked(run_dir, "--document", "web/2", "--reason", "spike")["asked"] is False
        assert blocked(run_dir, "--document", "web/2", "--mode", "replace", "--reason", "spike")["asked"] is True
    assert blocked(run_dir, "--document", "web/2", "--reason", "the run is to go back before it")["asked"] is True


def test_of_many_who_ask_for_the_same_at_once_one_does(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "block", str(run_dir), "--document", "web/2", "--reason", "spike", "--json"]
    with ThreadPoolExecutor(6) as people:
        assert set(people.map(run, [arguments] * 6)) == {0}
    assert len(asked_entries(run_dir)) == 1


def test_several_documents_are_an_entry_each(data: Path, run_dir: Path, blocked: Answer) -> None:
    answers = blocked(run_dir, "--document", "web/2", "--document", "web/4", "--document", "web/2", "--reason", "spike")["answers"]
    assert [answer["asked"] for answer in answers] == [True, True, False]
    assert [entry["name"] for entry in asked_entries(run_dir)] == [stored_at(data, number).hash for number in (2, 4)]


def test_evidence_may_be_of_a_step_that_the_run_has_gone_back_from(run_dir: Path, blocked: Answer) -> None:
    record_attempt(run_dir, attempt=2, base_step=4, next_samples=[30])
    assert open_run_data(run_dir).steps.newest[0] == 5
    assert blocked(run_dir, "--document", "web/2", "--reason", "spike", "--evidence-step", NUM_DONE)["asked"] is True


@pytest.mark.parametrize(("suffix", "target"), [("len", "--document"), ("idx", "--document"), ("src.parquet", "--file")])
def test_nothing_is_asked_for_by_a_damaged_file(suffix: str, target: str, data: Path, tmp_path: Path, blocked: Answer) -> None:
    """Though what is asked about lies elsewhere in the file, and a shard is named by the manifest alone."""
    here = tmp_path / "data"
    shutil.copytree(data, here)
    run_dir = made_in(tmp_path, here)
    stored = stored_at(here, 0)
    file = here / "web" / "train" / f"{stored.shard}.{suffix}"
    content = bytearray(file.read_bytes())
    content[-1 if suffix == "idx" else 0 if suffix == "src.parquet" else -9] ^= 1
    file.write_bytes(content)
    name = stored.id if target == "--document" else stored.file
    error = blocked(run_dir, target, name, "--reason", "spike", exit_code=4)["error"]
    assert error["where"] == str(file)
    assert asked_entries(run_dir) == []
    assert blocked(run_dir, "--shard", f"web/{stored.shard}", "--reason", "its files are damaged")["asked"] is True


@contextmanager
def training(run_dir: Path) -> Iterator[None]:
    """A job holds the run's lock."""
    lock = RunLock.acquire(run_dir, job="job", clock=SystemClock(), lease_s=30.0)
    try:
        yield
    finally:
        lock.release()


def test_what_was_refused_may_be_asked_for_again(run_dir: Path, blocked: Answer) -> None:
    blocked(run_dir, "--document", "web/2", "--reason", "spike")
    answer_first(run_dir)
    assert blocked(run_dir, "--document", "web/2", "--reason", "spike")["asked"] is True


def test_the_list_has_what_was_asked_taken_and_refused(run_dir: Path, blocked: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    assert blocked(run_dir, "--list")["blocks"] == []
    blocked(run_dir, "--document", "web/2", "--reason", "spike")
    answer_first(run_dir, effective_sample=NEXT_SAMPLE)
    blocked(run_dir, "--samples", "50:70", "--reason", "a second one")
    told = blocked(run_dir, "--list")
    assert [(row["state"], row["kind"], row["effective_sample"]) for row in told["blocks"]] == [
        ("taken", "document", NEXT_SAMPLE),
        ("asked", "samples", 0),
    ]
    assert (told["count"], told["head"]) == (1, fold_blocks(read_ledger(run_dir / LEDGER_NAME)).head)
    answer_first(run_dir)
    assert blocked(run_dir, "--list")["refused"][0]["reason"] == "cannot be honoured"
    assert run(["data", "block", str(run_dir), "--list"]) == 0
    said = capsys.readouterr().out
    assert "from sample 40 (spike)" in said
    assert "refused" in said


def test_a_dry_run_asks_for_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run_dir / LEDGER_NAME).read_bytes()
    assert run(["data", "block", str(run_dir), "--shard", "web/00000", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "% of web" in said
    assert "nothing was asked for" in said
    assert (run_dir / LEDGER_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ((), 2, "name one thing to leave out"),
        (("--document", "web/1", "--step", 3), 2, "name one thing to leave out"),
        (("--list", "--step", 3), 2, "--list takes nothing"),
        (("--document", "web/1"), 2, "--reason TEXT"),
        (("--document", "web/1", "--reason", " "), 2, "--reason TEXT"),
        (("--document", "0123456789", "--reason", "x"), 4, "no document with hash"),
        (("--file", "web/part-9.jsonl", "--reason", "x"), 4, "there are web/part-"),
        (("--shard", "web/99999", "--reason", "x"), 4, "there are web/00000 to"),
        (("--shard", "wob/00001", "--reason", "x"), 4, "the prepared data holds code, prose, web"),
        (("--shard", "web", "--reason", "x"), 2, "wanted SOURCE/SHARD, as web/00000"),
        (("--samples", "70:50", "--reason", "x"), 2, "FIRST:END"),
        (("--samples", "70:50"), 2, "FIRST:END"),
        (("--samples", "fifty", "--reason", "x"), 2, "FIRST:END"),
        (("--samples", "5000:5001", "--reason", "x"), 2, "take samples 0 to 576"),
        (("--samples", "50:60", "--mode", "mask", "--reason", "x"), 2, "samples are skipped"),
        (("--step", 61, "--reason", "x"), 2, "steps 1 to 60"),
        (("--document", "web/1", "--from-sample", 577, "--reason", "x"), 2, "take samples 0 to 576"),
        (("--document", "web/1", "--evidence-step", 7, "--reason", "x"), 2, "the newest is step 6"),
        (("--document", "web/1", "--evidence-step", 0, "--reason", "x"), 2, "has not made step 0"),
        (("--document", "web/1", "--document", "web/99999", "--reason", "x"), 4, "no document 'web/99999'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_it_is_ledgered(
    arguments: tuple[object, ...], exit_code: int, words: str, standing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (standing / LEDGER_NAME).read_bytes()
    assert run(["data", "block", str(standing), *map(str, arguments)]) == exit_code
    assert words in capsys.readouterr().err
    assert (standing / LEDGER_NAME).read_bytes() == before


def test_nothing_is_replaced_where_nothing_is_kept_back(data: Path, tmp_path: Path, blocked: Answer) -> None:
    error = blocked(make_run(tmp_path, data), "--document", "web/1", "--mode", "replace", "--reason", "x", exit_code=2)["error"]
    assert "data.reserve_fraction is 0" in error["what"]


def test_a_reserve_that_is_too_small_is_told(run_dir: Path, blocked: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    """A twentieth of each source is kept back: enough for a document, not for a shard."""
    assert blocked(run_dir, "--document", "web/0", "--mode", "replace", "--dry-run")["unreplaced"] == 0
    assert blocked(run_dir, "--shard", "web/00000", "--dry-run")["unreplaced"] == 0
    order = open_run_data(run_dir).order
    (reserve,) = [source.num_reserve for source in order.sources if source.name == "web"]
    answer = blocked(run_dir, "--shard", "web/00000", "--mode", "replace", "--dry-run")
    assert answer["unreplaced"] == -(-answer["tokens"] // 32) - reserve > 0
    assert run(["data", "block", str(run_dir), "--shard", "web/00000", "--mode", "replace", "--dry-run"]) == 0
    assert "reserve  too small for up to" in capsys.readouterr().out


def test_a_step_of_another_batch_is_its_own_samples(run_dir: Path, blocked: Answer) -> None:
    """Steps that are recorded are believed, whatever the config has come to say."""
    record_attempt(run_dir, attempt=2, base_step=NUM_DONE, next_samples=[NEXT_SAMPLE + 3])
    assert block_from_json(blocked(run_dir, "--step", 7, "--dry-run")["block"]).samples == (NEXT_SAMPLE, NEXT_SAMPLE + 3)
    assert open_run_data(run_dir).steps.newest == (NUM_DONE + 1, NEXT_SAMPLE + 3)
