from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.core.blocking import Block, head_of
from surefoot.core.errors import DataError
from surefoot.core.hashing import ZERO_HASH
from surefoot.data.cursor import (
    UNPROBED,
    Cursor,
    OnDataChange,
    PastStage,
    SourceCursor,
    cursor_from_json,
    order_probe,
    recipe_sha256,
    reconcile,
    refuse_changed_data,
    refuse_other_blocks,
    refuse_other_places,
    refuse_other_recipe,
    source_identity,
)
from surefoot.data.manifest import load_manifest
from surefoot.data.order import PRP


@pytest.fixture
def cursor(prepared: Path) -> Cursor:
    manifest = load_manifest(prepared)
    return Cursor(
        next_sample=500,
        next_step=50,
        consumed_tokens=8000,
        manifest_sha256=manifest.sha256,
        recipe_sha256=recipe_sha256(seed=7, seq_len=16, weights={"text": 1.0}),
        tokenizer_sha256=manifest.tokenizer.sha256,
        seq_len=16,
        seed=7,
        per_source={"text": SourceCursor(epoch=1, position=20)},
        order_probe="p" * 64,
        unit_tokens=16,
        stages=(PastStage(0, 16, {"text": 1}),),
    )


def test_it_comes_back_from_its_json_and_is_small(cursor: Cursor) -> None:
    text = json.dumps(cursor.as_json())
    assert cursor_from_json(json.loads(text)) == cursor
    assert len(text) < 4096


