"""What a prepared data folder says of itself. It is written last and carries its own hash, so a folder with a manifest is whole.

```
<path>/manifest.json                     this
<path>/tokenizer.json                    the tokenizer that made the ids
<path>/<source>/<split>/00000.tok ...    shards, see `shards`
<path>/<source>/rejects.jsonl            records that were left out, and why
<path>/manifest.<12 digits>.json         the manifest before a shard was made anew, by its hash
```

Format 2 adds to format 1: the files beside each shard with their hashes, two of them new (`.idx`, `.sig`); what rules left out; what is in
several sources; shards that were made anew. Tokens are the same bytes in both, and both are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from surefoot.core.errors import DataError
from surefoot.core.hashing import sha256_json
from surefoot.core.strict_json import dumps, loads
from surefoot.data.storage import read_file

FORMAT: Final = "surefoot-shards"
FORMAT_VERSION: Final = 2
_READABLE_VERSIONS: Final = (1, 2)
MANIFEST_NAME: Final = "manifest.json"
TOKENIZER_NAME: Final = "tokenizer.json"
Split = Literal["train", "heldout"]
SPLITS: Final[tuple[Split, ...]] = ("train", "heldout")
_DTYPES: Final = {"u16": "<u2", "u32": "<u4"}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file beside a shard."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One `.tok` file: its tokens (EOS included), documents, size and sha256 as a file. `files` are those beside it, by their ending.

    Format 1 does not tell them.
    """

    name: str
    tokens: int
    docs: int
    bytes: int
    sha256: str
    files: Mapping[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SplitEntry:
    """The shards of one split in stream order, and their totals. `text_bytes` is the UTF-8 length of the documents."""

    shards: tuple[ShardEntry, ...]
    tokens: int
    docs: int
    text_bytes: int


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One source. `documents_sha256` is over the hashes of its documents in order: it names the text, however it was stored.

    `duplicates` are exact copies within the source, which are dropped; `shared` documents are in another source too, and stay. `rejected`
    counts what quality rules dropped, by rule. A document whose sha256 lies below `heldout_below`, both in hex, is held out.
    """

    documents_sha256: str
    bad_records: int
    duplicates: int
    empty: int
    splits: Mapping[str, SplitEntry]
    rejected: Mapping[str, int] = field(default_factory=dict)
    shared: int = 0
    heldout_below: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerEntry:
    """`recipe` says how the tokenizer came about: `bpe:<size>`, `bytes`, or `file:<sha256>`."""

    recipe: str
    sha256: str
    eos_id: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ReplacedShard:
    """A shard of the training split that was made anew as shard `by`, of as many tokens, so that no other sample moved.

    Documents are counted against the shard before. `padded_tokens` are EOS tokens that fill it up; `cut_documents` did not fit any more,
    the first of them in part. `diff` beside the new shard lists the hashes of those that went and came.
    """

    source: str
    shard: str
    by: str
    documents_kept: int
    documents_gone: int
    documents_new: int
    padded_tokens: int
    cut_documents: int


@dataclass(frozen=True)
class Manifest:
    """The identity of prepared data is `sha256`: over all content, not over `tool_version`, which alone must never refuse a resume.

    `rules` is the hash of the quality rules that dropped documents, empty when none did. `parent` is the identity of the data before shards
    were `replaced`.
    """

    tool_version: str
    tokenizer: TokenizerEntry
    dtype: str
    heldout_fraction: float
    sources: Mapping[str, SourceEntry]
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    rules: str = ""
    parent: str = ""
    replaced: tuple[ReplacedShard, ...] = ()

    @cached_property
    def sha256(self) -> str:
        return sha256_json({key: value for key, value in self._content().items() if key != "tool_version"})

    @property
    def token_dtype(self) -> np.dtype[Any]:
        return stored_dtype(self.dtype)

    def split(self, source: str, split: Split) -> SplitEntry:
        """Raises DataError when there is no such source."""
        if source not in self.sources:
            raise DataError(f"no source {source!r}", where=MANIFEST_NAME, hint=f"the prepared data holds {', '.join(self.sources)}")
        return self.sources[source].splits[split]

    def as_json(self) -> dict[str, Any]:
        return {**self._content(), "sha256": self.sha256}

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = loads(
            dumps(
                {
                    "format": self.format,
                    "format_version": self.format_version,
                    "tool_version": self.tool_version,
                    "tokenizer": self.tokenizer,
                    "dtype": self.dtype,
                    "heldout_fraction": self.heldout_fraction,
                    "rules": self.rules,
                    "parent": self.parent,
                    "replaced": self.replaced,
                    "sources": self.sources,
                }
            )
        )
        return _as_format_1(content) if self.format_version == 1 else content


def _as_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """Without what format 1 did not know: its hash is over what it had."""
    for key in ("rules", "parent", "replaced"):
        del content[key]
    for source in content["sources"].values():
        for key in ("rejected", "shared", "heldout_below"):
            del source[key]
        for split in source["splits"].values():
            for shard in split["shards"]:
                del shard["files"]
    return content


def dtype_for(vocab_size: int) -> str:
    """The smallest stored token type that holds every id."""
    return "u16" if vocab_size <= 1 << 16 else "u32"


def stored_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(_DTYPES[name])


def earlier_name(sha256: str) -> str:
    """Where the manifest of that identity is kept once another took its place."""
    return f"manifest.{sha256[:12]}.json"


def load_manifest(path: str | Path, *, name: str = MANIFEST_NAME) -> Manifest:
    """The manifest of a prepared data folder. Raises DataError when it is absent, of a later format, or differs from its own hash.

    `name` may be `earlier_name(manifest.parent)`: what the data were before a shard was made anew.
    """
    file = f"{path}/{name}"
    try:
        value = loads(read_file(path, name))
    except DataError as error:
        if error.values.get("kind") != "missing":
            raise
        hint = "prepare it with `surefoot data prepare INPUT --out DIR`"
        raise DataError("no prepared data here", where=str(path), hint=hint) from error
    except ValueError as error:
        raise DataError(f"the manifest cannot be read: {error}", where=file, hint="prepare the data again with --force") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise DataError("not a manifest of prepared data", where=file, hint="point [data] path at a prepared folder")
    if value.get("format_version") not in _READABLE_VERSIONS:
        raise DataError(
            f"format version {value.get('format_version')}, this release reads {', '.join(map(str, _READABLE_VERSIONS))}",
            where=file,
            hint="use the release that wrote it, or prepare the data again with --force",
        )
    try:
        manifest = _from_json(value)
        got = _sha256_of_parsed({key: part for key, part in value.items() if key not in ("sha256", "tool_version")})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"the manifest is damaged: {error!r}", where=file, hint="prepare the data again with --force") from error
    if got != value.get("sha256"):
        raise DataError(
            "the manifest differs from its own hash",
            where=file,
            hint="it was edited or damaged: restore it, or prepare the data again with --force",
            got=got,
            wanted=value.get("sha256"),
        )
    vars(manifest)["sha256"] = got
    return manifest


def _sha256_of_parsed(value: Mapping[str, Any]) -> str:
    """`sha256_json` of what a JSON parser gave, which is plain as it stands: making 28,000 records plain takes a second and a half."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _from_json(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        tool_version=value["tool_version"],
        tokenizer=TokenizerEntry(**value["tokenizer"]),
        dtype=value["dtype"],
        heldout_fraction=value["heldout_fraction"],
        sources={name: _source_from_json(entry) for name, entry in value["sources"].items()},
        format=value["format"],
        format_version=value["format_version"],
        rules=value.get("rules", ""),
        parent=value.get("parent", ""),
        replaced=tuple(ReplacedShard(**replaced) for replaced in value.get("replaced", ())),
    )


def _source_from_json(value: Mapping[str, Any]) -> SourceEntry:
    splits = {
        name: SplitEntry(
            shards=tuple(_shard_from_json(shard) for shard in split["shards"]),
            tokens=split["tokens"],
            docs=split["docs"],
            text_bytes=split["text_bytes"],
        )
        for name, split in value["splits"].items()
    }
    return SourceEntry(**{**value, "splits": splits})


def _shard_from_json(value: Mapping[str, Any]) -> ShardEntry:
    return ShardEntry(**{**value, "files": {suffix: FileEntry(**file) for suffix, file in value.get("files", {}).items()}})
