"""Quality rules: a measure of a document, a threshold, and what follows. `judge` says which rules a text breaks, and by how much.

A rule drops only what is broken in every kind of text. Rules on words, sentences and repetition are for natural language, where code and
tables fail them all: they flag, and a source switches them off with `rules_off = ["natural-language"]`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from surefoot.core.errors import ConfigError
from surefoot.core.hashing import sha256_json
from surefoot.data.quality.measures import Subject, phrases_found, share_of_unit

Action = Literal["drop", "flag"]
Fires = Literal["above", "below"]
NATURAL_LANGUAGE: Final = "natural-language"
OF_A_FILE: Final = ("phrases", "unit")
"""Measures that need more than the text: what to look for stands in the rule."""

_BYTES_OF_A_VERDICT: Final = 1024  # below it a single odd line decides a share


@dataclass(frozen=True, slots=True)
class Rule:
    """`measure` is a name of `MEASURES`, "phrases" or "unit". Documents below `min_bytes` pass; `sources` empty is all of them.

    `anchor` says where the threshold is from.
    """

    id: str
    measure: str
    threshold: float
    action: Action = "flag"
    fires: Fires = "above"
    min_bytes: int = 0
    natural_language: bool = False
    sources: tuple[str, ...] = ()
    phrases: tuple[str, ...] = ()
    unit: str = ""
    anchor: str = ""

    def score(self, subject: Subject) -> float:
        if self.measure == "phrases":
            return phrases_found(subject, self.phrases)
        if self.measure == "unit":
            return share_of_unit(subject, self.unit)
        return subject.measured(self.measure)

    def is_broken_by(self, score: float) -> bool:
        return score > self.threshold if self.fires == "above" else score < self.threshold

    def is_asked(self, *, source: str, off: Collection[str]) -> bool:
        """Whether documents of `source` are put to it. `off` names rules, or "natural-language"."""
        if self.id in off or (self.natural_language and NATURAL_LANGUAGE in off):
            return False
        return not self.sources or source in self.sources


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that a document breaks."""

    rule: str
    score: float
    threshold: float
    action: Action


def _rule(id: str, threshold: float, action: Action, anchor: str, *, measure: str = "", **more: Any) -> Rule:
    return Rule(id=id, measure=measure or id, threshold=threshold, action=action, anchor=anchor, **more)


def _words(id: str, threshold: float, anchor: str, *, measure: str = "", fires: Fires = "above", min_bytes: int = 0) -> Rule:
    return Rule(id, measure or id, threshold, fires=fires, min_bytes=min_bytes, natural_language=True, anchor=anchor)


_GOPHER, _C4, _FINEWEB = "Gopher, arXiv 2112.11446", "C4, arXiv 1910.10683", "FineWeb, arXiv 2406.17557"
CATALOGUE: Final[tuple[Rule, ...]] = (
    _rule("byte-run", 1000.0, "drop", "ours: a ruler or a row of blanks is shorter"),
    _rule("repeated-unit", 0.5, "drop", "ours: half the text is one unit of at most 256 bytes", min_bytes=256),
    _rule("zlib-ratio", 8.0, "drop", "ours: 99% of real text stays below 5.2", min_bytes=_BYTES_OF_A_VERDICT),
    _rule("byte-entropy", 3.0, "drop", "ours; no upper bound: CJK text reaches 6.4 bits", fires="below", min_bytes=_BYTES_OF_A_VERDICT),
    _rule("broken-characters", 0.001, "drop", "ours: one in a thousand", min_bytes=_BYTES_OF_A_VERDICT),
    _rule("unbroken-run", 1000.0, "flag", f"the longest word of {_C4}"),
    _rule("mojibake", 1.0, "flag", "ours", min_bytes=_BYTES_OF_A_VERDICT),
    _rule("html-remains", 3.0, "flag", "ours", min_bytes=_BYTES_OF_A_VERDICT),
    _rule("tokens-per-byte", 0.9, "flag", "ours: the tokenizer does not know this script or encoding", min_bytes=256),
    _words("few-words", 50.0, _GOPHER, measure="num-words", fires="below"),
    _words("many-words", 100_000.0, _GOPHER, measure="num-words"),
    _words("short-words", 3.0, _GOPHER, measure="mean-word-length", fires="below"),
    _words("long-words", 10.0, _GOPHER, measure="mean-word-length"),
    _words("symbols-per-word", 0.1, _GOPHER),
    _words("words-with-letters", 0.8, _GOPHER, fires="below"),
    _words("stop-words", 2.0, f"{_GOPHER}; English alone", fires="below"),
    _words("repeated-lines", 0.3, _GOPHER),
    _words("repeated-line-characters", 0.2, _GOPHER),
    _words("top-2-gram", 0.2, _GOPHER),
    _words("top-3-gram", 0.18, _GOPHER),
    _words("top-4-gram", 0.16, _GOPHER),
    _words("repeated-5-grams", 0.15, _GOPHER),
    _words("repeated-10-grams", 0.1, _GOPHER),
    _words("lines-that-end", 0.12, _FINEWEB, fires="below"),
    _words("short-lines", 0.67, _FINEWEB),
    _words("newlines-per-word", 0.3, _FINEWEB),
)
"""The rules that are there without a rules file."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules that hold together, each id once. Plain data: it goes to other processes as it is."""

    rules: tuple[Rule, ...] = CATALOGUE

    @property
    def sha256(self) -> str:
        """What they decide, as one hash: the words about them are not in it."""
        return sha256_json([{**asdict(rule), "anchor": ""} for rule in sorted(self.rules, key=lambda rule: rule.id)])

    def judge(self, text: str, *, source: str = "", off: Collection[str] = (), num_tokens: int = 0) -> list[Hit]:
        """The rules that `text` breaks, those that drop first. `off` is a source's `rules_off`; `num_tokens` 0 leaves tokens unjudged."""
        return self.judge_subject(Subject(text, num_tokens=num_tokens), source=source, off=off)

    def judge_subject(self, subject: Subject, *, source: str = "", off: Collection[str] = ()) -> list[Hit]:
        """The same for a text of which more is asked."""
        hits = []
        for rule in self.rules:
            if subject.num_bytes < rule.min_bytes or not rule.is_asked(source=source, off=off):
                continue
            if rule.measure == "tokens-per-byte" and not subject.num_tokens:
                continue
            score = rule.score(subject)
            if rule.is_broken_by(score):
                hits.append(Hit(rule=rule.id, score=score, threshold=rule.threshold, action=rule.action))
        return sorted(hits, key=lambda hit: hit.action)

    def refuse_unknown(self, names: Collection[str], *, where: str) -> None:
        """Raises ConfigError when `rules_off` names a rule that is not there."""
        known = {rule.id for rule in self.rules} | {NATURAL_LANGUAGE}
        if unknown := sorted(set(names) - known):
            raise ConfigError(
                f"no rule {unknown[0]!r}", where=where, hint=f"`surefoot data rules list` shows them; {NATURAL_LANGUAGE!r} names a group"
            )


def by_id(rules: Collection[Rule]) -> Mapping[str, Rule]:
    return {rule.id: rule for rule in rules}
