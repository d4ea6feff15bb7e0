"""Rules from bad documents: what they have in common that clean documents lack, each measured before a person is asked to accept it.

One part of the clean documents is there to choose by, the other to measure on: a rule is not praised for what it was made from. A rule that
misses a given document or rejects too many clean ones, and phrases that catch nothing but one given document, are refused and told with the
reason. A measure or a unit that catches it alone may be proposed: it says what is wrong with the text, and others will have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from surefoot.data.quality.measures import Subject
from surefoot.data.quality.repetition import repeated_unit_of
from surefoot.data.quality.rules import CATALOGUE, Rule
from surefoot.data.quality.rules_file import FiledRule

MAX_CLEAN_SHARE: Final = 0.001
"""Share of clean documents that a proposed rule may reject."""
_MEASURES: Final = {rule.measure: rule.fires for rule in CATALOGUE if rule.measure != "tokens-per-byte"}
_MAX_MEASURES: Final = 4
_PHRASE_WORDS: Final = 6
_MAX_PHRASES: Final = 16
_PHRASES_OF_A_HIT: Final = 2
_PHRASES_HELD: Final = 8
_MIN_UNIT_CHARACTERS: Final = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rule does to the documents that it was made for, to their siblings, and to clean ones that it was not made with."""

    given: int
    of_given: int
    siblings: int
    of_siblings: int
    clean: int
    of_clean: int

    @property
    def clean_share(self) -> float:
        return self.clean / max(1, self.of_clean)

    @property
    def clean_at_most(self) -> float:
        """Upper end of a one-sided 95% interval: 3 / n where nothing was rejected."""
        return upper_share(self.clean, of=self.of_clean)

    def as_json(self) -> dict[str, int | float]:
        counts: dict[str, int | float] = {name: getattr(self, name) for name in self.__slots__}
        return {**counts, "clean_share": self.clean_share, "clean_at_most": self.clean_at_most}


@dataclass(frozen=True, slots=True)
class Proposal:
    """A rule, what it does, and why it is refused; empty when it is proposed."""

    rule: Rule
    measured: Measured
    refused: str = ""

    def as_filed(self) -> FiledRule:
        return FiledRule(self.rule, measured=self.measured.as_json())


def propose(
    given: Sequence[str],
    *,
    siblings: Sequence[str],
    chosen_by: Iterable[str],
    measured_on: Iterable[str],
    max_clean_share: float = MAX_CLEAN_SHARE,
    sources: tuple[str, ...] = (),
) -> list[Proposal]:
    """Rules that tell the texts `given` from clean ones, those that are proposed first, and of these what catches most.

    `siblings` are texts like `given`, to learn from beside them. `chosen_by` and `measured_on` are clean ones, each gone through once with
    one text held at a time. `sources` limits the rules to documents of those.
    """
    bad, alike = [Subject(text) for text in given], [Subject(text) for text in siblings]
    rules = list(candidate_rules(bad, siblings=alike, clean=map(Subject, chosen_by), sources=sources))
    of_clean, broken = 0, Counter[str]()
    for subject in map(Subject, measured_on):
        of_clean += 1
        broken.update(rule.id for rule in rules if _breaks(rule, subject))
    proposals = []
    for rule in rules:
        caught, more = (sum(_breaks(rule, subject) for subject in subjects) for subjects in (bad, alike))
        measured = Measured(caught, len(bad), more, len(alike), broken[rule.id], of_clean)
        proposals.append(Proposal(rule, measured, refused=why_refused(rule, measured, max_clean_share=max_clean_share)))
    return sorted(proposals, key=lambda one: (bool(one.refused), -one.measured.siblings, one.measured.clean, one.rule.id))


def why_refused(rule: Rule, measured: Measured, *, max_clean_share: float = MAX_CLEAN_SHARE) -> str:
    """The reason not to propose it, empty when there is none."""
    if measured.given < measured.of_given:
        return f"it misses {measured.of_given - measured.given} of the {measured.of_given} given documents"
    if measured.clean_share > max_clean_share:
        return f"it rejects {measured.clean} of {measured.of_clean} clean documents, more than {max_clean_share:.2%}"
    if rule.phrases and measured.given + measured.siblings < 2:
        return "its phrases stand in the given document and in no sibling: for that one alone a block is enough"
    return ""


def upper_share(count: int, *, of: int) -> float:
    """The largest share of which `count` or fewer of `of` would still be seen in one try of 20 (Clopper and Pearson)."""
    if count >= of:
        return 1.0
    low, high = count / of, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _at_most(count, of=of, share=middle) > 0.05 else (low, middle)
    return high


def clean_wanted(count: int, *, max_clean_share: float = MAX_CLEAN_SHARE) -> int:
    """How many clean documents must be measured on, for `count` rejected ones to promise no more than that share."""
    low, high = count, 1
    while upper_share(count, of=high) > max_clean_share:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if upper_share(count, of=middle) > max_clean_share else (low, middle)
    return high


