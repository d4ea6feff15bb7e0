"""Where data lies in a real S3 server, tokens lead to documents and documents to tokens as in the folder."""

from __future__ import annotations

import json
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from surefoot.cli.main import run
from surefoot.core.blocking import TokenSpan
from surefoot.data.provenance import Provenance, StoredDocument
from tests.drills.s3_server import BUCKET
from tests.three_sources import make_run, prepare_three, record_attempt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_three(tmp_path_factory.mktemp("three") / "data")


@pytest.fixture
def url(s3: str, folder: Path) -> str:
    """The prepared folder, copied."""
    backend = S3Store(BUCKET, prefix=s3.removeprefix(f"s3://{BUCKET}/"), client_options={"allow_http": True})
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(backend, str(path.relative_to(folder)), path)
    return s3


def told(place: str | Path) -> list[list[StoredDocument]]:
    with Provenance(place) as provenance:
        spans = [TokenSpan("web", start, start + 300) for start in (0, 100, 900)]
        documents = [provenance.documents(span) for span in spans]
        return [*documents, *(provenance.find(stored.hash[:12]) for stored in documents[1])]


def test_the_same_documents_are_found(url: str, folder: Path) -> None:
    assert told(url) == told(folder)


def test_a_run_over_a_store_is_located_in(url: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path, folder)
    record_attempt(run_dir, attempt=1, base_step=0, next_samples=[5, 10])

    def located(*arguments: str) -> object:
        assert run(["data", "locate", *arguments, "--excerpt", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert located(str(run_dir), "--step", "2", "--data", url) == located(str(run_dir), "--step", "2")
    assert located(url, "--document", "web/3") == located(str(folder), "--document", "web/3")
