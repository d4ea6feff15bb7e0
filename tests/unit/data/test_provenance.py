"""Between tokens and documents: round trips over all of a small data set, against brute force and the files that it was made from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from surefoot.core.blocking import Block, TokenSpan
from surefoot.core.errors import ConfigError, DataError
from surefoot.data.blocked import silenced
from surefoot.data.filling import PADDING_FILE
from surefoot.data.hits import Hit, hits_of
from surefoot.data.manifest import load_manifest
from surefoot.data.provenance import Provenance, StoredDocument, merged
from surefoot.data.recipe import RunOrder, run_order
from surefoot.data.reprocess import reprocess
from surefoot.data.shards import TokenStore
from surefoot.data.side_files import DAMAGED_FILE
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


Answers = dict[str, object]


def answers(path: Path, asked: Iterable[str], *, source: str = "code") -> Answers:
    """What is told of each document, and of all tokens of the first shard; of a damaged file, the kind of the error."""

    def told(document: str) -> object:
        with Provenance(path) as provenance:
            try:
                if document == "all":
                    return provenance.documents(TokenSpan(source, 0, provenance.manifest.split(source, "train").shards[0].tokens))
                return provenance.find(document)
            except DataError as error:
                return error.values.get("kind")

    return {document: told(document) for document in asked}


@pytest.mark.parametrize("suffix", ["len", "idx", "src.parquet"])
def test_nothing_is_answered_from_a_damaged_file(suffix: str, three: Path, tmp_path: Path) -> None:
    """A bit at a time. What is told is right, or it is told that the file is damaged."""
    data = tmp_path / "data"
    shutil.copytree(three, data)
    documents = [stored for stored in all_documents(three) if (stored.source, stored.shard) == ("code", "00000")]
    asked = ["all", *(name for stored in documents[::3] for name in (stored.id, stored.hash))]
    right = answers(data, asked)
    file = data / "code" / "train" / f"00000.{suffix}"
    content = file.read_bytes()
    num_told = 0
    for place in range(0, len(content), 1 + len(content) // 40):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        got = answers(data, asked)
        wrong = {name: one for name, one in got.items() if one != right[name]}
        assert set(wrong.values()) <= {DAMAGED_FILE}
        num_told += bool(wrong)
    assert num_told > 20


@pytest.mark.parametrize("suffix", ["len", "src.parquet"])
def test_a_damaged_file_of_format_1_contradicts_the_tokens(suffix: str, tmp_path: Path) -> None:
    shutil.copytree(FROZEN, tmp_path / "data")
    (name,) = load_manifest(FROZEN).sources
    file = tmp_path / "data" / name / "train" / f"00000.{suffix}"
    content = bytearray(file.read_bytes())
    content[8 if suffix == "len" else -20] ^= 1
    file.write_bytes(content)
    assert answers(tmp_path / "data", [f"{name}/1", f"{name}/2"], source=name) == {f"{name}/1": DAMAGED_FILE, f"{name}/2": DAMAGED_FILE}


def test_lengths_are_compared_in_full_where_the_tokens_cannot_be_read(three: Path, tmp_path: Path) -> None:
    """Who asks which documents a damaged shard holds gets an answer."""
    data = tmp_path / "data"
    shutil.copytree(three, data)
    right = answers(data, ["code/1"])
    (data / "code" / "train" / "00000.tok").unlink()
    assert answers(data, ["code/1"]) == right
    file = data / "code" / "train" / "00000.len"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1  # no length: what fills them up
    file.write_bytes(content)
    assert answers(data, ["code/1"]) == {"code/1": DAMAGED_FILE}


def test_files_of_touched_shards_are_compared_in_full(three: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(three, data)
    entry = load_manifest(data).split("code", "train").shards[0]
    file = data / "code" / "train" / "00000.src.parquet"
    content = bytearray(file.read_bytes())
    content[0] ^= 1  # no row: the magic number
    file.write_bytes(content)
    with Provenance(data) as provenance:
        assert provenance.check([TokenSpan("code", entry.tokens, entry.tokens + 1), TokenSpan("web", 0, 9)])
        assert provenance.check_indexes()
        with pytest.raises(DataError, match=r"its sha256 is .*, the manifest says") as refused:
            provenance.check([TokenSpan("code", entry.tokens - 1, entry.tokens)])
    assert refused.value.where == str(file)
    assert "restore the file from a copy" in str(refused.value)
    with Provenance(FROZEN) as provenance:
        assert not provenance.check([TokenSpan(name, 0, 1) for name in provenance.manifest.sources])


def test_no_such_document_is_said_when_the_indexes_are_whole(three: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(three, data)
    last = load_manifest(data).split("web", "train").shards[-1]
    file = data / "web" / "train" / f"{last.name}.idx"
    content = bytearray(file.read_bytes())
    content[0] ^= 1  # in order still
    file.write_bytes(content)
    with Provenance(data) as provenance, pytest.raises(DataError, match="its sha256 is"):
        provenance.find("0123456789abcdef")
    with Provenance(FROZEN) as provenance, pytest.raises(DataError, match="not compared with the manifest"):
        provenance.find("0123456789abcdef")


def test_padding_is_a_document_of_many_ends(tmp_path: Path) -> None:
    """Of a shard made anew: all of it is EOS, and nothing else may be."""
    data = prepare_three(tmp_path / "data")
    entry = load_manifest(data).split("prose", "train").shards[0]
    given = tmp_path / "few.jsonl"
    given.write_text(json.dumps({"text": "few"}) + "\n")
    after = reprocess(data, shard="prose/00000", inputs=[str(given)])
    assert after.replaced[0].padded_tokens > 100
    with Provenance(data) as provenance:
        documents = provenance.documents(TokenSpan("prose", 0, entry.tokens))
        assert [stored.file for stored in documents][-1] == PADDING_FILE
        assert provenance.documents(TokenSpan("prose", entry.tokens - 1, entry.tokens)) == documents[-1:]
