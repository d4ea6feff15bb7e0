"""The report says what is there, and names what is odd: in the data, in a shard, in the batches of a step."""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli import main
from surefoot.core.blocking import Block, TokenSpan, head_of
from surefoot.core.clock import SystemClock
from surefoot.core.events import Event
from surefoot.core.strict_json import dumps, loads
from surefoot.data.quality.candidates import candidate_documents
from surefoot.data.quality.look import Baseline, baselines, look_at_source, standard_score
from surefoot.data.quality.look_ahead import FINDINGS_NAME
from surefoot.data.quality.page import write_page
from surefoot.data.quality.report import report
from surefoot.data.quality.rules import NATURAL_LANGUAGE, Rule, RuleSet
from surefoot.data.quality.rules_file import FiledRule, write_rules
from surefoot.data.quality.shifts import reject_rates, stretches_of
from surefoot.data.quality.steering import blocks_report, mix_report
from surefoot.data.quality.stored import spread, told
from surefoot.data.quality.window import window_report
from surefoot.data.recipe import run_order
from surefoot.observe.blocks import taken_fields
from surefoot.observe.ledger import LEDGER_NAME, Ledger
from tests.three_sources import record_attempt
from tests.unit.data.quality.poisoned import NUM_CLEAN, POISON, Poisoned, make_run

OFF = {"code": (NATURAL_LANGUAGE,)}


@pytest.fixture(scope="module")
def usual(poisoned: Poisoned) -> dict[str, Baseline]:
    with poisoned.shelf() as shelf:
        return baselines(shelf, seq_len=256, rules=RuleSet(), off=OFF, limit=300)


def poisoned_samples(poisoned: Poisoned) -> list[int]:
    """The global samples of the first epochs that hold the first of the family."""
    with poisoned.shelf() as shelf:
        bad = next(stored.document for stored in shelf.sample("web", limit=10_000) if POISON in stored.text)
    return [int(sample) for sample in poisoned.order.holding("web", bad.start, bad.end, until=2000)]


def test_everything_is_counted(poisoned: Poisoned, tmp_path: Path) -> None:
    with poisoned.shelf() as shelf:
        answer = report(shelf, rules=RuleSet(), off=OFF)
    loads(dumps(answer))
    web, code = answer["sources"]["web"], answer["sources"]["code"]
    assert web["documents"] == NUM_CLEAN + poisoned.num_poisoned == web["looked_at"]["documents"]
    assert answer["totals"]["documents"] == sum(source["documents"] for source in answer["sources"].values())
    assert web["lengths"]["percentiles"]["100"] == web["lengths"]["longest"][0]["tokens"]
    assert web["checks"]["tokens_outside_vocabulary"] == web["checks"]["documents_without_eos"] == 0
    assert sum(web["histograms"]["zlib_ratio"]["counts"]) == web["documents"]
    assert any(passage["documents"] == poisoned.num_poisoned for passage in web["shared_passages"])
    assert not any(rule in code["rules"] for rule in ("stop-words", "lines-that-end"))
    page = tmp_path / "report.html"
    write_page(page, answer)
    text = page.read_text()
    # Nothing is fetched: no script, style, image or font from elsewhere. The library inside names addresses, and asks none of them.
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "@import" not in text.partition("</style>")[0]
    assert "Data report" in text


def test_a_stretch_that_breaks_a_rule_more_often_is_named() -> None:
    assert standard_score(40, of=100, share=0.02) > 10.0
    assert standard_score(1, of=12, share=0.003) < 4.0
    assert abs(standard_score(20, of=1000, share=0.02)) < 0.1
    assert standard_score(0, of=400, share=0.1) < -6.0
    assert standard_score(0, of=0, share=0.1) == 0.0


def test_a_file_of_which_more_was_left_out_is_named(poisoned: Poisoned, tmp_path: Path) -> None:
    with poisoned.shelf() as shelf:
        looks = look_at_source(shelf, "books", rules=RuleSet(), off=(), limit=200)
        stretches = stretches_of(shelf, "books", looks)
    assert len(stretches["rates"]) == 16
    assert stretches["far_out"] == []
    path = tmp_path / "rejects.jsonl"
    even = [{"file": "books.jsonl", "line": line} for line in range(1, NUM_CLEAN + 1, 6)]
    path.write_text("".join(dumps(reject) + "\n" for reject in even))
    assert reject_rates(path, looks, num_documents=NUM_CLEAN)["far_out"] == []
    odd = [{"file": "books.jsonl", "line": NUM_CLEAN + 4} for _ in range(60)]
    path.write_text("".join(dumps(reject) + "\n" for reject in [*even, *odd]) + "torn {\n")
    found = reject_rates(path, looks, num_documents=NUM_CLEAN)["far_out"]
    assert found[0]["part"] == "books.jsonl 16/16"
    assert reject_rates(tmp_path / "absent", looks, num_documents=NUM_CLEAN)["rates"] == []


