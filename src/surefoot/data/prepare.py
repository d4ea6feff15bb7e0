"""Text in, shards out: survey, tokenizer, token shards, manifest last; the folder appears by one rename."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.sections import SourceSection
from surefoot.data.build import build, training_texts
from surefoot.data.corpus import list_files
from surefoot.data.documents import OnBadRecord
from surefoot.data.manifest import MANIFEST_NAME, SPLITS, Manifest, load_manifest
from surefoot.data.publish import folder_in_making, publish, refuse_too_small, writing
from surefoot.data.shards import TokenStore
from surefoot.data.survey import Corpus, Progress, Survey, paced, take_survey
from surefoot.data.tokenizer import Tokenizer, bpe_size, bytes_tokenizer, load_tokenizer, train_bpe

_MAX_HELDOUT_FRACTION: Final = 0.5
# For refusing a disk before the first write: more text per token than all but very regular text has, so that no disk is refused wrongly.
_HIGH_BYTES_PER_TOKEN: Final = 8


def prepare(
    sources: Sequence[SourceSection],
    *,
    out: str | Path,
    tokenizer: str = "bpe:8192",
    heldout_fraction: float = 0.01,
    on_bad_record: OnBadRecord = "fail",
    text_field: str = "text",
    force: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Prepare `sources` into the folder `out` and return its manifest.

    `tokenizer` is `bpe:<size>`, `bytes`, or the path of a tokenizer.json. Data that was already prepared from the same documents in the
    same way is left as it is; other data is replaced only with `force`. Raises DataError for bad input, other data at `out`, a full disk.
    `progress` is told each stage and every few seconds within it. A kill at any time leaves `out` as it was and a hidden folder that the
    next call clears.
    """
    if not 0.0 <= heldout_fraction <= _MAX_HELDOUT_FRACTION:
        hint = f"wanted 0 to {_MAX_HELDOUT_FRACTION}"
        raise ConfigError(f"a held-out fraction of {heldout_fraction}", where="heldout_fraction", hint=hint, got=heldout_fraction)
    heldout_fraction = float(heldout_fraction)  # 0 and 0.0 are one value, but two JSON texts
    out, progress = Path(os.path.realpath(out)), paced(progress)
    section = only_source(sources)
    with _parallel_tokenizing():
        codec = _given_tokenizer(tokenizer)
        recipe = f"file:{codec.sha256}" if codec and tokenizer != "bytes" else tokenizer
        files = list_files(section.files, source=section.name)
        corpus = Corpus(source=section.name, files=files, text_field=text_field, on_bad_record=on_bad_record)
        with folder_in_making(out) as folder:
            with writing():
                _refuse_foreign_folder(out)
            survey = take_survey(corpus, heldout_fraction=heldout_fraction, progress=progress)
            if not force and (existing := _existing(out, source=section.name, survey=survey, recipe=recipe)):
                return existing
            refuse_too_small(out, needed_bytes=2 * survey.text_bytes // (1 if recipe == "bytes" else _HIGH_BYTES_PER_TOKEN))
            if codec is None:
                codec = train_bpe(training_texts(corpus, survey=survey, progress=progress), vocab_size=bpe_size(recipe) or 0)
            manifest = build(folder, corpus=corpus, survey=survey, codec=codec, recipe=recipe, progress=progress)
            publish(folder, out=out)
    return manifest


def only_source(sources: Sequence[SourceSection]) -> SourceSection:
    """The one source. Raises DataError for none and for several."""
    if len(sources) != 1:
        what = "no source to prepare" if not sources else f"{len(sources)} sources: mixtures are not in this release"
        hint = "name files under [[data.sources]]" if not sources else "put all files under one [[data.sources]]"
        raise DataError(what, where="[[data.sources]]", hint=hint, got=len(sources), wanted=1)
    name = sources[0].name
    if not name or name.startswith(".") or "/" in name:
        raise DataError(f"{name!r} cannot name a source", where="[[data.sources]] name", hint="it names a folder: use letters and digits")
    return sources[0]


def _given_tokenizer(spec: str) -> Tokenizer | None:
    """The tokenizer that `spec` names, or None when it has to be trained."""
    if bpe_size(spec) is not None:
        return None
    return bytes_tokenizer() if spec == "bytes" else load_tokenizer(spec)


def _refuse_foreign_folder(out: Path) -> None:
    """Nothing but prepared data is ever replaced, not even with `force`."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).exists()):
        raise DataError("it exists and holds no prepared data", where=str(out), hint="choose another folder, or empty this one yourself")


def _existing(out: Path, *, source: str, survey: Survey, recipe: str) -> Manifest | None:
    """The manifest at `out` if it was made from the same documents in the same way, None if there is none, else DataError."""
    if not (out / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(out)
    asked = {"source": source, "documents": survey.documents_sha256, "tokenizer": recipe, "heldout_fraction": survey.heldout_fraction}
    here = {
        "source": ", ".join(manifest.sources),
        "documents": next((entry.documents_sha256 for entry in manifest.sources.values()), ""),
        "tokenizer": manifest.tokenizer.recipe,
        "heldout_fraction": manifest.heldout_fraction,
    }
    different = [f"{key} {here[key]}, asked for {asked[key]}" for key in asked if asked[key] != here[key]]
    if different:
        hint = "use --force to replace it, or another folder"
        raise DataError(f"other data is already prepared here: {'; '.join(different)}", where=str(out), hint=hint, got=here, wanted=asked)
    for split in SPLITS:
        store = TokenStore(out, source=source, split=split, manifest=manifest)
        try:
            store.check_files()
        finally:
            store.close()
    return manifest


@contextmanager
def _parallel_tokenizing() -> Iterator[None]:
    """All cores for the tokenizer here and only here: a process forked later must not inherit a thread pool it believes in."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = before or "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
