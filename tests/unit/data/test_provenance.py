"""Between tokens and documents: round trips over all of a small data set, against brute force and the files that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.core.blocking import Block, TokenSpan
from surefoot.core.errors import ConfigError, DataError
from surefoot.data.blocked import silenced
from surefoot.data.hits import Hit, hits_of
from surefoot.data.manifest import load_manifest
from surefoot.data.provenance import Provenance, StoredDocument, merged
from surefoot.data.recipe import RunOrder, run_order
from surefoot.data.shards import TokenStore
from surefoot.data.tokenizer import bytes_tokenizer
from tests.three_sources import ALIKE, SOURCES, config_of, corpus_file, make_run, prepare_three

FROZEN = Path(__file__).parent / "frozen" / "format1" / "data"
NUM_SAMPLES = 400


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "data")


@pytest.fixture(scope="module")
def order(three: Path, tmp_path_factory: pytest.TempPathFactory) -> RunOrder:
    config = config_of(make_run(tmp_path_factory.mktemp("run"), three))
    return run_order(load_manifest(three), config)


def streams_of(path: Path) -> dict[str, npt.NDArray[np.int64]]:
    manifest = load_manifest(path)
    stores = {name: TokenStore(path, source=name, split="train", manifest=manifest) for name in manifest.sources}
    return {name: store.read(0, store.num_tokens).astype(np.int64) for name, store in stores.items()}


def all_documents(path: Path) -> list[StoredDocument]:
    with Provenance(path) as provenance:
        spans = [TokenSpan(name, 0, source.splits["train"].tokens) for name, source in provenance.manifest.sources.items()]
        return [stored for span in spans for stored in provenance.documents(span)]


def tokens_of_text(three: Path, stored: StoredDocument) -> list[int]:
    """The document's tokens, made anew from the bytes of the file that it came from."""
    data = corpus_file(three, stored.file).read_bytes()[stored.byte_offset : stored.byte_offset + stored.byte_length]
    codec = bytes_tokenizer()
    return [*codec.encode(json.loads(data)["text"]), codec.eos_id]


def wrong_tokens(three: Path, order: RunOrder, *, shift: int = 0) -> int:
    """How many tokens of the first samples are not those of the document, and of the place in it, that they are said to be."""
    streams, texts, wrong = streams_of(three), {stored.id: tokens_of_text(three, stored) for stored in all_documents(three)}, 0
    with Provenance(three) as provenance:
        for sample in order.at(np.arange(NUM_SAMPLES)):
            row = np.concatenate([streams[sample.source][start : start + count] for start, count in sample.spans]).tolist()
            hits = hits_of(sample, provenance=provenance, blocked={})
            assert [hits[0].first, *(hit.end for hit in hits)] == [*(hit.first for hit in hits), len(row)]  # they cover the row
            for hit in hits:
                begin = hit.start - hit.document.start + shift
                said = texts[hit.document.id][begin : begin + hit.end - hit.first]
                wrong += sum(one != other for one, other in zip(said, row[hit.first : hit.end], strict=False)) + len(
                    row[hit.first : hit.end]
                )
                wrong -= len(said)
    return wrong


def test_every_token_of_every_sample_is_in_the_document_that_it_is_said_to_be_in(three: Path, order: RunOrder) -> None:
    assert {sample.source for sample in order.at(np.arange(NUM_SAMPLES))} == set(SOURCES)
    assert wrong_tokens(three, order) == 0
    assert wrong_tokens(three, order, shift=1) > 0


def test_a_document_is_in_exactly_the_samples_that_hold_a_token_of_it(three: Path, order: RunOrder) -> None:
    documents = all_documents(three)
    held: dict[str, list[int]] = {stored.id: [] for stored in documents}
    with Provenance(three) as provenance:
        for sample in order.at(np.arange(NUM_SAMPLES)):
            for document in {hit.document.id for hit in hits_of(sample, provenance=provenance, blocked={})}:
                held[document].append(sample.sample)
    assert sum(len(samples) > 1 for samples in held.values()) > 10
    for stored in documents:
        assert order.holding(stored.source, stored.start, stored.end, first=0, until=NUM_SAMPLES).tolist() == held[stored.id]
    beside = [order.holding(one.source, one.start + 1, one.end + 1, until=NUM_SAMPLES).tolist() for one in documents]
    assert any(samples != held[one.id] for samples, one in zip(beside, documents, strict=True))


def test_spans_go_over_shards_and_documents(three: Path) -> None:
    manifest = load_manifest(three)
    with Provenance(three) as provenance:
        for name, source in manifest.sources.items():
            assert len(source.splits["train"].shards) > 1
            documents = [stored for stored in all_documents(three) if stored.source == name]
            assert [stored.number for stored in documents] == list(range(source.splits["train"].docs))
            for span in (TokenSpan(name, start, start + 100) for start in range(0, source.splits["train"].tokens - 100, 53)):
                wanted = [stored for stored in documents if stored.start < span.end and stored.end > span.start]
                assert provenance.documents(span) == wanted
                assert provenance.num_documents(span) == len(wanted)


