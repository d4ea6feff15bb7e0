"""Rows of `surefoot data locate`: documents of a step, and steps of a document, under stable names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from surefoot.cli.run_data import RunData, found_in, refuse_damage
from surefoot.cli.run_steps import StepSamples
from surefoot.core.errors import ConfigError, DataError
from surefoot.data.blocked import silenced
from surefoot.data.hits import Hit, hits_of
from surefoot.data.manifest import SPLITS, TOKENIZER_NAME, load_manifest
from surefoot.data.provenance import Provenance, StoredDocument
from surefoot.data.shards import TokenStore
from surefoot.data.slots import SlotPlace, data_rank_of, place_of_slot
from surefoot.data.storage import open_storage, read_file
from surefoot.data.tokenizer import Tokenizer

_EXCERPT_CHARACTERS: Final = 160
_EXCERPT_TOKENS: Final = 160
"""No token of a common vocabulary is less than a character on average, so these fill the line."""

Row = dict[str, Any]


def rows_of_step(run: RunData, step: int, *, rank: int | None = None, row: int | None = None) -> tuple[StepSamples, list[Row]]:
    """What `step` trains on: one row per document and sample. Raises ConfigError for a step, rank or row that is not there."""
    taken = run.steps.of_step(step)
    places = places_of(taken, micro_batch_size=run.config.train.micro_batch_size, rank=rank, row=row)
    samples = run.order.at(taken.samples[[place.slot for place in places]])
    blocked = silenced(run.blocklist.blocks)
    with run.provenance(taken.data_hash) as provenance:
        return taken, [
            _row(hit, taken, place, rank=rank)
            for place, sample in zip(places, samples, strict=True)
            for hit in hits_of(sample, provenance=provenance, blocked=blocked)
        ]


def rows_of_document(run: RunData, document: str) -> tuple[list[StoredDocument], list[Row]]:
    """Every place of `document` in the data, and every row of the run that holds a part of it, in all its epochs.

    Where shards were made anew under the run, a step counts when the document was in the data that the step was trained on.
    """
    found: dict[StoredDocument, None] = {}
    rows: list[Row] = []
    missing: DataError | None = None
    for data_hash in run.editions:
        with run.provenance(data_hash) as provenance:
            try:
                here = found_in(run, provenance, document)
            except DataError as error:
                refuse_damage(error)
                missing = error
                continue
            found |= dict.fromkeys(here)
            rows += [row for stored in here for row in _rows_of_stored(run, stored, provenance)]
    if missing is not None and not found:
        raise missing
    return list(found), sorted(rows, key=lambda row: (row["step"], row["slot"], row["span"]))


def rows_of_folder(path: str | Path, document: str) -> tuple[list[StoredDocument], list[Row]]:
    """The same of prepared data that no run is asked about: there are places in its streams, and no steps. Held-out documents count."""
    manifest = load_manifest(path)
    errors: list[DataError] = []
    for split in SPLITS:
        with Provenance(path, manifest=manifest, split=split) as provenance:
            try:
                found = provenance.find(document)
            except DataError as error:
                refuse_damage(error)
                errors.append(error)
                continue
        nowhere: Row = {"step": None, "rank": None, "row": None, "span": None}
        return found, [{**nowhere, **stored_row(stored), "split": split} for stored in found]
    raise errors[0]


def places_of(taken: StepSamples, *, micro_batch_size: int, rank: int | None, row: int | None) -> list[SlotPlace]:
    """The slots of a step, of one rank and row where they are named. Raises ConfigError when there is none such."""
    places = [
        place_of_slot(slot, micro_batch_size=micro_batch_size, parallel=taken.parallel) for slot in range(len(taken.samples))
    ]  # a step has thousands at most
    if rank is not None:
        data_rank = data_rank_of(rank, parallel=taken.parallel)
        places = [place for place in places if place.data_rank == data_rank]
    if row is None:
        return places
    chosen = [place for place in places if place.row == row]
    if not chosen:
        who = "its ranks have" if rank is None else f"rank {rank} has"
        most = max((place.row for place in places), default=-1)
        hint = f"{who} rows 0 to {most} in step {taken.step}" if most >= 0 else f"{who} none in step {taken.step}"
        raise ConfigError(f"there is no row {row}", where="--row", hint=hint, got=row)
    return chosen


def stored_row(stored: StoredDocument) -> Row:
    """What is known of a document without a run."""
    return {
        "document": stored.id,
        "hash": stored.hash,
        "source": stored.source,
        "file": stored.file,
        "record": stored.record,
        "offset": stored.byte_offset,
        "byte_length": stored.byte_length,
        "shard": f"{stored.source}/{stored.shard}",
        "tokens": [stored.start, stored.end],
    }


def add_excerpts(rows: Iterable[Row], path: str | Path) -> None:
    """Give each row the beginning of its text, in one line. Reads the tokens, with their checksums."""
    tokenizer = Tokenizer(read_file(path, TOKENIZER_NAME), where=f"{path}/{TOKENIZER_NAME}")
    manifest, storage = load_manifest(path), open_storage(path)
    stores: dict[tuple[str, str], TokenStore] = {}
    try:
        for row in rows:
            key = row["source"], row.get("split", "train")
            store = stores.get(key) or stores.setdefault(
                key, TokenStore(path, source=key[0], split=key[1], manifest=manifest, storage=storage)
            )
            start, end = row["tokens"]
            text = tokenizer.decode(store.read(start, min(end - start, _EXCERPT_TOKENS)).tolist())
            row["excerpt"] = "".join(character if character.isprintable() else "." for character in text[:_EXCERPT_CHARACTERS])
    finally:
        storage.close()


def _rows_of_stored(run: RunData, stored: StoredDocument, provenance: Provenance) -> list[Row]:
    held = run.order.holding(stored.source, stored.start, stored.end, first=0, until=run.steps.end_sample)
    samples = run.order.steps.without_skipped(held)
    if not samples.size:
        return []
    blocked = silenced(run.blocklist.blocks)
    planned: dict[int, StepSamples] = {}
    rows: list[Row] = []
    for sample, step in zip(run.order.at(samples), run.steps.taking(samples), strict=True):
        taken = planned.get(step) or planned.setdefault(step, run.steps.planned(step))
        if (taken.data_hash or run.manifest.sha256) != provenance.manifest.sha256:
            continue
        slot = int(taken.samples.searchsorted(sample.sample))
        place = place_of_slot(slot, micro_batch_size=run.config.train.micro_batch_size, parallel=taken.parallel)
        hits = hits_of(sample, provenance=provenance, blocked=blocked)
        rows += [_row(hit, taken, place, rank=None) for hit in hits if hit.document == stored]
    return rows


def _row(hit: Hit, taken: StepSamples, place: SlotPlace, *, rank: int | None) -> Row:
    """`span` is in positions of the row, `tokens` the same in the stream of the source."""
    when: Mapping[str, Any] = {
        "step": taken.step,
        "rank": place.rank if rank is None else rank,
        "row": place.row,
        "span": [hit.first, hit.end],
    }
    more: Mapping[str, Any] = {
        "tokens": [hit.tokens.start, hit.tokens.end],
        "seen": taken.seen,
        "attempt": taken.attempt,
        "masked": hit.masked,
        "sample": hit.sample.sample,
        "epoch": hit.sample.epoch,
        "index": hit.sample.index,
        "slot": place.slot,
        "micro_step": place.micro_step,
        "data_rank": place.data_rank,
        "ranks": list(place.ranks),
    }
    return {**when, **stored_row(hit.document), **more}