def test_its_fields_are_those_that_others_read(cursor: Cursor) -> None:
    value = cursor.as_json()
    assert set(value) == {
        *("version", "next_sample", "next_step", "consumed_tokens", "manifest_sha256", "recipe_sha256", "tokenizer_sha256"),
        *("seq_len", "prp", "seed", "blocklist", "skip_ranges", "per_source", "order_probe"),
        *("unit_tokens", "reserve_fraction", "stages", "mixture"),
    }
    assert value["version"] == 2
    assert value["prp"] == PRP
    assert value["blocklist"] == {"count": 0, "head": ZERO_HASH}
    assert value["skip_ranges"] == []
    assert value["per_source"] == {"text": {"first_sample": 0, "restart": 0, "epoch": 1, "position": 20, "data": ""}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version is 3"),
        ({"next_sample": -1}, "damaged"),
        ({"next_step": "7"}, "damaged"),
        ({"per_source": {"text": {"where": 1}}}, "damaged"),
        ({"skip_ranges": [[1, 2, 3]]}, "damaged"),
        ({"blocklist": {"count": -1, "head": "a" * 64}}, "damaged"),
        ({"blocklist": {"count": 1}}, "damaged"),
    ],
)
def test_what_it_cannot_honour_is_refused(cursor: Cursor, change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        cursor_from_json({**cursor.as_json(), **change})


def test_a_missing_field_is_damage(cursor: Cursor) -> None:
    value = cursor.as_json()
    del value["seed"]
    with pytest.raises(DataError, match="damaged"):
        cursor_from_json(value)


def test_the_recipe_hangs_on_shares_and_not_on_how_they_are_written() -> None:
    def recipe(**weights: float) -> str:
        return recipe_sha256(seed=1, seq_len=16, weights=weights)

    assert recipe(text=1.0) == recipe(text=2.5)
    assert recipe(a=1.0, b=3.0) == recipe(b=0.75, a=0.25)
    assert recipe(a=1.0, b=3.0) != recipe(a=1.0, b=2.0)
    assert recipe(text=1.0) != recipe_sha256(seed=2, seq_len=16, weights={"text": 1.0})
    assert recipe(text=1.0) != recipe_sha256(seed=1, seq_len=32, weights={"text": 1.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", 8), ("seq_len", 32), ("prp", "other/1"), ("mixture", "other/1"), ("unit_tokens", 64), ("reserve_fraction", 0.1)),
        *(("tokenizer_sha256", "0" * 64), ("recipe_sha256", "0" * 64), ("stages", [])),
    ],
)
def test_another_recipe_is_refused_by_the_name_of_what_differs(cursor: Cursor, name: str, value: object) -> None:
    refuse_other_recipe(cursor, here=cursor)
    changed: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
    with pytest.raises(DataError, match=name.removesuffix("_sha256")) as caught:
        refuse_other_recipe(cursor, here=replace(cursor, **changed))
    assert caught.value.values["got"] == value


def test_another_source_is_refused(cursor: Cursor) -> None:
    with pytest.raises(DataError, match="sources is"):
        refuse_other_recipe(cursor, here=replace(cursor, per_source={"code": SourceCursor()}))


def test_changed_data_is_refused_with_the_three_choices(cursor: Cursor, prepared: Path, other_prepared: Path) -> None:
    refuse_changed_data(cursor, manifest=load_manifest(prepared))
    for refuse in (
        lambda: refuse_changed_data(cursor, manifest=load_manifest(other_prepared)),
        lambda: reconcile(cursor, manifest=load_manifest(other_prepared), choice="refuse"),
    ):
        with pytest.raises(DataError, match="the data changed") as caught:
            refuse()
        assert caught.value.exit_code == 4
        for choice in ("--on-data-change", "refuse", "map", "restart-source"):
            assert choice in caught.value.hint


def test_map_goes_on_at_the_same_sample(cursor: Cursor, other_prepared: Path) -> None:
    manifest = load_manifest(other_prepared)
    mapped, note = reconcile(cursor, manifest=manifest, choice="map")
    identity = source_identity(manifest, "text")
    assert mapped == replace(
        cursor, manifest_sha256=manifest.sha256, order_probe=UNPROBED, per_source={"text": SourceCursor(0, 0, 1, 20, identity)}
    )
    assert note == f"map: data {cursor.manifest_sha256[:12]} replaced by {manifest.sha256[:12]} at sample 500 (changed text)"
    assert reconcile(cursor, manifest=manifest, choice="map") == (mapped, note)


def test_restart_begins_what_changed_under_a_new_key(cursor: Cursor, other_prepared: Path) -> None:
    manifest = load_manifest(other_prepared)
    identity = source_identity(manifest, "text")
    restarted, note = reconcile(cursor, manifest=manifest, choice="restart-source")
    assert restarted.per_source == {"text": SourceCursor(first_sample=500, restart=1, data=identity)}
    assert (restarted.next_sample, restarted.next_step, restarted.consumed_tokens) == (500, 50, 8000)
    assert note.startswith("restart-source:")
    changed_again = replace(restarted, manifest_sha256="0" * 64, next_sample=700, per_source={"text": SourceCursor(500, 1, data="0" * 64)})
    again, _ = reconcile(changed_again, manifest=manifest, choice="restart-source")
    assert again.per_source == {"text": SourceCursor(first_sample=700, restart=2, data=identity)}


def test_a_source_that_did_not_change_is_not_restarted_and_a_new_one_joins(cursor: Cursor, other_prepared: Path) -> None:
    manifest = load_manifest(other_prepared)
    identity = source_identity(manifest, "text")
    same = replace(cursor, per_source={"text": SourceCursor(epoch=1, position=20, data=identity)})
    wider = replace(manifest, sources={"text": manifest.sources["text"], "new": manifest.sources["text"]})
    bridged, note = reconcile(same, manifest=wider, choice="restart-source")
    assert bridged.per_source == {"text": same.per_source["text"], "new": SourceCursor(data=identity)}
    assert note.endswith("(new new)")


def test_a_log_that_lacks_what_the_cursor_was_trained_with_is_refused(cursor: Cursor) -> None:
    blocks = [Block("samples", f"{first}:9", "skip", samples=(first, 9), effective_sample=first) for first in range(3)]
    knows_two = replace(cursor, blocklist={"count": 2, "head": head_of(blocks[:2])})
    refuse_other_blocks(knows_two, blocks)
    refuse_other_blocks(knows_two, blocks[:2])
    for wrong in ([], blocks[:1], blocks[::-1]):
        with pytest.raises(DataError, match="the blocklist has"):
            refuse_other_blocks(knows_two, wrong)


def test_a_source_that_would_stand_elsewhere_is_refused(cursor: Cursor) -> None:
    refuse_other_places(cursor, here=cursor)
    with pytest.raises(DataError, match="the place of source 'text'"):
        refuse_other_places(cursor, here=replace(cursor, per_source={"text": SourceCursor(epoch=1, position=19)}))


@pytest.mark.parametrize("choice", ["map", "restart-source"])
def test_no_choice_bridges_another_tokenizer_or_source(cursor: Cursor, other_prepared: Path, choice: OnDataChange) -> None:
    manifest = load_manifest(other_prepared)
    foreign = replace(manifest, tokenizer=replace(manifest.tokenizer, sha256="0" * 64))
    renamed = replace(manifest, sources={"code": manifest.sources["text"]})
    with pytest.raises(DataError, match="tokenizer_sha256"):
        reconcile(cursor, manifest=foreign, choice=choice)
    with pytest.raises(DataError, match="sources"):
        reconcile(cursor, manifest=renamed, choice=choice)


def test_the_probe_sees_order_place_and_tokens() -> None:
    epochs, indices, crcs = np.zeros(3, dtype=np.int64), np.array([4, 2, 9]), np.array([1, 2, 3], dtype=np.uint32)
    probe = order_probe(epochs=epochs, indices=indices, token_crcs=crcs)
    assert probe == order_probe(epochs=epochs, indices=indices, token_crcs=crcs)
    assert probe != order_probe(epochs=epochs + 1, indices=indices, token_crcs=crcs)
    assert probe != order_probe(epochs=epochs, indices=indices[::-1], token_crcs=crcs)
    assert probe != order_probe(epochs=epochs, indices=indices, token_crcs=crcs[::-1])
