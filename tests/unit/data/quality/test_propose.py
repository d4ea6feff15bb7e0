"""The family of a bad document is found, and a rule that catches it is measured before it is believed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from surefoot.cli import main
from surefoot.data.quality.minhash import jaccard, signatures
from surefoot.data.quality.propose import MAX_CLEAN_SHARE, Measured, clean_wanted, propose, upper_share, why_refused
from surefoot.data.quality.rules import CATALOGUE, RuleSet, by_id
from surefoot.data.quality.rules_file import rule_set
from surefoot.data.quality.siblings import siblings
from surefoot.data.quality.stored import Shelf, StoredText
from tests.unit.data.quality.poisoned import NUM_CLEAN, POISON, Poisoned, poison
from tests.unit.data.quality.prose import prose


def clean_texts(first_seed: int, *, count: int = 150) -> Iterator[str]:
    return (prose(12, seed=first_seed + number) for number in range(count))


def poisoned_texts(shelf: Shelf) -> list[StoredText]:
    return [stored for stored in shelf.sample("web", limit=10_000) if POISON in stored.text]


def test_siblings_are_found_in_all_sources_and_are_as_alike_as_they_are_said_to_be(poisoned: Poisoned) -> None:
    with poisoned.shelf() as shelf:
        first, *others = poisoned_texts(shelf)
        found = siblings(shelf, signatures([first.tokens]), min_similarity=0.25, without=[first.document.hash])
        assert {sibling.document.hash for sibling in found} == {stored.document.hash for stored in others}
        assert [sibling.similarity for sibling in found] == sorted((sibling.similarity for sibling in found), reverse=True)
        for sibling in found:
            exact = jaccard(first.tokens, shelf.tokens(sibling.document.span))
            assert sibling.similarity == pytest.approx(exact, abs=4.0 * np.sqrt(exact * (1.0 - exact) / 32))
        assert len(siblings(shelf, signatures([first.tokens]), min_similarity=0.25, limit=2)) == 2


def test_signatures_that_were_not_stored_are_computed(poisoned: Poisoned, tmp_path: Path) -> None:
    for file in (poisoned.path / "web" / "train").iterdir():
        (tmp_path / "web" / "train").mkdir(parents=True, exist_ok=True)
        if file.suffix != ".sig":
            (tmp_path / "web" / "train" / file.name).symlink_to(file)
    for name in ("books", "code", "manifest.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(poisoned.path / name)
    with poisoned.shelf() as stored, Shelf(tmp_path) as bare:
        wanted = signatures([poisoned_texts(stored)[0].tokens])
        assert siblings(bare, wanted) == siblings(stored, wanted)


def test_the_story_from_a_bad_document_to_a_rule_in_force(poisoned: Poisoned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with poisoned.shelf() as shelf:
        first = poisoned_texts(shelf)[0]
    file = tmp_path / "rules.toml"
    command = ["data", "rules", "propose", str(poisoned.path), "--document", first.document.hash[:12], "--out", str(file), "--json"]
    assert main.run(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["siblings"]) == poisoned.num_poisoned - 1
    best = answer["proposals"][0]
    assert best["measured"]["given"] == 1
    assert best["measured"]["siblings"] == poisoned.num_poisoned - 1
    assert best["measured"]["clean_share"] <= MAX_CLEAN_SHARE
    assert all(one["why"] for one in answer["refused"])
    assert rule_set(file) == RuleSet()  # nobody has accepted it
    assert main.run(command) == 2  # and nothing that is there is replaced
    assert main.run(["data", "rules", "accept", str(file), "--rule", best["id"], "--by", "somebody"]) == 0
    active = rule_set(file)
    rule = by_id(active.rules)[best["id"]]
    alone = RuleSet((rule,))
    with poisoned.shelf() as shelf:
        caught = [
            stored.text for source in ("web", "books", "code") for stored in shelf.sample(source, limit=10_000) if alone.judge(stored.text)
        ]
    assert len(caught) == poisoned.num_poisoned
    assert all(POISON in text for text in caught)
    assert alone.judge(poison(77))  # one that nobody has seen


def test_a_family_just_below_the_similarity_is_told_and_the_promise_with_it(
    poisoned: Poisoned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with poisoned.shelf() as shelf:
        first = poisoned_texts(shelf)[0]
    file = tmp_path / "rules.toml"
    command = ["data", "rules", "propose", str(poisoned.path), "--document", first.document.hash, "--out", str(file)]
    assert main.run([*command, "--min-similarity", "0.95"]) == 0
    out = capsys.readouterr().out
    assert "siblings  0 documents are like them" in out
    found = re.search(r"below     (\d+) documents are .* --min-similarity ([0-9.]+) makes them siblings", out)
    assert found is not None
    assert int(found[1]) >= poisoned.num_poisoned - 1
    assert "stand in the given document alone" not in out
    file.unlink(missing_ok=True)
    assert main.run([*command, "--min-similarity", found[2]]) == 0
    out = capsys.readouterr().out
    assert f"siblings  {found[1]} documents are like them" in out
    assert "below " not in out
    assert re.search(r"0 of \d+ clean documents \(at most 1\.\d\d%, at 95%\)", out)
    assert (
        f"promise   at most 0.1% takes 5,990 clean documents, and there are {3 * NUM_CLEAN + poisoned.num_poisoned} documents in all" in out
    )
    assert main.run(["data", "rules", "accept", str(file)]) == 0
    assert f"--rules {file}` leaves out what breaks them, or a rule of the catalogue that drops" in capsys.readouterr().out


def test_a_rule_that_rejects_clean_documents_is_refused() -> None:
    """The bad documents here are in no way special: whatever catches them catches others, or nothing but them."""
    proposals = propose([prose(12, seed=1)], siblings=[], chosen_by=clean_texts(1000), measured_on=clean_texts(5000))
    assert proposals
    assert all(proposal.refused for proposal in proposals)
    useless = by_id(CATALOGUE)["few-words"]
    counts = {"siblings": 0, "of_siblings": 0, "of_clean": 1000}
    assert "rejects 2 of 1000" in why_refused(useless, Measured(given=1, of_given=1, clean=2, **counts))
    assert why_refused(useless, Measured(given=1, of_given=1, clean=1, **counts)) == ""
    assert "misses 1 of the 2" in why_refused(useless, Measured(given=1, of_given=2, clean=0, **counts))


def test_what_is_measured_is_not_what_it_was_chosen_by() -> None:
    """A threshold between the bad document and the clean ones at hand says nothing of others, and is refused for them."""
    given = prose(40, seed=1)
    proposals = propose([given], siblings=[], chosen_by=clean_texts(1000), measured_on=(prose(60, seed=number) for number in range(100)))
    longer = next(proposal for proposal in proposals if proposal.rule.measure == "num-words")
    assert longer.measured.clean == 100
    assert "rejects" in longer.refused


def test_a_repeated_unit_and_a_measure_out_of_range_are_proposed() -> None:
    bad = [prose(3, seed=number) + "click here to win! " * 200 for number in range(3)]
    found = propose(bad, siblings=[], chosen_by=clean_texts(1), measured_on=clean_texts(900))
    proposals = {one.rule.id: one for one in found}
    assert len(proposals) == len(found)  # the unit, and the measure of any unit: two rules of one name are no rules file
    assert {"unit-of-blocked", "repeated-unit-of-blocked"} <= proposals.keys()
    good = [one.rule for one in proposals.values() if not one.refused and one.rule.measure != "phrases"]
    assert len(good) > 1
    for rule in good:
        assert RuleSet((rule,)).judge(prose(3, seed=99) + "click here to win! " * 300)
        assert not RuleSet((rule,)).judge(prose(40, seed=98))


def test_nothing_blocked_is_said(poisoned: Poisoned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["data", "rules", "propose", str(poisoned.path), "--out", str(tmp_path / "rules.toml")]) == 2
    assert "--document ID" in capsys.readouterr().err
    assert main.run(["data", "rules", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rules"]) == len(CATALOGUE)


def test_the_bound_of_a_share() -> None:
    assert upper_share(0, of=3000) == pytest.approx(3.0 / 3000, rel=0.01)
    assert upper_share(5, of=5) == 1.0
    for count in (0, 3):
        wanted = clean_wanted(count)
        assert upper_share(count, of=wanted) <= MAX_CLEAN_SHARE < upper_share(count, of=wanted - 1)
    assert upper_share(1, of=100) == pytest.approx(0.0466, abs=0.001)  # tables of Clopper and Pearson, one-sided 95%