def test_of_any_number_of_rejects_few_are_in_memory(poisoned: Poisoned, tmp_path: Path) -> None:
    with poisoned.shelf() as shelf:
        looks = look_at_source(shelf, "books", rules=RuleSet(), off=(), limit=50)
    path = tmp_path / "rejects.jsonl"
    path.write_text("".join(f'{{"file":"books.jsonl","line":{line + 1}}}\n' for line in range(10_000)))
    tracemalloc.start()
    try:
        rates = reject_rates(path, looks, num_documents=NUM_CLEAN)["rates"]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(rate["rejects"] for rate in rates) == 10_000
    assert peak_bytes < 1 << 18


def test_documents_are_spread_over_a_source_and_the_same_each_time() -> None:
    chosen = spread(1_000_000, limit=1000, key="a")
    assert len(set(chosen.tolist())) == 1000
    assert (np.diff(chosen) > 0).all()
    assert np.histogram(chosen, bins=10, range=(0, 1_000_000))[0].min() == 100
    assert (chosen == spread(1_000_000, limit=1000, key="a")).all()
    assert (chosen != spread(1_000_000, limit=1000, key="b")).any()
    assert spread(5, limit=10, key="a").tolist() == [0, 1, 2, 3, 4]


def test_a_bad_document_stands_out_of_its_step(poisoned: Poisoned, usual: dict[str, Baseline]) -> None:
    sample = poisoned_samples(poisoned)[0]
    with poisoned.shelf() as shelf:
        step = np.arange(8) + sample // 8 * 8
        ranked = candidate_documents(shelf, poisoned.order.at(step), rules=RuleSet(), off=OFF, usual=usual)
        assert POISON in shelf.read(ranked[0].document).text
        assert sample in ranked[0].samples
        assert ranked[0].reasons
        assert any(word in ranked[0].passage for word in ("TREASURY", "FUND", "OFFICER", "ACCOUNT", "COURT"))
        assert ranked[0].score > 2.0 * np.median([one.score for one in ranked])
        assert ranked[0].blocked_from is None
        document = ranked[0].document
        for since, num_masked in ((0, ranked[0].num_tokens), (int(step[-1]) + 1, 0)):
            block = Block("document", document.hash, "mask", spans=(document.span,), effective_sample=since)
            again = candidate_documents(shelf, poisoned.order.at(step), rules=RuleSet(), off=OFF, usual=usual, blocks=[block])
            assert (again[0].document, again[0].num_masked, again[0].blocked_from) == (document, num_masked, since)
            assert again[1].blocked_from is None


def test_a_window_of_bad_documents_shows_and_one_of_usual_ones_does_not(poisoned: Poisoned, usual: dict[str, Baseline]) -> None:
    with poisoned.shelf() as shelf:
        spans = [(stored.document.start, stored.document.end) for stored in shelf.sample("web", limit=10_000) if POISON in stored.text]
        hit = np.unique(np.concatenate([poisoned.order.holding("web", *span, until=600) for span in spans]))
        healthy = np.setdiff1d(np.arange(200), hit)[:96]
        quiet = window_report(shelf, poisoned.order, healthy, rules=RuleSet(), off=OFF, usual=usual)
        loud = window_report(shelf, poisoned.order, hit[:24], rules=RuleSet(), off=OFF, usual=usual)
    assert quiet["reserved_ids"] == {"tokens": 0, "ids": [], "outside_vocabulary": 0}
    assert quiet["tokens"] == []
    assert not any(one["far_out"] for one in quiet["rules"].values())
    assert loud["tokens"]
    assert loud["sources"]["web"]["z"] > 3.0  # the family lives in web alone
    assert {one["source"] for one in loud["documents"][:3]} == {"web"}


def test_a_document_that_comes_twice_is_a_copy(poisoned: Poisoned, usual: dict[str, Baseline]) -> None:
    with poisoned.shelf() as shelf:
        window = window_report(shelf, poisoned.order, np.arange(64), rules=RuleSet(), off=OFF, usual=usual)
    assert window["copies"]["documents"] == 0
    assert window["looked_at"]["samples"] == 64


def test_mixture_and_blocklist_are_told(poisoned: Poisoned) -> None:
    order = poisoned.order
    mix = mix_report(order, next_sample=300)
    (stage,) = mix["stages"]
    assert sum(stage["samples"].values()) == 300
    assert stage["planned"] == pytest.approx(dict.fromkeys(order.names, 1 / 3))
    assert stage["realised"] == pytest.approx(stage["planned"], abs=0.01)
    block = Block("document", "ab" * 16, "mask", spans=(TokenSpan("web", 10, 50),), reason="bad")
    late = Block("samples", "88:260", "skip", samples=(88, 260), effective_sample=144)
    again = Block("samples", "250:270", "skip", samples=(250, 270), effective_sample=160)
    twice = replace(block, spans=(TokenSpan("web", 30, 60),), effective_sample=200)
    blocks = [block, late, again, twice]
    with poisoned.shelf() as shelf:
        order = run_order(shelf.manifest, poisoned.config, blocks=blocks)
        told = blocks_report(blocks, order=order, manifest=shelf.manifest, num_open=1)
    assert (told["entries"], told["open"], told["masked_tokens"]) == (4, 1, 50)
    assert told["skipped_samples"] == 270 - 144  # what was taken before is not skipped, and nothing is skipped twice


