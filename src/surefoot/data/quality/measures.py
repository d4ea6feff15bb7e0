"""What a quality rule looks at: numbers of one document, each a pure function of its text, on bytes and without a table of the text.

Anchors of the measures on words, lines and repetition: Gopher (arXiv 2112.11446, appendix A), C4 (arXiv 1910.10683), FineWeb (arXiv
2406.17557).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.data.quality.repetition import WordGrams, repeated_unit_share, unit_share

_CHUNK_BYTES: Final = 1 << 20  # a document may have tens of megabytes; a position of each byte would take eight times that
_REPLACEMENT: Final = "\ufffd".encode()
_C1_CONTROL: Final = re.compile(rb"\xc2[\x80-\x9f]")
_CONTROL_BYTES: Final = (*range(9), *range(14, 32), 127)  # from tab (9) to return (13) they are text
# UTF-8 that was read as Latin-1 or Windows-1252 and encoded once more.
_MOJIBAKE: Final = (b"\xc3\x83\xc2", b"\xc3\x82\xc2", b"\xc3\xa2\xe2\x82\xac")
_HTML: Final = (b"<script", b"&nbsp;", b"href=")
_LETTER: Final = re.compile(r"[^\W\d_]")
_STOP_WORDS: Final = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})  # of Gopher; English alone
_SENTENCE_ENDS: Final = (".", "!", "?", '"', "'", "\u2019", "\u201d", "\u2026", ":", ";")
_SHORT_LINE_CHARACTERS: Final = 30
_BREAKS_A_WORD: Final = np.array([byte <= 32 or byte >= 127 for byte in range(256)])


class Subject:
    """One document under judgement. What several measures need is computed once. `num_tokens` 0 is not known."""

    def __init__(self, text: str, *, num_tokens: int = 0) -> None:
        self.text = text
        self.num_tokens = num_tokens
        self.data = text.encode()
        self.bytes_N = np.frombuffer(self.data, dtype=np.uint8)
        self._measured: dict[str, float] = {}

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def measured(self, measure: str) -> float:
        """One of `MEASURES`, computed once."""
        if measure not in self._measured:
            self._measured[measure] = MEASURES[measure](self)
        return self._measured[measure]

    @cached_property
    def byte_counts(self) -> npt.NDArray[np.int64]:
        counts = np.zeros(256, dtype=np.int64)
        for chunk in self._chunks():
            counts += np.bincount(chunk, minlength=256)
        return counts

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Those that are not blank, without the blanks around them."""
        return [stripped for line in self.text.split("\n") if (stripped := line.strip())]

    @cached_property
    def grams(self) -> WordGrams:
        return WordGrams(self.words)

    def longest_gap(self, breaks: Callable[[npt.NDArray[np.uint8]], npt.NDArray[Any]], *, overlap: int = 0) -> int:
        """The largest distance of two neighbours among the positions where `breaks` is true, the ends of the text being two of them.

        `breaks` is asked of a chunk and `overlap` bytes behind it, for so many positions fewer than it is given.
        """
        last, longest, start = -1, 0, 0
        for start in range(0, self.num_bytes, _CHUNK_BYTES):
            positions = np.flatnonzero(breaks(self.bytes_N[start : start + _CHUNK_BYTES + overlap])) + start
            if positions.size:
                longest = max(longest, int(np.diff(positions, prepend=last).max()))
                last = int(positions[-1])
        return max(longest, self.num_bytes - overlap - last) if self.num_bytes else 0

    def _chunks(self) -> Iterator[npt.NDArray[np.uint8]]:
        return (self.bytes_N[start : start + _CHUNK_BYTES] for start in range(0, self.num_bytes, _CHUNK_BYTES))

    def count_per_kib(self, patterns: tuple[bytes, ...]) -> float:
        return 1024.0 * sum(self.data.count(pattern) for pattern in patterns) / max(1, self.num_bytes)


def byte_run(subject: Subject) -> float:
    """Bytes of the longest run of one byte."""
    return float(subject.longest_gap(lambda chunk: chunk[1:] != chunk[:-1], overlap=1))


def unbroken_run(subject: Subject) -> float:
    """Characters of the longest run of printable ASCII without a blank: base64, hex, minified code. Scripts without blanks do not count."""
    return float(max(0, subject.longest_gap(lambda chunk: _BREAKS_A_WORD[chunk]) - 1))


def repeated_unit(subject: Subject) -> float:
    return repeated_unit_share(subject.data)


def zlib_ratio(subject: Subject) -> float:
    """Bytes over their size under zlib at level 6."""
    return subject.num_bytes / len(zlib.compress(subject.data, 6))


