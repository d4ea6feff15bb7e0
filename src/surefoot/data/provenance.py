"""Both ways between tokens and documents: which documents a span of a source's stream holds, and where in the stream a document lies.

Nothing is searched that arithmetic and the files beside the shards do not tell within a few reads of some KiB. Positions are tokens of the
source's whole stream, over all its shards; what a run makes of them is for its order to say. Nothing is answered from a damaged file that
the tokens or another file contradict.
"""

from __future__ import annotations

import logging
import string
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from surefoot.core.blocking import TokenSpan
from surefoot.core.errors import ConfigError, DataError
from surefoot.data.cross_check import check_bounds, check_file, check_hashes
from surefoot.data.filling import PADDING_FILE
from surefoot.data.manifest import Manifest, ShardEntry, Split, load_manifest
from surefoot.data.shards import TokenStore
from surefoot.data.side_files import DAMAGED_FILE, I64Array, Lengths, Origins, SideFile, documents_by_hash, read_footer
from surefoot.data.storage import Storage, open_storage

logger = logging.getLogger(__name__)

MIN_HASH_DIGITS: Final = 8
"""32 bits: of a thousand million documents one in five shares its first 8 digits with another, and is asked for with more."""
_STORED_DIGITS: Final = 32
_INDEXED_SINCE: Final = 2
"""The format whose shards have an `.idx`."""
_KEY_DIGITS: Final = 16
_MAX_OPEN_SHARDS: Final = 16
_MAX_NAMES: Final = 10_000
_MAX_LISTED: Final = 8
_MAX_INDEX_BYTES: Final = 256 << 20  # hashed in under a second, from a local disk
_MAX_CHECKED_BYTES: Final = 4 << 30  # the files of a hundred shards of a gibibyte
_CHECKED: Final = ("len", "idx", "src.parquet")


