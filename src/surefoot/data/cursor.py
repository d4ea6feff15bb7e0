"""Where a run is in its data: one small JSON object for the whole job, the same on all ranks.

It is a function of (manifest, recipe, blocklist, next_sample) and of nothing else, so after any number of resumes it equals, byte for byte,
that of a run that was never interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block, head_of
from surefoot.core.errors import DataError
from surefoot.core.hashing import ZERO_HASH, sha256_json
from surefoot.data.manifest import Manifest
from surefoot.data.mixture import MIXTURE
from surefoot.data.order import PRP
from surefoot.data.segments import Restart

CURSOR_VERSION: Final = 2
PROBE_SAMPLES: Final = 64
UNPROBED: Final = ""

OnDataChange = Literal["refuse", "map", "restart-source"]
_CHOICES: Final = (
    "choose one: --on-data-change refuse (give back the old data; this is what happened now), map (go on at the same sample in the order "
    "of the new data), restart-source (go through the sources that changed from their start, in a new order)"
)

_OTHER_TOKENIZER: Final = "its ids mean other text: prepare the data with the tokenizer.json of the old data"
_OTHER_RELEASE: Final = "resume with the release that began the run: this one orders samples in another way"
_RECIPE_HINTS: Final = {
    "prp": _OTHER_RELEASE,
    "mixture": _OTHER_RELEASE,
    "tokenizer_sha256": _OTHER_TOKENIZER,
    "seed": "set [run] seed back, or start a new run",
    "seq_len": "set [data] seq_len back, or start a new run",
    "unit_tokens": "a run draws its samples in one unit for ever: set [data] max_seq_len back",
    "reserve_fraction": "set [data] reserve_fraction back: what is kept back cannot change under a run",
    "stages": "what lies behind the run cannot change: give back these weights and lengths; a stage further on may be added or changed",
}


@dataclass(frozen=True, slots=True)
class SourceCursor:
    """Where one source is. `first_sample` and `restart` fix its order, `data` names its shards.

    `epoch` and `position` say how far it has come: samples since the epoch began, or since the sequence length changed in it.
    """

    first_sample: int = 0
    restart: int = 0
    epoch: int = 0
    position: int = 0
    data: str = ""


@dataclass(frozen=True, slots=True)
class PastStage:
    """A stage that has begun: integer weights by source, tokens per sample."""

    first_sample: int
    seq_len: int
    weights: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Cursor:
    """`consumed_tokens` counts whole sequences, phantoms left out. `order_probe` is of the last 64 samples before `next_sample`.

    `seq_len` is that of the first stage, `stages` are those that began before `next_sample`, `unit_tokens` is what samples are drawn in.
    """

    next_sample: int
    next_step: int
    consumed_tokens: int
    manifest_sha256: str
    recipe_sha256: str
    tokenizer_sha256: str
    seq_len: int
    seed: int
    per_source: Mapping[str, SourceCursor]
    order_probe: str
    unit_tokens: int = 0
    reserve_fraction: float = 0.0
    stages: tuple[PastStage, ...] = ()
    prp: str = PRP
    mixture: str = MIXTURE
    blocklist: Mapping[str, Any] = field(default_factory=lambda: {"count": 0, "head": ZERO_HASH})
    skip_ranges: tuple[tuple[int, int], ...] = ()
    version: int = CURSOR_VERSION

    @property
    def restarts(self) -> dict[str, Restart]:
        """The sources that did not begin with the run."""
        return {name: Restart(source.first_sample, source.restart) for name, source in self.per_source.items() if source.restart}

    @property
    def begun_weights(self) -> Mapping[str, int]:
        """What the sources gave in the first stage."""
        return self.stages[0].weights if self.stages else {}

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "skip_ranges": [list(span) for span in self.skip_ranges],
            "stages": [asdict(stage) for stage in self.stages],
        }


def cursor_from_json(value: Mapping[str, Any]) -> Cursor:
    """Raises DataError when `value` is of a later version, lacks a field, or is damaged."""
    if value.get("version") not in (1, CURSOR_VERSION):
        raise _mismatch("version", got=value.get("version"), wanted=CURSOR_VERSION, hint="resume with the release that wrote it")
    try:
        sources = {name: SourceCursor(**source) for name, source in value["per_source"].items()}
        spans = tuple((int(first), int(end)) for first, end in value["skip_ranges"])
        stages = tuple(PastStage(**stage) for stage in value.get("stages", ()))
        cursor = Cursor(**{"unit_tokens": value["seq_len"], **value, "per_source": sources, "skip_ranges": spans, "stages": stages})
        count, head = cursor.blocklist["count"], cursor.blocklist["head"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"the data cursor is damaged: {error}", where="cursor", hint="resume from another checkpoint") from error
    counts = (cursor.next_sample, cursor.next_step, cursor.consumed_tokens, count)
    if any(not isinstance(number, int) or number < 0 for number in counts) or not isinstance(head, str):
        raise DataError(f"the data cursor is damaged: counts {counts}", where="cursor", hint="resume from another checkpoint")
    if cursor.next_step > cursor.next_sample:
        what = f"{cursor.next_step} steps over {cursor.next_sample} samples"
        raise DataError(f"the data cursor is damaged: {what}", where="cursor", hint="resume from another checkpoint")
    return cursor


def recipe_sha256(*, seed: int, seq_len: int, weights: Mapping[str, float]) -> str:
    """Identity of everything besides the data that decides which tokens sample g has. Batch sizes and ranks do not, and are not in it."""
    total = sum(weights.values()) or 1.0
    shares = {name: weight / total for name, weight in sorted(weights.items())}
    return sha256_json({"seed": seed, "seq_len": seq_len, "shares": shares})


def order_probe(
    *,
    sources: npt.NDArray[np.int64] | None = None,
    epochs: npt.NDArray[np.int64],
    indices: npt.NDArray[np.int64],
    token_crcs: npt.NDArray[np.uint32],
) -> str:
    """A hash of the given samples' places in the order and of the CRC-32 of their tokens: proves order and bytes, not only names.

    `sources` stays out where there is one only, as in the first version of cursors.
    """
    columns = [epochs.astype("<i8"), indices.astype("<i8"), token_crcs.astype("<i8")]
    if sources is not None:
        columns.insert(0, sources.astype("<i8"))
    return hashlib.sha256(np.stack(columns, axis=-1).tobytes()).hexdigest()


def refuse_other_recipe(cursor: Cursor, *, here: Cursor) -> None:
    """Raises DataError naming what differs between the run that wrote `cursor` and this one at the same sample, the data aside."""
    for name, hint in _RECIPE_HINTS.items():
        if name == "stages" and cursor.version == 1:
            continue  # it knew of none, and of one source
        if getattr(cursor, name) != getattr(here, name):
            raise _mismatch(name, got=_shown(getattr(here, name)), wanted=_shown(getattr(cursor, name)), hint=hint)
    gone = sorted(set(cursor.per_source) - set(here.per_source))
    if gone:
        raise _mismatch("sources", got=sorted(here.per_source), wanted=sorted(cursor.per_source), hint="name the sources as before")
    if cursor.version > 1 and cursor.recipe_sha256 != here.recipe_sha256:
        raise _mismatch("recipe", got=here.recipe_sha256, wanted=cursor.recipe_sha256, hint="give back the old mixture weights")


def refuse_other_places(cursor: Cursor, *, here: Cursor) -> None:
    """Raises DataError where a source would stand elsewhere than the run that wrote `cursor` left it, and where its totals are not its.

    `here` knows of the same entries of the blocklist and no more.
    """
    for name, source in cursor.per_source.items():
        other = here.per_source[name]
        if (source.epoch, source.position) != (other.epoch, other.position):
            raise _mismatch(
                f"the place of source {name!r}",
                got=f"epoch {other.epoch}, sample {other.position}",
                wanted=f"epoch {source.epoch}, sample {source.position}",
                hint="give back the max_epochs and exhaustion that it was trained with",
            )
    for name in ("consumed_tokens", "skip_ranges"):
        if getattr(cursor, name) != getattr(here, name):
            hint = "the cursor is damaged: resume from another checkpoint"
            raise _mismatch(name, got=getattr(here, name), wanted=getattr(cursor, name), hint=hint)


def refuse_other_blocks(cursor: Cursor, blocks: Sequence[Block]) -> None:
    """Raises DataError when the log of blocks does not begin with the entries that the run knew when it wrote `cursor`."""
    count, head = cursor.blocklist["count"], cursor.blocklist["head"]
    if len(blocks) < count or head_of(blocks[:count]) != head:
        raise DataError(
            f"the blocklist has {len(blocks)} entries, and the first {count} are not those that the checkpoint was trained under",
            where="cursor",
            hint="its entries stand in the ledger of the run: `surefoot ledger RUN --verify` says whether that is whole",
            got=head_of(blocks[:count]),
            wanted=head,
        )


def refuse_changed_data(cursor: Cursor, *, manifest: Manifest) -> None:
    """Raises DataError with the three ways out when the data is not that of `cursor`."""
    if cursor.manifest_sha256 != manifest.sha256:
        raise DataError(
            f"the data changed: this run used {cursor.manifest_sha256[:12]}, here is {manifest.sha256[:12]}",
            where="data",
            hint=_CHOICES,
            got=manifest.sha256,
            wanted=cursor.manifest_sha256,
        )


def source_identity(manifest: Manifest, source: str) -> str:
    """The train stream of one source, by content."""
    return sha256_json([[shard.tokens, shard.sha256] for shard in manifest.split(source, "train").shards])


def reconcile(cursor: Cursor, *, manifest: Manifest, choice: OnDataChange) -> tuple[Cursor, str]:
    """(cursor over the new data, a line for the ledger) for data that changed under a run.

    `map` goes on at the same sample, its place looked up in the new data's order. `restart-source` begins the sources whose text changed at
    their start under a new key. `refuse`, and a tokenizer that changed with the data, raise DataError. The new cursor has no order probe
    yet: `seek` accepts it unproven, and the next cursor has one. Same input, same answer: a crash before the next save repeats it exactly.
    """
    if choice == "refuse":
        refuse_changed_data(cursor, manifest=manifest)
        return cursor, "the data is unchanged"
    if cursor.tokenizer_sha256 != manifest.tokenizer.sha256:
        raise _mismatch("tokenizer_sha256", got=manifest.tokenizer.sha256, wanted=cursor.tokenizer_sha256, hint=_OTHER_TOKENIZER)
    gone = sorted(set(cursor.per_source) - set(manifest.sources))
    if gone:
        raise _mismatch("sources", got=sorted(manifest.sources), wanted=sorted(cursor.per_source), hint="name the sources as before")
    here = {name: source_identity(manifest, name) for name in manifest.sources}
    changed = sorted(name for name, source in cursor.per_source.items() if source.data != here[name])
    sources = {name: replace(source, data=here[name]) for name, source in cursor.per_source.items()}
    if choice == "restart-source":
        for name in changed:
            sources[name] = SourceCursor(first_sample=cursor.next_sample, restart=cursor.per_source[name].restart + 1, data=here[name])
    sources |= {name: SourceCursor(data=identity) for name, identity in here.items() if name not in sources}
    new = sorted(set(here) - set(cursor.per_source))
    what = "; ".join(f"{word} {', '.join(names)}" for word, names in (("changed", changed), ("new", new)) if names) or "no text changed"
    note = f"{choice}: data {cursor.manifest_sha256[:12]} replaced by {manifest.sha256[:12]} at sample {cursor.next_sample} ({what})"
    return replace(cursor, manifest_sha256=manifest.sha256, per_source=sources, order_probe=UNPROBED), note


def _shown(value: object) -> object:
    if isinstance(value, tuple):
        return [f"from sample {stage.first_sample}: {stage.seq_len} tokens, {dict(stage.weights)}" for stage in value]
    return value


def _mismatch(what: str, *, got: object, wanted: object, hint: str) -> DataError:
    return DataError(f"{what} is {got}, the run has {wanted}", where="cursor", hint=hint, got=got, wanted=wanted)