def byte_entropy(subject: Subject) -> float:
    """Bits per byte, of single bytes."""
    shares = subject.byte_counts[subject.byte_counts > 0] / max(1, subject.num_bytes)
    return float(-(shares * np.log2(shares)).sum())


def broken_characters(subject: Subject) -> float:
    """Share of the characters that are U+FFFD or a control character."""
    controls = int(subject.byte_counts[list(_CONTROL_BYTES)].sum()) + sum(1 for _ in _C1_CONTROL.finditer(subject.data))
    return (subject.data.count(_REPLACEMENT) + controls) / max(1, len(subject.text))


def mojibake(subject: Subject) -> float:
    """Pairs per KiB that come of UTF-8 which was decoded as Latin-1."""
    return subject.count_per_kib(_MOJIBAKE)


def html_remains(subject: Subject) -> float:
    """ "<script", "&nbsp;" and "href=" per KiB."""
    return subject.count_per_kib(_HTML)


def num_words(subject: Subject) -> float:
    return float(len(subject.words))


def mean_word_length(subject: Subject) -> float:
    return sum(map(len, subject.words)) / max(1, len(subject.words))


def symbols_per_word(subject: Subject) -> float:
    """Hash signs and ellipses."""
    return (subject.text.count("#") + subject.text.count("...") + subject.text.count("\u2026")) / max(1, len(subject.words))


def words_with_letters(subject: Subject) -> float:
    """Share of the words that hold a letter."""
    mixed = [word for word in subject.words if not word.isalpha()]
    without = sum(_LETTER.search(word) is None for word in mixed)
    return 1.0 - without / len(subject.words) if subject.words else 0.0


def stop_words(subject: Subject) -> float:
    """How many of the, be, to, of, and, that, have, with there are."""
    return float(len(_STOP_WORDS.intersection(subject.words)))


def repeated_lines(subject: Subject) -> float:
    """Share of the lines that stood there before."""
    return 1.0 - len(set(subject.lines)) / len(subject.lines) if subject.lines else 0.0


def repeated_line_characters(subject: Subject) -> float:
    """Share of the characters in lines that stood there before."""
    total = sum(map(len, subject.lines))
    return 1.0 - sum(map(len, set(subject.lines))) / total if total else 0.0


def lines_that_end(subject: Subject) -> float:
    """Share of the lines that end as sentences do."""
    return sum(line.endswith(_SENTENCE_ENDS) for line in subject.lines) / max(1, len(subject.lines))


def short_lines(subject: Subject) -> float:
    """Share of the lines below 30 characters."""
    return sum(len(line) < _SHORT_LINE_CHARACTERS for line in subject.lines) / max(1, len(subject.lines))


def newlines_per_word(subject: Subject) -> float:
    return subject.text.count("\n") / max(1, len(subject.words))


def tokens_per_byte(subject: Subject) -> float:
    return subject.num_tokens / max(1, subject.num_bytes)


MEASURES: Final[Mapping[str, Callable[[Subject], float]]] = {
    "byte-run": byte_run,
    "unbroken-run": unbroken_run,
    "repeated-unit": repeated_unit,
    "zlib-ratio": zlib_ratio,
    "byte-entropy": byte_entropy,
    "broken-characters": broken_characters,
    "mojibake": mojibake,
    "html-remains": html_remains,
    "num-words": num_words,
    "mean-word-length": mean_word_length,
    "symbols-per-word": symbols_per_word,
    "words-with-letters": words_with_letters,
    "stop-words": stop_words,
    "repeated-lines": repeated_lines,
    "repeated-line-characters": repeated_line_characters,
    "top-2-gram": lambda subject: subject.grams.top_share(2),
    "top-3-gram": lambda subject: subject.grams.top_share(3),
    "top-4-gram": lambda subject: subject.grams.top_share(4),
    "repeated-5-grams": lambda subject: subject.grams.repeated_share(5),
    "repeated-10-grams": lambda subject: subject.grams.repeated_share(10),
    "lines-that-end": lines_that_end,
    "short-lines": short_lines,
    "newlines-per-word": newlines_per_word,
    "tokens-per-byte": tokens_per_byte,
}
"""By the name that a rules file gives them."""


def phrases_found(subject: Subject, phrases: tuple[str, ...]) -> float:
    """How many of `phrases` the text holds, blanks and line ends being one blank."""
    if not phrases:
        return 0.0
    text = " ".join(subject.words)
    return float(sum(phrase in text for phrase in phrases))


def share_of_unit(subject: Subject, unit: str) -> float:
    """Share of the bytes that lie in repeats of `unit`."""
    return unit_share(subject.data, unit.encode())
