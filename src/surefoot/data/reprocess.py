"""One shard made anew from corrected text, while every other sample of a run stays where it is.

The new shard has exactly as many tokens as the old one: its last documents are cut, or EOS fills it up. It stands under a new name beside
the old one, so that a run that is reading goes on undisturbed; the manifest before is kept too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.core.durable import fsync_dir, write_atomic
from surefoot.core.errors import DataError
from surefoot.core.hashing import sha256_file, sha256_json
from surefoot.core.strict_json import dumps
from surefoot.core.version import __version__
from surefoot.data.choosing import below, word_of
from surefoot.data.corpus import list_files
from surefoot.data.crew import Crew
from surefoot.data.cutting import CHUNK_BYTES, MAX_RECORD_BYTES, Cutting
from surefoot.data.documents import OnBadRecord
from surefoot.data.encoder import EncodeItem, Encoder, Stored, encode_items
from surefoot.data.filling import PADDING_FILE, Filling
from surefoot.data.journal import Journal
from surefoot.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_NAME,
    FileEntry,
    Manifest,
    ReplacedShard,
    ShardEntry,
    SourceEntry,
    SplitEntry,
    earlier_name,
    load_manifest,
)
from surefoot.data.publish import folder_in_making, writing
from surefoot.data.quality.rules import RuleSet
from surefoot.data.reader import Corpus
from surefoot.data.shard_writer import ShardWriter
from surefoot.data.shards import TokenStore
from surefoot.data.side_files import SideFile
from surefoot.data.storage import LocalStorage
from surefoot.data.survey import LEFT_OUT, Progress, Survey, paced, take_survey
from surefoot.data.tokenizer import Tokenizer, load_tokenizer

_TOKENS_AT_ONCE: Final = 1 << 20


def reprocess(
    path: str | Path,
    *,
    shard: str,
    inputs: Sequence[str],
    on_bad_record: OnBadRecord = "fail",
    text_field: str = "text",
    rules: RuleSet | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    workers: int = 0,
    progress: Callable[[Progress], None] = lambda _: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Manifest:
    """Make `shard` ("source/name", of the training split) of the data in `path` anew from `inputs`; the manifest that then holds.

    The documents of `inputs` go into it in order, but for exact copies of what is in other shards of the source, and for what is held out.
    The manifest before is kept under the name of its hash. Raises DataError as `prepare` does, and for a shard that is not there.
    """
    source, _, name = shard.partition("/")
    manifest = load_manifest(path)
    old = _find(manifest, source=source, name=name)
    codec = _own_tokenizer(Path(path), manifest=manifest)
    corpus = Corpus(
        source=source,
        files=list_files(inputs, source=source),
        cutting=Cutting(text_field, max_record_bytes, chunk_bytes),
        on_bad_record=on_bad_record,
        skip_command=f"surefoot data prepare ... --out {path} --reprocess {shard} --on-bad-record skip",
        rules=rules,
    )
    out, told = Path(os.path.realpath(path)), paced(progress)
    with folder_in_making(out, goes_on=False) as folder, Crew(workers or len(os.sched_getaffinity(0))) as crew:
        with writing():
            journal = Journal(folder, key=sha256_json([manifest.sha256, shard]))
            journal.clear()
        survey = take_survey(corpus, heldout_fraction=0.0, journal=journal, crew=crew, progress=told)
        survey = _without_others(survey, out=out, manifest=manifest, source=source, but=old)
        encoded = crew.map(Encoder(corpus.reader, codec.json_bytes), encode_items(corpus, survey=survey))
        filling = Filling(old.tokens, codec=codec)
        stored = filling.fill(documents["train"] for _, documents in _telling(encoded, survey=survey, progress=told))
        with writing():
            made = _write(journal, name=_next_name(manifest, old=old), stored=stored, dtype=manifest.token_dtype, files=corpus.reader.files)
            change = _compare(out, manifest=manifest, source=source, old=old, stored=stored, filling=filling, by=made.name)
            made = _write_diff(journal, made=made, change=change, survey=survey)
            after = _manifest(out, manifest=manifest, change=change, old=old, made=made, stored=stored, codec=codec)
            _publish(journal, out=out, before=manifest, after=after, made=made)
    return after


def _find(manifest: Manifest, *, source: str, name: str) -> ShardEntry:
    shards = manifest.split(source, "train").shards
    for shard in shards:
        if shard.name == name:
            return shard
    names = ", ".join(f"{source}/{shard.name}" for shard in shards[:8])
    raise DataError(f"no shard {name!r} in the training split of {source!r}", where=MANIFEST_NAME, hint=f"there are {names}")


def _own_tokenizer(path: Path, *, manifest: Manifest) -> Tokenizer:
    codec = load_tokenizer(path / TOKENIZER_NAME)
    if codec.sha256 != manifest.tokenizer.sha256:
        raise DataError(
            "it is not the tokenizer that made the data: two in one folder would be two vocabularies in one stream",
            where=str(path / TOKENIZER_NAME),
            hint="restore the file that the manifest names by its hash",
            got=codec.sha256,
            wanted=manifest.tokenizer.sha256,
        )
    return codec


def _without_others(survey: Survey, *, out: Path, manifest: Manifest, source: str, but: ShardEntry) -> Survey:
    """Leave out what is held out, and what another shard holds: the keys of one shard at a time are in memory."""
    entry = manifest.sources[source]
    digests = survey.rows["digest"]
    limit = int(entry.heldout_below, 16) if entry.heldout_below else int(manifest.heldout_fraction * 2**64) << 192
    keys = word_of(digests, 0)
    elsewhere = np.zeros(len(keys), dtype=np.bool_)
    with closing(LocalStorage(out)) as storage:
        for split in SPLITS:
            for shard in entry.splits[split].shards:
                if (split, shard.name) != ("train", but.name):
                    elsewhere |= _is_among(_sorted_keys(storage, folder=f"{source}/{split}", shard=shard), keys)
    fates = np.where(below(digests, limit) | elsewhere, LEFT_OUT, survey.fates).astype(np.uint8)
    return replace(survey, fates=fates, text_bytes=int(survey.rows["text_bytes"][fates != LEFT_OUT].sum(dtype=np.int64)))


def _stored_hashes(origins: Path) -> npt.NDArray[np.uint8]:
    """The hashes (N, 16) of the documents of a shard. Padding is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(origins, columns=["doc_hash", "record"])
    except (OSError, ValueError) as error:
        hint = "restore the file from a copy, or prepare the data again with --force"
        raise DataError(f"cannot be read: {error}", where=str(origins), hint=hint) from error
    column = table.column("doc_hash").cast(pa.binary(16)).combine_chunks()
    array: npt.NDArray[np.uint8] = np.frombuffer(column.buffers()[1], np.uint8, 16 * len(column), 16 * column.offset).reshape(-1, 16)
    is_document: npt.NDArray[np.bool_] = table.column("record").to_numpy() > 0
    return array[is_document]


