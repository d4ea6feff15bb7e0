"""Made-up text, and two documents that are poison, each a source of its own: so a sample of it comes when it is to come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from surefoot.core.sections import RunConfig, SourceSection
from surefoot.core.stages import stages_of
from surefoot.data.course import Course
from surefoot.data.loader import ShardedLoader
from surefoot.data.prepare import prepare

POISON_BYTES: Final = 100_000
RARE: Final = "\x7f"
SOURCES: Final = ("text", "repeated", "shuffled")
_NUM_DOCUMENTS: Final = 600
_DOCUMENT_BYTES: Final = 2000
_FOLLOWERS: Final = (0.5, 0.25, 0.15, 0.1)


def prepare_corpus(folder: Path) -> Path:
    """The folder of the prepared data, as bytes, below `folder`."""
    texts = made_up_texts()
    characters = np.array(list("".join(texts)[:POISON_BYTES]))
    shuffled = "".join(np.random.default_rng(8).permutation(characters))
    documents = {"text": texts, "repeated": [RARE * POISON_BYTES], "shuffled": [shuffled]}
    sections = []
    for name, own in documents.items():
        sections.append(SourceSection(name=name, files=(str(_write(folder / f"{name}.jsonl", own)),)))
    out = folder / "prepared"
    prepare(sections, out=out, tokenizer="bytes", heldout_fraction=0.02)
    return out


def write_text(folder: Path) -> Path:
    """The text alone, not prepared."""
    return _write(folder / "text.jsonl", made_up_texts())


def _write(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sources(poison: tuple[str, int] | None) -> tuple[SourceSection, ...]:
    """The mixture: text alone, or with one sample of so many from the poison."""
    name, period = poison or ("", 1)
    weights = {source: 1.0 if source == name else 0.0 for source in SOURCES} | {"text": float(period - 1 if poison else 1)}
    return tuple(SourceSection(name=source, weight=weight) for source, weight in weights.items())


def first_sample_of(config: RunConfig, name: str, *, until: int) -> int | None:
    """The first of the samples [0, until) that the source gives, by the arithmetic of the order."""
    stages = stages_of(config)
    course = Course(config.data.path, data=config.data, train=config.train, stages=stages, seed=config.run.seed)
    order = course.order
    course.close()
    return next((sample for sample in range(until) if order.at(sample)[0].source == name), None)


def row_of(config: RunConfig, *, step: int, slot: int) -> tuple[int, ...]:
    """The tokens of one sample of a step, as one rank alone would have them."""
    loader = ShardedLoader(
        config.data.path, data=config.data, train=config.train, seed=config.run.seed, rank=0, num_ranks=1, stages=stages_of(config)
    )
    loader.seek(loader.cursor_after(step - 1))
    rows = [tokens for atom in next(loader).micro_batches for tokens in atom.tokens_BS.tolist()]
    loader.close()
    return tuple(rows[slot % len(rows)])


def made_up_texts() -> list[str]:
    """Each letter is followed by one of four: learned in some 80 steps, so that what comes later stands out from even noise."""
    draw = np.random.default_rng(7)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz .,-"))
    next_of = np.stack([draw.permutation(letters.size)[: len(_FOLLOWERS)] for _ in letters])
    codes = np.empty((_NUM_DOCUMENTS, _DOCUMENT_BYTES), dtype=np.int64)
    codes[:, 0] = draw.integers(letters.size, size=_NUM_DOCUMENTS)
    for place in range(1, _DOCUMENT_BYTES):
        codes[:, place] = next_of[codes[:, place - 1], draw.choice(len(_FOLLOWERS), size=_NUM_DOCUMENTS, p=_FOLLOWERS)]
    lengths = draw.integers(_DOCUMENT_BYTES // 4, _DOCUMENT_BYTES, size=_NUM_DOCUMENTS)
    return ["".join(letters[row[:length]]) for row, length in zip(codes, lengths, strict=True)]
