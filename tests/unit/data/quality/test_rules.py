"""Each rule of the catalogue fires on what it is for, and leaves plain text alone."""

from __future__ import annotations

import base64
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.core.errors import ConfigError
from surefoot.data.quality.measures import Subject, byte_run, unbroken_run
from surefoot.data.quality.repetition import repeated_unit_of, repeated_unit_share, unit_share
from surefoot.data.quality.rules import CATALOGUE, NATURAL_LANGUAGE, Rule, RuleSet
from surefoot.data.quality.rules_file import FiledRule, accept, read_rules, rule_set, write_rules
from tests.unit.data.quality.prose import NOUNS, prose

BROKEN = {
    "byte-run": prose(60) + "-" * 1001,
    "repeated-unit": prose(20) + "buy now and save! " * 400,
    "zlib-ratio": "".join(f"the same line but for its number, which is {number // 40} in this place\n" for number in range(4000)),
    "byte-entropy": "".join(random.Random(1).choice("ab c") for _ in range(2000)),
    "broken-characters": prose(60) + "\ufffd" * 20,
    "unbroken-run": prose(60) + base64.b64encode(random.Random(2).randbytes(900)).decode(),
    "mojibake": prose(20) + "caf\u00c3\u00a9 na\u00c3\u00afve d\u00c3\u00a9j\u00c3\u00a0 vu " * 6,
    "html-remains": '<a href="x">one</a>&nbsp;<script>run()</script>\n' * 30 + prose(10),
    "few-words": "The letter of the garden.",
    "many-words": "a word " * 50_001,
    "short-words": "a b c of to be the d e f " * 30,
    "long-words": "internationalisation compartmentalisation of the characteristically misunderstood " * 20,
    "symbols-per-word": prose(20).replace(" ", " # "),
    "words-with-letters": prose(10) + "17 23 99 : = " * 60,
    "stop-words": " ".join(NOUNS * 10),
    "repeated-lines": "\n".join([prose(3).strip()] * 3),
    "repeated-line-characters": prose(12) + prose(12),
    "top-2-gram": "garden engine " * 40 + prose(10),
    "top-3-gram": "garden engine kettle " * 40 + prose(10),
    "top-4-gram": "garden engine kettle bridge " * 40 + prose(10),
    "repeated-5-grams": prose(30) + prose(10),
    "repeated-10-grams": prose(30) + prose(10),
    "lines-that-end": prose(30).replace(".\n", "\n"),
    "short-lines": "\n".join(prose(30).split(" ")),
    "newlines-per-word": prose(30).replace(" ", "\n"),
}


def broken_by(text: str, *, num_tokens: int = 0) -> set[str]:
    return {hit.rule for hit in RuleSet().judge(text, num_tokens=num_tokens)}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_rule_fires_on_what_it_is_for(rule: str) -> None:
    hit = next(hit for hit in RuleSet().judge(BROKEN[rule]) if hit.rule == rule)
    assert hit.threshold == next(known.threshold for known in CATALOGUE if known.id == rule)


def test_every_rule_is_tried_here() -> None:
    assert set(BROKEN) | {"tokens-per-byte"} == {rule.id for rule in CATALOGUE}