def _sorted_keys(storage: LocalStorage, *, folder: str, shard: ShardEntry) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of the hashes of a shard as ascending numbers, from its index; of a format without one, from all of its rows."""
    if "idx" in shard.files:
        return SideFile(storage, f"{folder}/{shard.name}.idx").read(0, shard.docs, dtype="<u8")
    return np.sort(word_of(_stored_hashes(Path(storage.place, folder, f"{shard.name}.src.parquet")), 0))


def _is_among(ascending: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which of `keys` are in `ascending`, which is not empty."""
    places = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    is_there: npt.NDArray[np.bool_] = ascending[places] == keys
    return is_there


def _telling(
    encoded: Iterator[tuple[EncodeItem, dict[str, Stored]]], *, survey: Survey, progress: Callable[[Progress], None]
) -> Iterator[tuple[EncodeItem, dict[str, Stored]]]:
    done_bytes = 0
    for item, documents in encoded:
        done_bytes += int(documents["train"].rows["text_bytes"].sum())
        progress(Progress("tokenizing", done_bytes, survey.text_bytes))
        yield item, documents


def _next_name(manifest: Manifest, *, old: ShardEntry) -> str:
    first = old.name.partition("-r")[0]
    number = 1 + sum(replaced.by.partition("-r")[0] == first for replaced in manifest.replaced)
    return f"{first}-r{number}"


