"""Text in, shards out: survey, tokenizer, token shards, manifest last; the folder appears by one rename."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from surefoot.core.errors import ConfigError, DataError
from surefoot.core.hashing import sha256_file
from surefoot.core.sections import SourceSection
from surefoot.data.build import build, training_texts
from surefoot.data.corpus import list_files
from surefoot.data.documents import OnBadRecord
from surefoot.data.inputs import write_inputs
from surefoot.data.manifest import MANIFEST_NAME, SPLITS, Manifest, load_manifest
from surefoot.data.publish import folder_in_making, publish, refuse_too_small, writing
from surefoot.data.shards import TokenStore
from surefoot.data.survey import Corpus, Progress, Survey, paced, take_survey
from surefoot.data.tokenizer import Tokenizer, bpe_size, bytes_tokenizer, load_tokenizer, train_bpe

logger = logging.getLogger(__name__)

_MAX_HELDOUT_FRACTION: Final = 0.5
# For refusing a disk before the first write: more text per token than all but very regular text has, so that no disk is refused wrongly.
_HIGH_BYTES_PER_TOKEN: Final = 8
_MAX_NAMED_INPUTS: Final = 3


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
    section = only_source(sources)
    command = prepare_command(section, out=out, tokenizer=tokenizer, heldout_fraction=heldout_fraction, text_field=text_field)
    out, progress = Path(os.path.realpath(out)), paced(progress)
    with _parallel_tokenizing():
        codec = _given_tokenizer(tokenizer)
        recipe = f"file:{codec.sha256}" if codec and tokenizer != "bytes" else tokenizer
        files = list_files(section.files, source=section.name)
        corpus = Corpus(
            source=section.name,
            files=files,
            text_field=text_field,
            on_bad_record=on_bad_record,
            skip_command=f"{command} --on-bad-record skip",
        )
        with folder_in_making(out) as folder:
            with writing():
                _refuse_foreign_folder(out)
            survey = take_survey(corpus, heldout_fraction=heldout_fraction, progress=progress)
            if not force and (existing := _existing(out, source=section.name, survey=survey, recipe=recipe)):
                with writing():
                    write_inputs(out, files)
                return existing
            refuse_too_small(out, needed_bytes=2 * survey.text_bytes // (1 if recipe == "bytes" else _HIGH_BYTES_PER_TOKEN))
            if codec is None:
                codec = train_bpe(training_texts(corpus, survey=survey, progress=progress), vocab_size=bpe_size(recipe) or 0)
            manifest = build(folder, corpus=corpus, survey=survey, codec=codec, recipe=recipe, progress=progress)
            with writing():
                write_inputs(folder, files)
            publish(folder, out=out)
    return manifest


def check_prepared(path: str | Path, *, tokenizer: str, heldout_fraction: float, sources: Sequence[SourceSection]) -> None:
    """Raise DataError when the data prepared in `path` is not what a config with these settings would prepare. Reads no document.

    A tokenizer file counts by its bytes. One that is not on this machine cannot be compared: a run folder may be copied without it.
    """
    section, manifest = only_source(sources), load_manifest(path)
    here = {
        "tokenizer": manifest.tokenizer.recipe,
        "heldout_fraction": manifest.heldout_fraction,
        "[[data.sources]] name": ", ".join(manifest.sources),
    }
    asked = {
        "tokenizer": _recipe_in_data(tokenizer, manifest=manifest),
        "heldout_fraction": float(heldout_fraction),
        "[[data.sources]] name": section.name,
    }
    different = [f"{key} {here[key]}, the config asks for {asked[key]}" for key in asked if asked[key] != here[key]]
    if different:
        command = prepare_command(section, out=path, tokenizer=tokenizer, heldout_fraction=heldout_fraction)
        raise DataError(
            f"the data here was prepared in another way: {'; '.join(different)}",
            where=str(path),
            hint=f"set in the config what the data has, name another [data] path, or replace the data: `{command} --force`",
            got=here,
            wanted=asked,
        )


def _recipe_in_data(spec: str, *, manifest: Manifest) -> str:
    """The recipe that a manifest has for the tokenizer `spec`; the one of `manifest` when that means the same tokenizer."""
    if bpe_size(spec) is not None or spec == "bytes":
        return spec
    here = manifest.tokenizer
    try:
        digest = sha256_file(Path(spec))
    except OSError:
        if not here.recipe.startswith("file:"):
            return spec
        logger.warning("%s is not here: nothing says whether the prepared data was made with it", spec)
        return here.recipe
    return here.recipe if digest == here.sha256 else f"file:{digest}"


def prepare_command(section: SourceSection, *, out: str | Path, tokenizer: str, heldout_fraction: float, text_field: str = "text") -> str:
    """The command line that prepares the same. Of many inputs the first stands for all."""
    inputs = section.files if len(section.files) <= _MAX_NAMED_INPUTS else (section.files[0], "...")
    options = {"--out": out, "--name": section.name, "--tokenizer": tokenizer, "--heldout-fraction": heldout_fraction}
    if text_field != "text":
        options["--text-field"] = text_field
    words = [*inputs, *(str(word) for option in options.items() for word in option)]
    return f"surefoot data prepare {shlex.join(words)}"


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
