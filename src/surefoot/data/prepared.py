"""Whether the data in a folder is what is asked for, and the command that would make it so."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from surefoot.core.errors import DataError
from surefoot.core.hashing import sha256_file
from surefoot.core.sections import SourceSection
from surefoot.data.documents import OnBadRecord
from surefoot.data.manifest import MANIFEST_NAME, SPLITS, Manifest, load_manifest
from surefoot.data.shards import TokenStore
from surefoot.data.tokenizer import bpe_size

logger = logging.getLogger(__name__)

_MAX_NAMED_INPUTS: Final = 3
_MEND: Final = "restore the file from a copy, or prepare the data again with --force"


def check_prepared(
    path: str | Path, *, tokenizer: str, heldout_fraction: float, sources: Sequence[SourceSection], command: str = ""
) -> None:
    """Raise DataError when the data prepared in `path` is not what a config with these settings would prepare. Reads no document.

    `command` is what prepares it, where these settings are not all of it. A tokenizer file counts by its bytes. One that is not on this
    machine cannot be compared: a run folder may be copied without it.
    """
    check_sources(sources)
    manifest = load_manifest(path)
    here = {
        "tokenizer": manifest.tokenizer.recipe,
        "heldout_fraction": manifest.heldout_fraction,
        "[[data.sources]] name": ", ".join(sorted(manifest.sources)),
    }
    asked = {
        "tokenizer": _recipe_in_data(tokenizer, manifest=manifest),
        "heldout_fraction": float(heldout_fraction),
        "[[data.sources]] name": ", ".join(sorted(section.name for section in sources)),
    }
    different = [f"{key} {here[key]}, the config asks for {asked[key]}" for key in asked if asked[key] != here[key]]
    if different:
        command = command or prepare_command(sources, out=path, tokenizer=tokenizer, heldout_fraction=heldout_fraction)
        raise DataError(
            f"the data here was prepared in another way: {'; '.join(different)}",
            where=str(path),
            hint=f"set in the config what the data has, name another [data] path, or replace the data: `{command} --force`",
            got=here,
            wanted=asked,
        )


def existing(out: Path, *, documents: Mapping[str, str], recipe: str, heldout_fraction: float) -> Manifest | None:
    """The manifest at `out` if it was made from the same documents in the same way, None if there is none, else DataError.

    `documents` is a hash by source.
    """
    if not (out / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(out)
    asked = {
        "source": ", ".join(documents),
        "documents": ", ".join(documents.values()),
        "tokenizer": recipe,
        "heldout_fraction": heldout_fraction,
    }
    here = {
        "source": ", ".join(manifest.sources),
        "documents": ", ".join(entry.documents_sha256 for entry in manifest.sources.values()),
        "tokenizer": manifest.tokenizer.recipe,
        "heldout_fraction": manifest.heldout_fraction,
    }
    different = [f"{key} {here[key]}, asked for {asked[key]}" for key in asked if asked[key] != here[key]]
    if different:
        hint = "use --force to replace it, or another folder"
        raise DataError(f"other data is already prepared here: {'; '.join(different)}", where=str(out), hint=hint, got=here, wanted=asked)
    for source in manifest.sources:
        for split in SPLITS:
            store = TokenStore(out, source=source, split=split, manifest=manifest)
            try:
                store.check_files()
            except DataError as error:
                raise DataError(error.what, where=error.where, hint=_MEND, **error.values) from error
            finally:
                store.close()
    check_side_files(out, manifest)
    return manifest


def check_side_files(path: Path, manifest: Manifest) -> None:
    """Read the files beside every shard: raises DataError for the first that is not what the manifest says. Format 1 says nothing."""
    for source, entry in manifest.sources.items():
        for split, shards in entry.splits.items():
            for shard in shards.shards:
                for suffix, wanted in shard.files.items():
                    _check_file(path / source / split / f"{shard.name}.{suffix}", sha256=wanted.sha256)


def _check_file(path: Path, *, sha256: str) -> None:
    try:
        got = sha256_file(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), hint=_MEND) from error
    if got != sha256:
        raise DataError("it is not the file that was written", where=str(path), hint=_MEND, got=got, wanted=sha256)


def refuse_foreign_folder(out: Path) -> None:
    """Nothing but prepared data is ever replaced, not even with `force`."""
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_NAME).exists()):
        raise DataError("it exists and holds no prepared data", where=str(out), hint="choose another folder, or empty this one yourself")


def check_sources(sources: Sequence[SourceSection]) -> None:
    """Raises DataError when there are none, or a name is not one of a folder of its own."""
    if not sources:
        raise DataError("no source to prepare", where="[[data.sources]]", hint="name files under [[data.sources]]", got=0)
    for name, times in Counter(section.name for section in sources).items():
        if not name or name.startswith(".") or "/" in name or name in (MANIFEST_NAME, "tokenizer.json", "inputs.json"):
            hint = "it names a folder: use letters and digits"
            raise DataError(f"{name!r} cannot name a source", where="[[data.sources]] name", hint=hint)
        if times > 1:
            hint = "name each its own, or put all files under one [[data.sources]]"
            raise DataError(f"{times} sources are named {name!r}", where="[[data.sources]] name", hint=hint, got=times, wanted=1)


def prepare_command(
    sources: Sequence[SourceSection],
    *,
    out: str | Path,
    tokenizer: str,
    heldout_fraction: float,
    text_field: str = "text",
    on_bad_record: OnBadRecord = "fail",
    rules: str = "",
) -> str:
    """The command line that prepares the same. Of many inputs the first stands for all. `rules` is a file."""
    options: list[object] = ["--out", out]
    words: list[object] = []
    if len(sources) == 1:
        words += _named(sources[0].files)
        options += ["--name", sources[0].name]
    else:
        for section in sources:
            options += ["--source", f"{section.name}={','.join(_named(section.files))}"]
    options += ["--tokenizer", tokenizer, "--heldout-fraction", heldout_fraction]
    if text_field != "text":
        options += ["--text-field", text_field]
    if on_bad_record != "fail":
        options += ["--on-bad-record", on_bad_record]
    if rules:
        options += ["--rules", rules]
        for section in sources:
            options += ["--rules-off", f"{section.name}={','.join(section.rules_off)}"] if section.rules_off else []
    return f"surefoot data prepare {shlex.join(map(str, [*words, *options]))}"


def _named(files: Sequence[str]) -> tuple[str, ...]:
    return tuple(files) if len(files) <= _MAX_NAMED_INPUTS else (files[0], "...")


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