def _write(journal: Journal, *, name: str, stored: Stored, dtype: np.dtype[Any], files: Sequence[str]) -> ShardEntry:
    writer = ShardWriter(journal.data, name=name, rows=journal.work / "rows", dtype=dtype)
    try:
        rows = stored.rows.copy()
        rows["file"] = np.minimum(rows["file"], len(files))
        writer.extend(stored.tokens, rows)
        return writer.finish(files=[*files, PADDING_FILE])
    finally:
        writer.abandon()


@dataclass(frozen=True, slots=True)
class _Change:
    summary: ReplacedShard
    gone: tuple[str, ...]
    new: tuple[str, ...]


def _compare(out: Path, *, manifest: Manifest, source: str, old: ShardEntry, stored: Stored, filling: Filling, by: str) -> _Change:
    before = {digest.tobytes().hex() for digest in _stored_hashes(out / source / "train" / f"{old.name}.src.parquet")}
    after = {digest.tobytes().hex() for digest in stored.rows["hash"][stored.rows["record"] > 0]}
    summary = ReplacedShard(
        source=source,
        shard=old.name,
        by=by,
        documents_kept=len(before & after),
        documents_gone=len(before - after),
        documents_new=len(after - before),
        padded_tokens=filling.padded_tokens,
        cut_documents=filling.cut_documents,
    )
    return _Change(summary, tuple(sorted(before - after)), tuple(sorted(after - before)))


def _write_diff(journal: Journal, *, made: ShardEntry, change: _Change, survey: Survey) -> ShardEntry:
    content = {"change": change.summary, "gone": change.gone, "new": change.new, "rejects": list(survey.rejects())}
    path = journal.data / f"{made.name}.diff.json"
    write_atomic(path, dumps(content, indent=1) + "\n")
    entry = FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))
    return replace(made, files={**made.files, "diff.json": entry})


def _manifest(
    out: Path, *, manifest: Manifest, change: _Change, old: ShardEntry, made: ShardEntry, stored: Stored, codec: Tokenizer
) -> Manifest:
    source, train = change.summary.source, manifest.split(change.summary.source, "train")
    entry: SourceEntry = manifest.sources[source]
    split = SplitEntry(
        shards=tuple(made if shard.name == old.name else shard for shard in train.shards),
        tokens=train.tokens,
        docs=train.docs - old.docs + made.docs,
        text_bytes=train.text_bytes + _text_bytes(stored.tokens, codec=codec) - _old_text_bytes(out, manifest, source, old, codec),
    )
    changed = replace(
        entry,
        documents_sha256=sha256_json([entry.documents_sha256, old.name, made.sha256]),
        splits={**entry.splits, "train": split},
    )
    return replace(
        manifest,
        tool_version=__version__,
        format_version=FORMAT_VERSION,
        sources={**manifest.sources, source: changed},
        parent=manifest.sha256,
        replaced=(*manifest.replaced, change.summary),
    )


def _text_bytes(tokens: npt.NDArray[Any], *, codec: Tokenizer) -> int:
    pieces = (tokens[first : first + _TOKENS_AT_ONCE] for first in range(0, len(tokens), _TOKENS_AT_ONCE))
    return sum(int(codec.token_num_bytes[piece].sum()) for piece in pieces)


def _old_text_bytes(out: Path, manifest: Manifest, source: str, old: ShardEntry, codec: Tokenizer) -> int:
    """The text of a shard is noted nowhere, but its tokens say how long it was."""
    store = TokenStore(out, source=source, split="train", manifest=manifest)
    try:
        shards = manifest.split(source, "train").shards
        start = sum(shard.tokens for shard in shards[: shards.index(old)])
        return _text_bytes(store.read(start, old.tokens), codec=codec)
    finally:
        store.close()


def _publish(journal: Journal, *, out: Path, before: Manifest, after: Manifest, made: ShardEntry) -> None:
    """The shard first, the old manifest under its own name, the new one last: a kill before that leaves the data as they were."""
    folder = out / after.replaced[-1].source / "train"
    for suffix in ("tok", *made.files):
        os.rename(journal.data / f"{made.name}.{suffix}", folder / f"{made.name}.{suffix}")
    fsync_dir(folder)
    write_atomic(out / earlier_name(before.sha256), (out / MANIFEST_NAME).read_bytes())
    write_atomic(out / MANIFEST_NAME, dumps(after.as_json(), indent=1) + "\n")
