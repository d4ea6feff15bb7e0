from __future__ import annotations

import json
from typing import Any

import pytest

from surefoot.core.blocking import Block, TokenSpan, block_from_json
from surefoot.core.errors import DataError

DOCUMENT = Block("document", "ab" * 16, "mask", spans=(TokenSpan("web", 10, 20), TokenSpan("code", 0, 0)), effective_sample=40, by="eve")
SAMPLES = Block("samples", "100:120", "skip", samples=(100, 120), reason="spike", evidence_step=7)


def changed(block: Block, **fields: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(block.as_json()))
    return raw | fields


def span(start: Any, end: Any, source: Any = "web") -> dict[str, Any]:
    return {"spans": [{"source": source, "start": start, "end": end}]}


@pytest.mark.parametrize("block", [DOCUMENT, SAMPLES])
def test_an_entry_comes_back_as_it_was(block: Block) -> None:
    assert block_from_json(changed(block)) == block


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (changed(DOCUMENT, kind="foo"), "no kind 'foo', there are document, file, shard, samples"),
        (changed(DOCUMENT, kind=["shard"]), "no kind"),
        (changed(DOCUMENT, mode="zzz"), "no mode 'zzz', there are mask, replace, skip"),
        (changed(DOCUMENT, mode="skip"), "samples are skipped, and nothing else is"),
        (changed(SAMPLES, mode="mask"), "samples are skipped, and nothing else is"),
        (changed(SAMPLES, kind="document"), "samples are skipped, and nothing else is"),
        (changed(SAMPLES, samples=None), "samples are skipped, and nothing else is"),
        (changed(SAMPLES, **span(0, 4)), "samples are skipped, and nothing else is"),
        (changed(SAMPLES, samples=[120, 100]), "no samples from 120 to 100"),
        (changed(SAMPLES, samples=[100, 100]), "no samples from 100 to 100"),
        (changed(SAMPLES, samples=[-1, 100]), "no samples from -1 to 100"),
        (changed(SAMPLES, samples=["1", "2"]), "no samples from '1' to '2'"),
        (changed(SAMPLES, samples=[1.5, 2]), "no samples from 1.5 to 2"),
        (changed(SAMPLES, samples=[100]), "IndexError"),
        (changed(DOCUMENT, **span(20, 10)), "no tokens from 20 to 10 of 'web'"),
        (changed(DOCUMENT, **span(-1, 10)), "no tokens from -1 to 10 of 'web'"),
        (changed(DOCUMENT, **span(0, True)), "no tokens from 0 to True of 'web'"),
        (changed(DOCUMENT, **span(0, 10, source=3)), "no tokens from 0 to 10 of 3"),
        (changed(DOCUMENT, effective_sample=-3), "effective sample -3"),
        (changed(DOCUMENT, effective_sample="soon"), "effective sample 'soon'"),
        (changed(DOCUMENT, evidence_step=-1), "evidence step -1"),
        (changed(DOCUMENT, name=5), "are words"),
        (changed(DOCUMENT, more=1), "TypeError"),
        ({"kind": "document"}, "KeyError"),
    ],
)
def test_what_no_run_can_be_asked_for_is_refused_by_name(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match="an entry of the blocklist is damaged") as caught:
        block_from_json(raw)
    assert words in str(caught.value)
