"""Where a run is in its data: one small JSON object for the whole job, the same on all ranks.

It is a function of (manifest, recipe, next_sample) and of nothing else, so after any number of resumes it equals, byte for byte, that of
a run that was never interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.core.hashing import ZERO_HASH, sha256_json
from surefoot.data.manifest import Manifest
from surefoot.data.order import PRP
from surefoot.data.packing import num_samples_in

CURSOR_VERSION: Final = 1
PROBE_SAMPLES: Final = 64
UNPROBED: Final = ""

OnDataChange = Literal["refuse", "map", "restart-source"]
_CHOICES: Final = (
    "choose one: --on-data-change refuse (give back the old data; this is what happened now), map (go on at the same sample in the order "
    "of the new data), restart-source (go through the new data from its start, in a new order)"
)

_OTHER_TOKENIZER: Final = "its ids mean other text: prepare the data with the tokenizer.json of the old data"
_RECIPE_HINTS: Final = {
    "prp": "resume with the release that began the run: this one orders samples in another way",
    "tokenizer_sha256": _OTHER_TOKENIZER,
    "seed": "set [run] seed back, or start a new run",
    "seq_len": "set [data] seq_len back, or start a new run",
}


@dataclass(frozen=True, slots=True)
class SourceCursor:
    """Where one source is. `first_sample` and `restart` fix its order; `epoch` and `position` say for people how far it has come."""

    first_sample: int = 0
    restart: int = 0
    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """`consumed_tokens` counts whole sequences, phantoms left out. `order_probe` is of the last 64 samples before `next_sample`."""

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
    prp: str = PRP
    blocklist: Mapping[str, Any] = field(default_factory=lambda: {"count": 0, "head": ZERO_HASH})
    skip_ranges: tuple[tuple[int, int], ...] = ()
    version: int = CURSOR_VERSION

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "skip_ranges": [list(span) for span in self.skip_ranges]}


def cursor_from_json(value: Mapping[str, Any]) -> Cursor:
    """Raises DataError when `value` is of a later version, lacks a field, or asks for what this release does not do."""
    if value.get("version") != CURSOR_VERSION:
        raise _mismatch("version", got=value.get("version"), wanted=CURSOR_VERSION, hint="resume with the release that wrote it")
    try:
        sources = {name: SourceCursor(**source) for name, source in value["per_source"].items()}
        spans = tuple((int(first), int(count)) for first, count in value["skip_ranges"])
        cursor = Cursor(**{**value, "per_source": sources, "skip_ranges": spans})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"the data cursor is damaged: {error}", where="cursor", hint="resume from another checkpoint") from error
    counts = (cursor.next_sample, cursor.next_step, cursor.consumed_tokens)
    if any(not isinstance(count, int) or count < 0 for count in counts):
        raise DataError(f"the data cursor is damaged: counts {counts}", where="cursor", hint="resume from another checkpoint")
    if cursor.blocklist.get("count") != 0 or cursor.skip_ranges:
        raise DataError("it has blocked documents or skipped ranges", where="cursor", hint="those are not in this release")
    return cursor


def recipe_sha256(*, seed: int, seq_len: int, weights: Mapping[str, float]) -> str:
    """Identity of everything besides the data that decides which tokens sample g has. Batch sizes and ranks do not, and are not in it."""
    total = sum(weights.values()) or 1.0
    shares = {name: weight / total for name, weight in sorted(weights.items())}
    return sha256_json({"seed": seed, "seq_len": seq_len, "shares": shares})


def order_probe(*, epochs: npt.NDArray[np.int64], indices: npt.NDArray[np.int64], token_crcs: npt.NDArray[np.uint32]) -> str:
    """A hash of the given samples' places in the order and of the CRC-32 of their tokens: proves order and bytes, not only names."""
    table = np.stack([epochs.astype("<i8"), indices.astype("<i8"), token_crcs.astype("<i8")], axis=-1)
    return hashlib.sha256(table.tobytes()).hexdigest()


def refuse_other_recipe(cursor: Cursor, *, here: Cursor) -> None:
    """Raises DataError naming what differs between the run that wrote `cursor` and this one, the data aside."""
    for name, hint in _RECIPE_HINTS.items():
        if getattr(cursor, name) != getattr(here, name):
            raise _mismatch(name, got=getattr(here, name), wanted=getattr(cursor, name), hint=hint)
    if set(cursor.per_source) != set(here.per_source):
        raise _mismatch("sources", got=sorted(here.per_source), wanted=sorted(cursor.per_source), hint="name the sources as before")
    if cursor.recipe_sha256 != here.recipe_sha256:
        raise _mismatch("recipe", got=here.recipe_sha256, wanted=cursor.recipe_sha256, hint="give back the old mixture weights")


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


def reconcile(cursor: Cursor, *, manifest: Manifest, choice: OnDataChange) -> tuple[Cursor, str]:
    """(cursor over the new data, a line for the ledger) for data that changed under a run.

    `map` goes on at the same sample, its place looked up in the new data's order. `restart-source` begins the new data at its start under
    a new key. `refuse`, and a tokenizer that changed with the data, raise DataError. The new cursor has no order probe yet: `seek`
    accepts it unproven, and the next cursor has one. Same input, same answer: a crash before the next save repeats it exactly.
    """
    if choice == "refuse":
        refuse_changed_data(cursor, manifest=manifest)
        return cursor, "the data is unchanged"
    if cursor.tokenizer_sha256 != manifest.tokenizer.sha256:
        raise _mismatch("tokenizer_sha256", got=manifest.tokenizer.sha256, wanted=cursor.tokenizer_sha256, hint=_OTHER_TOKENIZER)
    if set(cursor.per_source) != set(manifest.sources):
        raise _mismatch("sources", got=sorted(manifest.sources), wanted=sorted(cursor.per_source), hint="name the sources as before")
    sources = {}
    for name, source in cursor.per_source.items():
        if choice == "restart-source":
            sources[name] = SourceCursor(first_sample=cursor.next_sample, restart=source.restart + 1)
        else:
            num_samples = num_samples_in(manifest.split(name, "train").tokens, seq_len=cursor.seq_len)
            epoch, position = divmod(cursor.next_sample - source.first_sample, max(1, num_samples))
            sources[name] = replace(source, epoch=epoch, position=position)
    note = f"{choice}: data {cursor.manifest_sha256[:12]} replaced by {manifest.sha256[:12]} at sample {cursor.next_sample}"
    return replace(cursor, manifest_sha256=manifest.sha256, per_source=sources, order_probe=UNPROBED), note


def _mismatch(what: str, *, got: object, wanted: object, hint: str) -> DataError:
    return DataError(f"{what} is {got}, the run has {wanted}", where="cursor", hint=hint, got=got, wanted=wanted)
