"""Text in, shards out: survey, tokenizer, token shards, manifest last; the folder appears by one rename."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from surefoot.core.durable import write_atomic
from surefoot.core.errors import ConfigError
from surefoot.core.hashing import sha256_file, sha256_json
from surefoot.core.sections import SourceSection
from surefoot.core.strict_json import dumps
from surefoot.core.version import __version__
from surefoot.data.build import build_source, training_texts
from surefoot.data.choosing import shared_counts
from surefoot.data.corpus import list_files
from surefoot.data.crew import Crew
from surefoot.data.cutting import CHUNK_BYTES, CUTTING_VERSION, MAX_RECORD_BYTES, Cutting
from surefoot.data.documents import OnBadRecord
from surefoot.data.encoder import InputChanged
from surefoot.data.inputs import write_inputs
from surefoot.data.journal import Damaged, Journal
from surefoot.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest, SourceEntry, TokenizerEntry, dtype_for, load_manifest
from surefoot.data.prepared import check_sources, existing, prepare_command, refuse_foreign_folder
from surefoot.data.publish import folder_in_making, publish, refuse_too_small, writing
from surefoot.data.quality.rules import RuleSet
from surefoot.data.reader import Corpus
from surefoot.data.shard_writer import SHARD_BYTES
from surefoot.data.survey import LEFT_OUT, Progress, Survey, paced, take_survey
from surefoot.data.tokenizer import Tokenizer, bpe_size, bytes_tokenizer, load_tokenizer, train_bpe

logger = logging.getLogger(__name__)

_MAX_HELDOUT_FRACTION: Final = 0.5
_MAX_RECORD_BYTES: Final = 1 << 30  # a document has its length in 32 bits, and a tokenizer takes some hundred bytes a token
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
    rules: RuleSet | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    force: bool = False,
    workers: int = 0,
    progress: Callable[[Progress], None] = lambda _: None,
    chunk_bytes: int = CHUNK_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Prepare `sources` into the folder `out` and return its manifest.

    `tokenizer` is `bpe:<size>`, `bytes`, or the path of a tokenizer.json. Data that was already prepared from the same documents in the
    same way is left as it is; other data is replaced only with `force`. Raises DataError for bad input, other data at `out`, a full disk.
    `progress` is told each stage and every few seconds within it. Documents that break one of `rules` which drops are left out.

    `workers` processes share the work, 0 for one per core that this process may use; the bytes do not depend on their number. A kill at any
    time leaves `out` as it was and a hidden folder beside it: the next call with the same input and settings goes on from there.
    """
    _check_numbers(heldout_fraction=heldout_fraction, max_record_bytes=max_record_bytes, workers=workers)
    check_sources(sources)
    heldout_fraction = float(heldout_fraction)  # 0 and 0.0 are one value, but two JSON texts
    command = prepare_command(sources, out=out, tokenizer=tokenizer, heldout_fraction=heldout_fraction, text_field=text_field)
    workers = workers or len(os.sched_getaffinity(0))
    with _parallel_tokenizing(workers > 1):
        codec = _given_tokenizer(tokenizer)
        corpora = [
            Corpus(
                source=section.name,
                files=list_files(section.files, source=section.name),
                cutting=Cutting(text_field, max_record_bytes, chunk_bytes),
                on_bad_record=on_bad_record,
                skip_command=f"{command} --on-bad-record skip",
                rules=rules,
                rules_off=section.rules_off,
            )
            for section in sources
        ]
        job = _Job(
            corpora=corpora,
            out=Path(os.path.realpath(out)),
            codec=codec,
            recipe=f"file:{codec.sha256}" if codec and tokenizer != "bytes" else tokenizer,
            heldout_fraction=heldout_fraction,
            force=force,
            shard_bytes=shard_bytes,
        )
        with folder_in_making(job.out) as folder, Crew(workers) as crew:
            with writing():
                refuse_foreign_folder(job.out)
            return _make(job, folder=folder, crew=crew, progress=paced(progress))


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for. `codec` is None while it has to be trained."""

    corpora: Sequence[Corpus]
    out: Path
    codec: Tokenizer | None
    recipe: str
    heldout_fraction: float
    force: bool
    shard_bytes: int

    @property
    def rules_sha256(self) -> str:
        rules = self.corpora[0].rules
        return rules.sha256 if rules else ""

    @property
    def key(self) -> str:
        """All that the bytes depend on. A file that was touched counts as another: its content is not read to find out."""
        return sha256_json(
            {
                "release": __version__,
                "cutting": CUTTING_VERSION,
                "tokenizer": self.recipe,
                "heldout_fraction": self.heldout_fraction,
                "rules": self.rules_sha256,
                "shard_bytes": self.shard_bytes,
                "sources": [
                    [corpus.source, corpus.cutting, corpus.on_bad_record, sorted(corpus.rules_off), _stamps(corpus)]
                    for corpus in self.corpora
                ],
            }
        )


def _stamps(corpus: Corpus) -> list[list[object]]:
    stats = [(file.name, file.path.stat()) for file in corpus.files]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats]


def _make(job: _Job, *, folder: Path, crew: Crew, progress: Callable[[Progress], None]) -> Manifest:
    with writing():
        journal = Journal(folder, key=job.key)
    try:
        return _published(job, journal=journal) or _make_in(job, journal=journal, crew=crew, progress=progress)
    except InputChanged:
        with writing():
            journal.clear()
        raise
    except Damaged as damage:
        logger.warning("what an interrupted preparation left is damaged (%s): it begins anew", damage)
    with writing():
        journal.clear()
    return _make_in(job, journal=journal, crew=crew, progress=progress)


def _published(job: _Job, *, journal: Journal) -> Manifest | None:
    """What this very job made, if it was ended before it removed its hidden folder. Raises Damaged when it is not at `out` now."""
    noted = journal.read("published")
    if noted is None or journal.data.is_dir():
        return None
    if (job.out / MANIFEST_NAME).exists() and (manifest := load_manifest(job.out)).sha256 == noted["manifest_sha256"]:
        return manifest
    raise Damaged("what it published is there no more")


def _make_in(job: _Job, *, journal: Journal, crew: Crew, progress: Callable[[Progress], None]) -> Manifest:
    surveys = {
        corpus.source: take_survey(corpus, heldout_fraction=job.heldout_fraction, journal=journal, crew=crew, progress=progress)
        for corpus in job.corpora
    }
    files = {corpus.source: corpus.files for corpus in job.corpora}
    documents = {source: survey.documents_sha256 for source, survey in surveys.items()}
    if not job.force and (found := existing(job.out, documents=documents, recipe=job.recipe, heldout_fraction=job.heldout_fraction)):
        with writing():
            write_inputs(job.out, files)
        return found
    text_bytes = sum(survey.text_bytes for survey in surveys.values())
    refuse_too_small(job.out, needed_bytes=2 * text_bytes // (1 if job.recipe == "bytes" else _HIGH_BYTES_PER_TOKEN))
    codec = job.codec or _trained_tokenizer(job, surveys=surveys, journal=journal, progress=progress)
    entries = {
        corpus.source: build_source(
            corpus,
            survey=surveys[corpus.source],
            codec=codec,
            journal=journal,
            crew=crew,
            progress=progress,
            shard_bytes=job.shard_bytes,
        )
        for corpus in job.corpora
    }
    manifest = _manifest(job, codec=codec, entries=_with_shared(entries, surveys=surveys))
    with writing():
        write_atomic(journal.data / TOKENIZER_NAME, codec.json_bytes)
        write_inputs(journal.data, files)
        write_atomic(journal.data / MANIFEST_NAME, dumps(manifest.as_json(), indent=1) + "\n")
        journal.note("published", {"manifest_sha256": manifest.sha256})  # true once `data` is gone from here
    publish(journal.data, out=job.out)
    return manifest


def _manifest(job: _Job, *, codec: Tokenizer, entries: Mapping[str, SourceEntry]) -> Manifest:
    return Manifest(
        tool_version=__version__,
        tokenizer=TokenizerEntry(recipe=job.recipe, sha256=codec.sha256, eos_id=codec.eos_id, vocab_size=codec.vocab_size),
        dtype=dtype_for(codec.vocab_size),
        heldout_fraction=job.heldout_fraction,
        sources=entries,
        rules=job.rules_sha256,
    )


def _with_shared(entries: Mapping[str, SourceEntry], *, surveys: Mapping[str, Survey]) -> dict[str, SourceEntry]:
    digests = {source: survey.rows["digest"][survey.fates != LEFT_OUT] for source, survey in surveys.items()} if len(surveys) > 1 else {}
    shared = shared_counts(digests)
    return {source: replace(entry, shared=shared.get(source, 0)) for source, entry in entries.items()}


def _trained_tokenizer(job: _Job, *, surveys: Mapping[str, Survey], journal: Journal, progress: Callable[[Progress], None]) -> Tokenizer:
    """Trained on all sources; once it is, it is kept over an interruption."""
    path = journal.work / TOKENIZER_NAME
    noted = journal.read("trained")
    if noted:
        if not path.exists() or sha256_file(path) != noted["sha256"]:
            raise Damaged(f"{TOKENIZER_NAME} is not what was written")
        return load_tokenizer(path)
    total_bytes = sum(survey.text_bytes for survey in surveys.values())

    def texts() -> Iterator[str]:
        done_bytes = 0
        for corpus in job.corpora:
            for text in training_texts(corpus, survey=surveys[corpus.source]):
                progress(Progress("training tokenizer", done_bytes, total_bytes))
                done_bytes += len(text)
                yield text

    codec = train_bpe(texts(), vocab_size=bpe_size(job.recipe) or 0)
    with writing():
        write_atomic(path, codec.json_bytes)
        journal.note("trained", {"sha256": codec.sha256})
    return codec


def _given_tokenizer(spec: str) -> Tokenizer | None:
    """The tokenizer that `spec` names, or None when it has to be trained."""
    if bpe_size(spec) is not None:
        return None
    return bytes_tokenizer() if spec == "bytes" else load_tokenizer(spec)


def _check_numbers(*, heldout_fraction: float, max_record_bytes: int, workers: int) -> None:
    if not 0.0 <= heldout_fraction <= _MAX_HELDOUT_FRACTION:
        hint = f"wanted 0 to {_MAX_HELDOUT_FRACTION}"
        raise ConfigError(f"a held-out fraction of {heldout_fraction}", where="heldout_fraction", hint=hint, got=heldout_fraction)
    if not 1 <= max_record_bytes <= _MAX_RECORD_BYTES:
        hint = f"wanted 1 to {_MAX_RECORD_BYTES} bytes"
        raise ConfigError(f"records of up to {max_record_bytes} bytes", where="max_record_bytes", hint=hint, got=max_record_bytes)
    if workers < 0:
        raise ConfigError(f"{workers} workers", where="workers", hint="0 is one per core", got=workers)


@contextmanager
def _parallel_tokenizing(is_parallel: bool) -> Iterator[None]:
    """All cores for the tokenizer here and only here: a process forked later must not inherit a thread pool it believes in."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = before or ("true" if is_parallel else "false")
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