def test_plain_text_breaks_no_rule() -> None:
    assert broken_by(prose(60), num_tokens=len(prose(60)) // 4) == set()


def test_tokens_are_judged_only_where_they_are_known() -> None:
    text = prose(60)
    assert "tokens-per-byte" in broken_by(text, num_tokens=len(text))
    assert "tokens-per-byte" not in broken_by(text)


def test_small_documents_are_not_judged_by_shares_of_bytes() -> None:
    assert broken_by("aaaa " * 12, num_tokens=60) & {"zlib-ratio", "byte-entropy", "repeated-unit", "tokens-per-byte"} == set()


def test_code_and_scripts_without_blanks_are_not_dropped() -> None:
    code = Path(__file__).read_text()
    draw = random.Random(3)
    chinese = "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(4000))
    for text in (code, chinese):
        assert [hit for hit in RuleSet().judge(text) if hit.action == "drop"] == []
    assert "unbroken-run" not in broken_by(chinese)


def test_a_source_switches_rules_off() -> None:
    off = RuleSet().judge(BROKEN["stop-words"], off=[NATURAL_LANGUAGE])
    assert {hit.rule for hit in off} <= {rule.id for rule in CATALOGUE if not rule.natural_language}
    assert "byte-run" not in {hit.rule for hit in RuleSet().judge(BROKEN["byte-run"], off=["byte-run"])}
    RuleSet().refuse_unknown(["byte-run", NATURAL_LANGUAGE], where="rules_off")
    with pytest.raises(ConfigError, match="byte-rum"):
        RuleSet().refuse_unknown(["byte-rum"], where="rules_off")


@pytest.mark.parametrize("period", [1, 2, 13, 14, 64, 200, 256])
def test_a_repeated_unit_is_found_whatever_its_length(period: int) -> None:
    unit = random.Random(period).randbytes(period)
    clean = random.Random(0).randbytes(3000)
    data = clean + unit * (6000 // period) + clean
    assert repeated_unit_share(data) == pytest.approx(6000 / len(data), abs=0.05)
    assert unit_share(data, repeated_unit_of(data)) == pytest.approx(6000 / len(data), abs=0.07)
    assert repeated_unit_share(clean) == 0.0
    assert repeated_unit_of(clean) == b""


def test_runs_are_measured_over_the_edges_of_what_is_read_at_once() -> None:
    edge = 1 << 20
    assert byte_run(Subject("ab" * (edge // 2 - 50) + "c" * 300 + "ab" * 50)) == 300
    assert unbroken_run(Subject("a " * (edge // 2 - 50) + "c" * 300 + " a" * 50)) == 300
    assert byte_run(Subject("a")) == 1
    assert byte_run(Subject("")) == 0
    assert unbroken_run(Subject("word")) == 4


def test_a_rule_of_ones_own_holds_for_the_sources_it_names() -> None:
    rule = Rule("farm", "phrases", 1.0, action="drop", phrases=("cheap pills here", "best offer"), sources=("web",))
    rules = RuleSet((rule,))
    text = "Cheap things. cheap  pills\nhere and the best offer of all."
    assert [hit.rule for hit in rules.judge(text, source="web")] == ["farm"]
    assert rules.judge(text, source="books") == []
    assert rules.judge(text.replace("pills", "bread"), source="web") == []
    unit = RuleSet((Rule("unit", "unit", 0.2, unit="ab; "),))
    assert unit.judge("ab; " * 10 + "x" * 40, source="web")[0].score == pytest.approx(0.5)
    assert unit.judge("ab; " + "x" * 40, source="web") == []
    assert pickle.loads(pickle.dumps(rules)) == rules


def test_only_accepted_rules_of_a_file_are_used(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    own = Rule("farm", "phrases", 1.0, action="drop", phrases=('say "no"', "tab\there"))
    lower = next(rule for rule in CATALOGUE if rule.id == "zlib-ratio")
    filed = [FiledRule(own, measured={"clean_rejected": 0}), FiledRule(replace(lower, threshold=4.0))]
    write_rules(path, filed, about=["found in a test"])
    assert read_rules(path) == filed
    assert rule_set(path) == RuleSet()
    accepted = accept(read_rules(path), ids=["farm"], by="somebody", utc="2026-01-01", where="rules")
    write_rules(path, accepted)
    assert [one.accepted for one in read_rules(path)] == [True, False]
    active = rule_set(path)
    assert own in active.rules
    assert lower in active.rules
    assert active.sha256 != RuleSet().sha256
    write_rules(path, accept(read_rules(path), ids=[], by="somebody else", utc="2026-01-02", where="rules"))
    assert next(rule.threshold for rule in rule_set(path).rules if rule.id == "zlib-ratio") == 4.0
    assert [one.accepted_by for one in read_rules(path)] == ["somebody", "somebody else"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "format_version is None"),
        ("format_version = 1\n[[rule]]\nthreshold = 1", "without an id"),
        ('format_version = 1\n[[rule]]\nid = "x"\nthreshold = 1', "no measure"),
        ('format_version = 1\n[[rule]]\nid = "zlib-ratio"\nthreshhold = 1', "threshhold"),
        ('format_version = 1\n[[rule]]\nid = "zlib-ratio"\nthreshold = "9"', "threshold is '9'"),
        ('format_version = 1\n[[rule]]\nid = "zlib-ratio"\naction = "burn"', "action is 'burn'"),
        ('format_version = 1\n[[rule]]\nid = "x"\nmeasure = "phrases"\nthreshold = 1', "no phrases"),
        ('format_version = 1\n[[rule]]\nid = "byte-run"\n[[rule]]\nid = "byte-run"', "two rules"),
        ('format_version = 1\n[[rule]]\nid = "byte-run"\naccepted = "yes"', "accepted is 'yes'"),
        ("format_version = ", "not TOML"),
    ],
)
def test_what_is_no_rules_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_rules(path)


def test_a_rule_that_is_not_there_cannot_be_accepted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nope'"):
        accept([], ids=["nope"], by="me", utc="", where="rules")
    with pytest.raises(ConfigError, match="cannot read"):
        read_rules(tmp_path / "absent.toml")