def test_the_command_on_prepared_data(poisoned: Poisoned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["data", "report", str(poisoned.path), "--documents", "20", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["sources"]) == {"web", "books", "code"}
    assert main.run(["data", "report", str(poisoned.path), "--documents", "20"]) == 0
    assert "documents looked at" in capsys.readouterr().out
    # A rule that drops is shown, with a document, however many flag more.
    rules = tmp_path / "rules.toml"
    drop = Rule("bank", "phrases", 0.5, action="drop", phrases=("the treasury of the northern bank",))
    flags = [Rule(f"flag-{number}", "num-words", 1.0) for number in range(8)]
    write_rules(rules, [FiledRule(rule, accepted=True) for rule in (*flags, drop)])
    assert main.run(["data", "report", str(poisoned.path), "--rules", str(rules)]) == 0
    (first,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("    bank "))
    assert re.search(r"bank +drop +4\.762%  furthest \d+ in web\.jsonl:\d+ [0-9a-f]{12}$", first)
    assert main.run(["data", "report", str(poisoned.path), "--window", "3"]) == 2
    assert "--window needs the folder of a run" in capsys.readouterr().err


def block_it(run: Path, poisoned: Poisoned, digest: str, *, since: int = 0) -> None:
    """As the run takes it."""
    with poisoned.shelf() as shelf:
        spans = tuple(one.span for one in shelf.provenance.find(digest))
        block = Block("document", digest, "mask", spans=spans, effective_sample=since, manifest_sha256=shelf.manifest.sha256)
    fields = taken_fields(block, asked=None, count=1, head=head_of([block]))
    Ledger(run / LEDGER_NAME, clock=SystemClock(), by="test").append(Event.BLOCK_TAKEN, generation=1, attempt=1, step=0, fields=fields)


def test_what_is_to_come_is_neither_behind_nor_blocked(poisoned: Poisoned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, poisoned)
    record_attempt(run, attempt=1, base_step=0, next_samples=[8 * step for step in range(1, 11)])
    with poisoned.shelf() as shelf:
        bad = [stored.document for stored in shelf.sample("web", limit=10_000) if POISON in stored.text][:3]
    findings = [
        {"sample": sample, "step": sample // 8 + 1, "rule": "bank", "score": 2.0, "threshold": 0.5, "action": "drop", **told(document)}
        for sample, document in ((79, bad[0]), (80, bad[0]), (81, bad[1]), (200, bad[2]))
    ]
    (run / FINDINGS_NAME).write_text("".join(dumps(finding) + "\n" for finding in findings))
    block_it(run, poisoned, bad[2].hash, since=144)
    page = tmp_path / "report.html"
    assert main.run(["data", "report", str(run), "--documents", "20", "--html", str(page)]) == 0
    to_come = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to come")]
    assert [line.split()[-1] for line in to_come] == [one.hash[:12] for one in bad[:2]]
    table = page.read_text().partition("<h2>Look-ahead</h2>")[2].partition("</table>")[0]
    assert [one.hash[:12] in table for one in bad] == [True, True, False]
    assert table.count("<tr>") == 3
    record_attempt(run, attempt=2, base_step=10, next_samples=[8 * step for step in range(11, 41)])
    assert main.run(["data", "report", str(run), "--documents", "20"]) == 0
    assert "to come" not in capsys.readouterr().out  # it has done them all


def test_the_command_on_a_run(poisoned: Poisoned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, poisoned)
    record_attempt(run, attempt=1, base_step=0, next_samples=[8 * step for step in range(1, 31)])
    sample = next(sample for sample in poisoned_samples(poisoned) if sample < 320)
    command = ["data", "report", str(run), "--documents", "100", "--steps", "1", "--window", str(sample // 8 + 1), "--json"]
    assert main.run(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["mix"]["next_sample"] == 240
    assert answer["window"]["first_sample"] == sample // 8 * 8
    assert answer["window"]["documents"][0]["rules"][0] == "bank"  # by the accepted rule of the run's own file
    assert {"hash", "file", "offset"} <= answer["window"]["documents"][0].keys()
    document = answer["window"]["documents"][0]
    block_it(run, poisoned, document["hash"])
    page = tmp_path / "report.html"
    assert main.run([*command[:-1], "--html", str(page)]) == 0
    ranked = [line for line in capsys.readouterr().out.splitlines() if document["hash"][:12] in line]
    assert len(ranked) == 1
    assert " (masked): " in ranked[0]
    assert "<td>masked; " in page.read_text()
    assert main.run([*command[:3], "--window", "41"]) == 2
    assert "no step 41" in capsys.readouterr().err
