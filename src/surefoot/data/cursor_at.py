"""The cursor of a run at a sample: what a checkpoint says of the data, from the order alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.core.blocking import Block, head_of
from surefoot.data.cursor import Cursor, PastStage, SourceCursor, recipe_sha256
from surefoot.data.manifest import Manifest
from surefoot.data.run_order import RunOrder
from surefoot.data.segments import Restart, Turn


@dataclass(frozen=True, slots=True)
class Place:
    """What of a cursor moves, and what a run that is resumed has begun with."""

    next_sample: int = 0
    next_step: int = 0
    restarts: tuple[tuple[str, Restart], ...] = ()
    unit_tokens: int = 0
    begun_weights: tuple[tuple[str, int], ...] = ()


def cursor_at(
    place: Place, *, order: RunOrder, probe: str, blocks: Sequence[Block], manifest: Manifest, identities: Mapping[str, str]
) -> Cursor:
    """`blocks` are those that the run knew of there, `identities` name the shards of each source (`source_identity`)."""
    restarts, turns = dict(place.restarts), order.segments.turns
    weights = {name: float(weight) for name, weight in _given(order, turns[0]).items()}
    per_source = {}
    for name in order.names:
        start = restarts.get(name, Restart())
        epoch, position = order.place_of(name, place.next_sample)
        per_source[name] = SourceCursor(start.first_sample, start.restart, epoch, position, identities[name])
    begun = [turn for turn in turns if turn.first < max(1, place.next_sample)]
    return Cursor(
        next_sample=place.next_sample,
        next_step=place.next_step,
        consumed_tokens=order.tokens_before(place.next_sample),
        manifest_sha256=manifest.sha256,
        recipe_sha256=recipe_sha256(seed=order.recipe.seed, seq_len=turns[0].seq_len, weights=weights),
        tokenizer_sha256=manifest.tokenizer.sha256,
        seq_len=turns[0].seq_len,
        seed=order.recipe.seed,
        per_source=per_source,
        order_probe=probe,
        unit_tokens=order.recipe.unit_tokens,
        reserve_fraction=order.recipe.reserve_fraction,
        stages=tuple(PastStage(turn.first, turn.seq_len, _given(order, turn)) for turn in begun),
        blocklist={"count": len(blocks), "head": head_of(blocks)},
        skip_ranges=order.steps.skipped,
    )


def _given(order: RunOrder, turn: Turn) -> dict[str, int]:
    """The weights of a turn without the sources that give nothing in it: one that is added later changes nothing here."""
    return {name: weight for name, weight in zip(order.names, turn.weights, strict=True) if weight}