def candidate_rules(
    given: Sequence[Subject], *, siblings: Sequence[Subject], clean: Iterable[Subject], sources: tuple[str, ...] = ()
) -> Iterator[Rule]:
    """What might tell them apart: measures whose values do not overlap, a repeated unit, phrases that they share."""
    bad = [*given, *siblings]
    phrases = Counter(phrase for subject in bad for phrase in _phrases_of(subject))
    nearest: dict[str, float] = {}
    for subject in clean:
        for phrase in _phrases_of(subject) & phrases.keys():
            del phrases[phrase]
        for measure, fires in _MEASURES.items():
            value = subject.measured(measure)
            nearest[measure] = (max if fires == "above" else min)(value, nearest.get(measure, value))
    yield from _by_measures(given, nearest=nearest, sources=sources)
    yield from _by_unit(given, sources=sources)
    yield from _by_phrases(bad, phrases=phrases, num_given=len(given), sources=sources)


def _by_measures(given: Sequence[Subject], *, nearest: dict[str, float], sources: tuple[str, ...]) -> list[Rule]:
    """Of each measure the threshold half-way between the given documents and the clean one nearest to them; the widest gaps first."""
    found: list[tuple[float, Rule]] = []
    for measure, near in nearest.items():
        fires = _MEASURES[measure]
        values = [subject.measured(measure) for subject in given]
        far = min(values) if fires == "above" else max(values)
        gap = far - near if fires == "above" else near - far
        if gap > 0.0:
            rule = Rule(f"{measure}-of-blocked", measure, (near + far) / 2.0, "drop", fires, sources=sources)
            found.append((gap / max(abs(near), abs(far)), rule))
    return [rule for _, rule in sorted(found, key=lambda pair: -pair[0])[:_MAX_MEASURES]]


def _by_unit(given: Sequence[Subject], *, sources: tuple[str, ...]) -> Iterator[Rule]:
    """The unit that the first given document repeats, if the others repeat it too; half of the least share is the threshold."""
    unit = repeated_unit_of(given[0].data).decode("utf-8", errors="ignore")
    if len(unit) < _MIN_UNIT_CHARACTERS or not unit.strip():
        return
    rule = Rule("unit-of-blocked", "unit", 0.0, "drop", unit=unit, sources=sources)
    if (least := min(rule.score(subject) for subject in given)) > 0.0:
        yield Rule(rule.id, rule.measure, least / 2.0, "drop", unit=unit, sources=sources)


def _by_phrases(bad: Sequence[Subject], *, phrases: Counter[str], num_given: int, sources: tuple[str, ...]) -> Iterator[Rule]:
    """Runs of six words, those that most of the bad documents share first, until each holds some. Two make a hit.

    Of equal ones no place in the text is preferred: a checksum decides.
    """
    held = [_phrases_of(subject) for subject in bad]
    chosen: list[str] = []
    num_held = [0] * len(bad)
    for phrase, _ in sorted(phrases.items(), key=lambda pair: (-pair[1], crc32(pair[0].encode()))):
        holders = [index for index, of_one in enumerate(held) if phrase in of_one]
        if any(num_held[index] < _PHRASES_HELD for index in holders) and not _overlaps(phrase, chosen):
            chosen.append(phrase)
            for index in holders:
                num_held[index] += 1
        if len(chosen) >= _MAX_PHRASES:
            break
    if least := min(num_held[:num_given]):
        wanted = min(_PHRASES_OF_A_HIT, least)
        yield Rule("phrases-of-blocked", "phrases", wanted - 0.5, "drop", phrases=tuple(sorted(chosen)), sources=sources)


def _overlaps(phrase: str, chosen: Iterable[str]) -> bool:
    """Whether it is one of `chosen` shifted by up to three words: two that overlap are hardly two."""
    words = phrase.split()
    for other in map(str.split, chosen):
        if any(words[shift:] == other[:-shift] or other[shift:] == words[:-shift] for shift in range(1, 4)):
            return True
    return False


def _phrases_of(subject: Subject) -> set[str]:
    words = subject.words
    return {" ".join(words[at : at + _PHRASE_WORDS]) for at in range(len(words) - _PHRASE_WORDS + 1)}


def _breaks(rule: Rule, subject: Subject) -> bool:
    return subject.num_bytes >= rule.min_bytes and rule.is_broken_by(rule.score(subject))


def _at_most(count: int, *, of: int, share: float) -> float:
    """Chance of at most `count` of `of`, each with `share`."""
    term = total = (1.0 - share) ** of
    for number in range(1, count + 1):
        term *= (of - number + 1) / number * share / (1.0 - share)
        total += term
    return total