def test_a_document_is_found_by_digits_by_number_and_in_every_source(three: Path) -> None:
    documents = all_documents(three)
    with Provenance(three) as provenance:
        for stored in documents:
            same = [other for other in documents if other.hash == stored.hash]
            for digits in (16, 17, 32):
                assert provenance.find(stored.hash[:digits]) == same
            assert provenance.find(f"{stored.hash.upper()}{'0' * 32}") == same
            assert provenance.find(stored.id) == [stored]
        shared = [stored for stored in documents if sum(other.hash == stored.hash for other in documents) > 1]
        assert {stored.source for stored in shared} == {"code", "web"}


def test_too_few_digits_list_the_documents(three: Path) -> None:
    alike = [stored for stored in all_documents(three) if stored.hash.startswith("25e59f52")]
    assert len(alike) == len(ALIKE)
    with Provenance(three) as provenance:
        with pytest.raises(DataError) as refused:
            provenance.find("25e59f52")
        assert all(stored.hash in refused.value.what for stored in alike)
        assert provenance.find(alike[0].hash[:12]) == [alike[0]]


def test_a_file_is_its_documents(three: Path) -> None:
    documents = all_documents(three)
    with Provenance(three) as provenance:
        for file in {stored.file for stored in documents}:
            assert provenance.spans_of_file(file) == merged(stored.span for stored in documents if stored.file == file)
        with pytest.raises(DataError, match=r"there are web/part-1\.jsonl"):
            provenance.spans_of_file("web/part-11.jsonl")


def test_shards_are_laid_end_to_end(three: Path) -> None:
    manifest = load_manifest(three)
    with Provenance(three) as provenance:
        spans = [provenance.span_of_shard(f"web/{shard.name}") for shard in manifest.sources["web"].splits["train"].shards]
        assert merged(spans) == [TokenSpan("web", 0, manifest.sources["web"].splits["train"].tokens)]
        with pytest.raises(DataError, match="there are web/00000 to web/0000"):
            provenance.span_of_shard("web/77777")


@pytest.mark.parametrize(
    ("document", "error", "words"),
    [
        ("0123456789abcdef", DataError, "documents in its train split: code"),
        ("0123", ConfigError, "at least 8 hex digits"),
        ("the text", ConfigError, "names no document"),
        ("web/99999", DataError, "source 'web' has 0 to"),
        ("wob/1", DataError, "the prepared data holds code, prose, web"),
    ],
)
def test_what_is_not_there_is_said(document: str, error: type[Exception], words: str, three: Path) -> None:
    with Provenance(three) as provenance, pytest.raises(error, match=words):
        provenance.find(document)


def test_held_out_documents_are_in_a_split_of_their_own(three: Path) -> None:
    with Provenance(three, split="heldout") as heldout, Provenance(three) as train:
        held = heldout.documents(TokenSpan("prose", 0, 10))[0]
        assert heldout.find(held.hash) == [held]
        with pytest.raises(DataError, match="no document with hash"):
            train.find(held.hash)


def test_a_hit_is_masked_from_the_sample_that_knows_of_it(three: Path, order: RunOrder) -> None:
    stored = next(one for one in all_documents(three) if one.source == "web" and one.end - one.start > 40)
    (first, *later) = order.holding("web", stored.start, stored.end, first=0, until=NUM_SAMPLES).tolist()

    def masked(sample: int, effective_sample: int) -> list[Hit]:
        block = Block("document", stored.hash, "mask", (stored.span,), effective_sample=effective_sample)
        with Provenance(three) as provenance:
            return [hit for hit in hits_of(order.at(sample)[0], provenance=provenance, blocked=silenced([block])) if hit.masked]

    assert [hit.document for hit in masked(first, 0)] == [stored]
    assert masked(first, first + 1) == []
    assert [hit.document for hit in masked(later[-1], later[-1])] == [stored]


def test_format_1_is_read_without_an_index() -> None:
    manifest = load_manifest(FROZEN)
    assert manifest.format_version == 1
    (name,) = manifest.sources
    documents = all_documents(FROZEN)
    assert len(documents) == manifest.sources[name].splits["train"].docs
    with Provenance(FROZEN) as provenance:
        for stored in documents:
            assert provenance.find(stored.hash[:9]) == [stored]
        assert provenance.spans_of_file(documents[0].file)[0].start == 0
        with pytest.raises(DataError, match="no document with hash"):
            provenance.find("0123456789abcdef")


def test_no_more_is_read_than_is_asked_for(three: Path) -> None:
    """Side files of other shards stay shut: those of the last are gone, and nobody notices before they are needed."""
    manifest = load_manifest(three)
    last = manifest.sources["web"].splits["train"].shards[-1]
    files = list((three / "web" / "train").glob(f"{last.name}.[ls]*"))
    assert files
    with Provenance(three) as provenance:
        for file in files:
            file.rename(file.with_suffix(file.suffix + ".away"))
        try:
            assert provenance.documents(TokenSpan("web", 0, 50))
            with pytest.raises(DataError, match="cannot open"):
                provenance.documents(
                    TokenSpan("web", manifest.sources["web"].splits["train"].tokens - 1, manifest.sources["web"].splits["train"].tokens)
                )
        finally:
            for file in files:
                file.with_suffix(file.suffix + ".away").rename(file)