UNKNOWN_NAME: Final = "unknown-name"
"""Kind of the DataError for a document, file or shard that is not there; what cannot be read has another."""


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document where it lies: tokens [start, end) of its source's stream, EOS included, and where its text came from.

    `number` counts the documents of the source from 0; `hash` is the first half of the sha256 of its text; `record` counts from 1.
    """

    source: str
    number: int
    shard: str
    start: int
    end: int
    hash: str
    file: str
    record: int
    byte_offset: int
    byte_length: int

    @property
    def id(self) -> str:
        """source/number: the name that is always its alone."""
        return f"{self.source}/{self.number}"

    @property
    def span(self) -> TokenSpan:
        return TokenSpan(self.source, self.start, self.end)


@dataclass(frozen=True, slots=True)
class _Place:
    """A shard in its source: which one it is, and the tokens and documents before it."""

    source: str
    entry: ShardEntry
    first_token: int
    first_doc: int


class Provenance:
    """The documents of one split of prepared data, in a folder or an object store. Files are opened when they are needed; few stay open."""

    def __init__(
        self, path: str | Path, *, manifest: Manifest | None = None, split: Split = "train", storage: Storage | None = None
    ) -> None:
        """`storage` is shared when it is given, with its open files, and closed by who made it."""
        self.manifest = manifest or load_manifest(path)
        self._owns_storage = storage is None
        self._storage = storage or open_storage(path)
        self._split = split
        self._places = {name: _places(name, source.splits[split].shards) for name, source in self.manifest.sources.items()}
        self._token_ends = {
            name: list(accumulate(place.entry.tokens for place in places)) for name, places in self._places.items()
        }  # looked up with each span
        self._open: OrderedDict[tuple[str, str], _OpenShard] = OrderedDict()
        self._stores: dict[str, TokenStore] = {}

    def __enter__(self) -> Provenance:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def documents(self, span: TokenSpan) -> list[StoredDocument]:
        """The documents that hold a token of `span`, in order. Raises DataError for a source or a position that is not there."""
        places, ends = self._of_source(span.source), self._token_ends.get(span.source, [])
        num_tokens = ends[-1] if ends else 0
        if not 0 <= span.start < span.end <= num_tokens:
            raise DataError(f"tokens {span.start}:{span.end} of {num_tokens}", where=f"source {span.source!r}", hint="stay within them")
        found: list[StoredDocument] = []
        start = span.start
        while start < span.end:
            place = places[bisect_right(ends, start)]
            end = min(span.end, place.first_token + place.entry.tokens)
            shard = self._shard(place)
            first_doc, end_doc = shard.lengths.documents_in(start - place.first_token, end - place.first_token)
            found += shard.documents(first_doc, end_doc)
            start = end
        return found

    def find(self, document: str) -> list[StoredDocument]:
        """Every place of a document: of its hash, of at least 8 digits of it, or of "source/number".

        Raises ConfigError for what names no document, DataError when there is none or several share the digits.
        """
        if "/" in document:
            return [self._numbered(document)]
        digits = document.lower()
        if len(digits) < MIN_HASH_DIGITS or not set(digits) <= set(string.hexdigits):
            hint = f"give at least {MIN_HASH_DIGITS} hex digits of its hash, or source/number, as `data locate` prints both"
            raise ConfigError(f"{document!r} names no document", where="document", hint=hint)
        found = self._with_hash([place for places in self._places.values() for place in places], digits)
        different = sorted({stored.hash for stored in found})
        if len(different) > 1:
            listed = ", ".join(different[:_MAX_LISTED]) + (", ..." if len(different) > _MAX_LISTED else "")
            raise DataError(f"{len(different)} documents begin with {digits}: {listed}", where=self._storage.place, hint="give more digits")
        if not found:
            counts = ", ".join(f"{name} {source.splits[self._split].docs}" for name, source in self.manifest.sources.items())
            hint = f"documents in its {self._split} split: {counts}"
            if not self.check_indexes():
                hint += "; the files that tell hashes were not compared with the manifest, so one of them may be damaged"
            raise DataError(f"no document with hash {digits}", where=self._storage.place, hint=hint, kind=UNKNOWN_NAME)
        return found

    def spans_of_file(self, file: str) -> list[TokenSpan]:
        """All tokens of one source file, by the name that provenance keeps. Raises DataError for an unknown one, with those alike."""
        spans = [
            TokenSpan(place.source, place.first_token + start, place.first_token + end)
            for places in self._places.values()
            for place in places
            for start, end in self._shard(place).spans_of_file(file)
        ]
        if not spans:
            names = self._file_names()
            alike = get_close_matches(file, sorted(names), n=4, cutoff=0.5) or sorted(names)[:_MAX_LISTED]
            hint = f"there are {', '.join(alike)}"
            raise DataError(f"no document came from {file!r}", where=self._storage.place, hint=hint, kind=UNKNOWN_NAME)
        return merged(spans)

    def span_of_shard(self, name: str) -> TokenSpan:
        """All tokens of "source/shard", as in web/00003. Raises ConfigError for a name that is not of that form."""
        source, _, shard = name.rpartition("/")
        if not source:
            example = name if name in self._places else next(iter(self._places), "web")
            raise ConfigError(f"{name!r} names no shard", where="shard", hint=f"wanted SOURCE/SHARD, as {example}/00000")
        place = next((place for place in self._of_source(source) if place.entry.name == shard.removesuffix(".tok")), None)
        if place is None:
            names = [f"{source}/{place.entry.name}" for place in self._of_source(source)]
            span = f"{names[0]} to {names[-1]}" if names else "none"
            raise DataError(f"no shard {name!r}", where=self._storage.place, hint=f"there are {span}", kind=UNKNOWN_NAME)
        return TokenSpan(source, place.first_token, place.first_token + place.entry.tokens)

    def num_documents(self, span: TokenSpan) -> int:
        """How many documents hold a token of `span`, without reading where they came from: of whole shards, nothing is read."""
        places, ends = self._of_source(span.source), self._token_ends[span.source]
        numbers = []
        for token in (span.start, span.end - 1):
            place = places[bisect_right(ends, token)]
            here = token - place.first_token
            if here == 0:
                numbers.append(place.first_doc)
            elif here == place.entry.tokens - 1:
                numbers.append(place.first_doc + place.entry.docs - 1)
            else:
                numbers.append(place.first_doc + self._shard(place).lengths.documents_in(here, here + 1)[0])
        return numbers[1] - numbers[0] + 1

    def check(self, spans: Iterable[TokenSpan]) -> bool:
        """Compare the files beside every shard that holds a token of `spans` with the manifest. Raises DataError for one that differs.

        False, with nothing compared, where the format keeps no hashes of them or they are too many.
        """
        touched: dict[tuple[str, int], _Place] = {}
        for span in spans:
            ends = self._token_ends[span.source]
            for number in range(bisect_right(ends, span.start), bisect_right(ends, span.end - 1) + 1):
                touched[span.source, number] = self._places[span.source][number]
        return self._check_files(list(touched.values()), _CHECKED, limit_bytes=_MAX_CHECKED_BYTES)

    def check_indexes(self) -> bool:
        """The same of the indexes of all shards: those that have a document cannot be told before."""
        return self._check_files([place for places in self._places.values() for place in places], ("idx",), limit_bytes=_MAX_INDEX_BYTES)

    def close(self) -> None:
        self._open.clear()
        self._stores.clear()
        if self._owns_storage:
            self._storage.close()

    def _of_source(self, source: str) -> Sequence[_Place]:
        if source not in self._places:
            raise DataError(f"no source {source!r}", where=self._storage.place, hint=f"the prepared data holds {', '.join(self._places)}")
        return self._places[source]

    def _numbered(self, document: str) -> StoredDocument:
        source, _, number = document.rpartition("/")
        places = self._of_source(source)
        num_docs = sum(place.entry.docs for place in places)
        if not number.isdecimal() or int(number) >= num_docs:
            hint = f"source {source!r} has 0 to {num_docs - 1}"
            raise DataError(f"no document {document!r}", where=self._storage.place, hint=hint, kind=UNKNOWN_NAME)
        place = next(place for place in reversed(places) if place.first_doc <= int(number))
        here = int(number) - place.first_doc
        return self._shard(place).documents(here, here + 1)[0]

    def _with_hash(self, places: Sequence[_Place], digits: str) -> list[StoredDocument]:
        """Shards of format 1 have no index: there all hashes are read."""
        stored, key = digits[:_STORED_DIGITS], digits[:_KEY_DIGITS]
        if self._has_indexes:
            low, high = (int(key.ljust(_KEY_DIGITS, filler), 16) for filler in "0f")
            indexes = [(f"{self._base(place)}.idx", place.entry.docs) for place in places]
            numbers = documents_by_hash(self._storage, indexes, keys=[(low, high)] * len(indexes))
        else:
            prefix = bytes.fromhex(stored[: len(stored) // 2 * 2])
            numbers = [self._shard(place).origins.by_hash(prefix) for place in places]
        candidates = [
            document
            for place, here in zip(places, numbers, strict=True)
            for number in sorted(here)
            for document in self._shard(place).documents(number, number + 1)
        ]
        for document in candidates:
            if not document.hash.startswith(key):
                file = SideFile(self._storage, f"{document.source}/{self._split}/{document.shard}.idx")
                raise file.damaged(f"it has {key} for document {document.id}, whose hash is {document.hash}")
        return [document for document in candidates if document.hash.startswith(stored)]

    def _check_files(self, places: Sequence[_Place], suffixes: Sequence[str], *, limit_bytes: int) -> bool:
        files = {f"{self._base(place)}.{suffix}": place.entry.files.get(suffix) for place in places for suffix in suffixes}
        known = {name: entry for name, entry in files.items() if entry is not None}
        if len(known) < len(files) or sum(entry.bytes for entry in known.values()) > limit_bytes:
            return False
        for name, entry in known.items():
            check_file(self._storage, name, entry)
        return True

    @property
    def _has_indexes(self) -> bool:
        return self.manifest.format_version >= _INDEXED_SINCE

    def _store(self, source: str) -> TokenStore:
        store = self._stores.get(source)
        if store is None:
            store = TokenStore(self._storage.place, source=source, split=self._split, manifest=self.manifest, storage=self._storage)
            self._stores[source] = store
        return store

    def _file_names(self) -> set[str]:
        names: set[str] = set()
        for place in (place for places in self._places.values() for place in places):
            if len(names) < _MAX_NAMES:
                names |= self._shard(place).origins.file_names(limit=_MAX_NAMES)
        return names

    def _base(self, place: _Place) -> str:
        return f"{place.source}/{self._split}/{place.entry.name}"

    def _shard(self, place: _Place) -> _OpenShard:
        key = place.source, place.entry.name
        shard = self._open.pop(key, None)
        if shard is None:
            if len(self._open) >= _MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            shard = _OpenShard(
                self._base(place), place=place, storage=self._storage, store=self._store(place.source), has_index=self._has_indexes
            )
        self._open[key] = shard
        return shard


class _OpenShard:
    """The side files of one shard, each opened when it is first asked, and compared with its tokens and each other."""

    def __init__(self, base: str, *, place: _Place, storage: Storage, store: TokenStore, has_index: bool) -> None:
        self._base, self._place, self._storage = base, place, storage
        self._store, self._has_index = store, has_index
        self._is_whole = False
        self._lengths: Lengths | None = None
        self._origins: Origins | None = None

    @property
    def lengths(self) -> Lengths:
        if self._lengths is None:
            entry = self._place.entry
            self._lengths = Lengths(self._file("len"), num_docs=entry.docs, num_tokens=entry.tokens)
        return self._lengths

    @property
    def origins(self) -> Origins:
        if self._origins is None:
            file = self._file("src.parquet")
            footer, entry = read_footer(file), self._place.entry.files.get("src.parquet")
            if not footer.is_sealed and entry is not None:
                check_file(self._storage, file.name, entry)
            self._origins = Origins(file, footer=footer, num_docs=self._place.entry.docs)
        return self._origins

    def documents(self, first_doc: int, end_doc: int) -> list[StoredDocument]:
        """Those numbered [first_doc, end_doc) in the shard. Raises DataError when its files contradict each other."""
        placed, rows = self.lengths.bounds(first_doc, end_doc) + self._place.first_token, self.origins.rows(first_doc, end_doc)
        if self._has_index:
            hashes = [row["doc_hash"] for row in rows]
            index, origins = self._file("idx"), self._file("src.parquet")
            check_hashes(self._storage, hashes, first_doc=first_doc, num_docs=self._place.entry.docs, index=index, origins=origins)
        self._check_bounds(placed, paddings=[place for place, row in enumerate(rows) if _is_padding(row)])
        bounds = placed.tolist()
        return [
            StoredDocument(
                source=self._place.source,
                number=self._place.first_doc + first_doc + place,
                shard=self._place.entry.name,
                start=bounds[place],
                end=bounds[place + 1],
                hash=row["doc_hash"].hex(),
                file=row["file"],
                record=row["record"],
                byte_offset=row["byte_offset"],
                byte_length=row["byte_length"],
            )
            for place, row in enumerate(rows)
        ]

    def spans_of_file(self, file: str) -> list[tuple[int, int]]:
        """In tokens of the shard."""
        runs = self.origins.of_file(file)
        return [(int(self.lengths.bounds(first, first + 1)[0]), int(self.lengths.bounds(end - 1, end)[-1])) for first, end in runs]

    def _check_bounds(self, bounds: I64Array, *, paddings: Sequence[int]) -> None:
        """Of tokens that cannot be read the lengths are asked for all the more: then they are what the manifest says, to the last bit."""
        file = self._file("len")
        try:
            check_bounds(self._store, bounds, shard_start=self._place.first_token, paddings=paddings, file=file)
        except DataError as error:
            if error.values.get("kind") == DAMAGED_FILE:
                raise
            entry = self._place.entry.files.get("len")
            if entry is None:
                logger.warning("%s was not compared with the tokens, which cannot be read: %s", file.where, error)
            elif not self._is_whole:
                check_file(self._storage, file.name, entry)
                self._is_whole = True

    def _file(self, suffix: str) -> SideFile:
        return SideFile(self._storage, f"{self._base}.{suffix}")


def _is_padding(row: Mapping[str, Any]) -> bool:
    return bool(row["file"] == PADDING_FILE and row["record"] == 0)


def merged(spans: Iterable[TokenSpan]) -> list[TokenSpan]:
    """The same tokens in as few spans as can be, by source and position."""
    result: list[TokenSpan] = []
    for span in sorted(spans, key=lambda span: (span.source, span.start)):
        if result and result[-1].source == span.source and span.start <= result[-1].end:
            result[-1] = TokenSpan(span.source, result[-1].start, max(result[-1].end, span.end))
        else:
            result.append(span)
    return result


def _places(source: str, shards: Sequence[ShardEntry]) -> list[_Place]:
    tokens = accumulate((shard.tokens for shard in shards), initial=0)
    docs = accumulate((shard.docs for shard in shards), initial=0)
    return [_Place(source, shard, first_token, first_doc) for shard, first_token, first_doc in zip(shards, tokens, docs, strict=False)]
