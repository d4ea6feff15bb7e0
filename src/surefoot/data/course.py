"""Where a run is in its data, and what it leaves out: everything about a loader that does not hang on rank or tensors.

All that moves is a sample, a step, and the log of blocks; the order and its rows follow by arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.core.blocking import Block
from surefoot.core.errors import DataError, lost_shard
from surefoot.core.sections import DataSection, TrainSection
from surefoot.core.stages import Stage
from surefoot.data.blocked import silenced
from surefoot.data.cursor import (
    UNPROBED,
    Cursor,
    OnDataChange,
    cursor_from_json,
    reconcile,
    refuse_changed_data,
    refuse_other_blocks,
    refuse_other_places,
    refuse_other_recipe,
    source_identity,
)
from surefoot.data.cursor_at import Place, cursor_at
from surefoot.data.hits import hits_of
from surefoot.data.manifest import Manifest, load_manifest
from surefoot.data.provenance import Provenance
from surefoot.data.recipe import order_over
from surefoot.data.run_order import I64Array, RunOrder
from surefoot.data.shards import TokenStore
from surefoot.data.storage import open_storage
from surefoot.data.stream import SampleStream
from surefoot.data.taken import TakenBlocks

logger = logging.getLogger(__name__)


class Course:
    """The data of a run from a sample on. Local; the same on every rank.

    `stages` come from the config (`core.stages.stages_of`). `on_data_change` says what `seek` does with a cursor over other data; what it
    did is then in `data_change`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        data: DataSection,
        train: TrainSection,
        stages: Sequence[Stage],
        seed: int,
        on_data_change: OnDataChange = "refuse",
    ) -> None:
        self.path = path
        self.manifest: Manifest = load_manifest(path)
        self.data_change: str | None = None
        self._data, self._train, self._stages, self._seed = data, train, stages, seed
        self._on_data_change = on_data_change
        self.storage = open_storage(path)
        names = tuple(self.manifest.sources)
        self.stores = {name: TokenStore(path, source=name, split="train", manifest=self.manifest, storage=self.storage) for name in names}
        self._taken = TakenBlocks(path, manifest=self.manifest, storage=self.storage)
        self._identities = {name: source_identity(self.manifest, name) for name in names}
        self._place = Place()
        self._made: tuple[RunOrder, SampleStream] | None = None

    @property
    def order(self) -> RunOrder:
        """What every sample is, by all that is known now. Made anew when that changes."""
        return self._now()[0]

    @property
    def stream(self) -> SampleStream:
        return self._now()[1]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What was taken, in its order."""
        return self._taken.all

    @property
    def next_sample(self) -> int:
        return self._place.next_sample

    @property
    def blocklist(self) -> tuple[int, str]:
        return len(self._taken.all), self._taken.head

    @property
    def last_sample(self) -> int:
        """The first global sample behind the configured steps, from where the run is now."""
        return _end_of(self.order, self._place, num_steps=self._train.num_steps)

    def next_samples(self) -> I64Array:
        """The samples of the next step. Sorted."""
        return self.order.steps.samples(self._place.next_sample)

    def advance(self, samples: I64Array) -> None:
        """The step of `samples` has been handed out."""
        self._place = replace(self._place, next_sample=int(samples[-1]) + 1, next_step=self._place.next_step + 1)

    def cursor(self) -> dict[str, Any]:
        """The state of the whole job's data. Reads up to 64 samples for the order probe."""
        probe = self.stream.probe(self.next_sample, known=self._taken.all_here())
        return self._cursor(self.order, self._place, probe, blocks=self.blocks).as_json()

    def cursor_after(self, num_steps: int) -> dict[str, Any]:
        """The cursor of a run that has made `num_steps` steps under this config. It proves nothing yet: it has no order probe."""
        first, _ = self.order.steps.span(num_steps)
        return self._cursor(self.order, Place(first, num_steps), UNPROBED, blocks=self.blocks).as_json()

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Go on from `cursor`, by reading at most 64 samples. Raises DataError, and changes nothing, when it is not of this run."""
        wanted, change = cursor_from_json(cursor), None
        refuse_other_blocks(wanted, self.blocks)
        if self._on_data_change != "refuse" and wanted.manifest_sha256 != self.manifest.sha256:
            wanted, change = reconcile(wanted, manifest=self.manifest, choice=self._on_data_change)
        place = Place(
            wanted.next_sample, wanted.next_step, tuple(wanted.restarts.items()), wanted.unit_tokens, tuple(wanted.begun_weights.items())
        )
        known = self.blocks[: wanted.blocklist["count"]]
        then = self._order_at(place, known)
        here = self._cursor(then, place, UNPROBED, blocks=known)
        refuse_other_recipe(wanted, here=here)
        refuse_changed_data(wanted, manifest=self.manifest)
        if change is None:
            refuse_other_places(wanted, here=here)
        self._refuse_other_tokens(wanted, self._stream(then, known), known)
        order = then if len(known) == len(self.blocks) else self._order_at(place)
        self._refuse_too_little(order, place)
        self._made, self.data_change, self._place = (order, self._stream(order)), change, place

    def take(self, block: Block) -> None:
        """Leave `block` out from its effective sample on. Raises DataError, and changes nothing, when that cannot be honoured."""
        if block.mode == "replace" and not self._data.reserve_fraction:
            raise DataError("nothing is kept back that could replace it", where="[data] reserve_fraction", hint="block with mode mask")
        if block.samples is not None:  # the run will need as many more
            self._refuse_too_little(self._order_at(self._place, (*self.blocks, block)), self._place)
        self._taken.add(block)
        self._made = None

    def check_enough(self) -> None:
        """Raises DataError when a source that may not be read again ends before the run does."""
        self._refuse_too_little(self.order, self._place)

    def first_touched(self, block: Block, *, first: int, until: int) -> int | None:
        """The first global sample in [first, until) that holds a token of `block`, were it not left out."""
        before = self.blocks[: self.blocks.index(block)] if block in self.blocks else self.blocks
        order = self._order_at(self._place, before)
        found = [
            samples[0]
            for span in self._taken.here(block).spans
            if span.source in order.names and (samples := order.holding(span.source, span.start, span.end, first=first, until=until)).size
        ]
        return int(min(found)) if found else None

    def locate(self, sample: int) -> list[dict[str, Any]]:
        """The documents of global `sample` in the order of its row, and where they came from."""
        with Provenance(self.path, manifest=self.manifest, storage=self.storage) as provenance:
            hits = hits_of(self.order.at(sample)[0], provenance=provenance, blocked=silenced(self._taken.all_here()))
        return [
            {
                "sample": sample,
                "source": hit.document.source,
                "span": [hit.first, hit.end],
                "document": hit.document.id,
                "hash": hit.document.hash,
                "file": hit.document.file,
                "record": hit.document.record,
                "offset": hit.document.byte_offset,
                "masked": hit.masked,
            }
            for hit in hits
        ]

    def planned(self) -> str:
        """What the sources give from here to the last step, and how often each will have been read by then, for a person."""
        last = min(self.last_sample, self.order.ends_at or self.last_sample)
        before, after, epochs = self.order.given(self.next_sample), self.order.given(last), self.order.epochs_by(last)
        counts = {name: after[name] - before[name] for name in self.order.names}
        total = max(1, sum(counts.values()))
        return ", ".join(f"{name} {counts[name] / total:.1%} ({epochs[name]:.2f} epochs)" for name in self.order.names)

    def close(self) -> None:
        for store in self.stores.values():
            store.close()
        self.storage.close()

    def _now(self) -> tuple[RunOrder, SampleStream]:
        if self._made is None:
            order = self._order_at(self._place)
            self._made = (order, self._stream(order))
        return self._made

    def _order_at(self, place: Place, blocks: Sequence[Block] | None = None) -> RunOrder:
        """`blocks`: all that were taken, unless some are given."""
        return order_over(
            self.manifest,
            stages=self._stages,
            data=self._data,
            train=self._train,
            seed=self._seed,
            blocks=self._taken.all_here(blocks),
            restarts=dict(place.restarts),
            begun_with=place.unit_tokens,
            begun_weights=dict(place.begun_weights),
        )

    def _stream(self, order: RunOrder, blocks: Sequence[Block] | None = None) -> SampleStream:
        return SampleStream(order, stores=self.stores, eos_id=self.manifest.tokenizer.eos_id, blocks=self._taken.all_here(blocks))

    def _refuse_other_tokens(self, wanted: Cursor, stream: SampleStream, known: Sequence[Block]) -> None:
        """Raises DataError when the probe differs. A shard that is lost may have been blocked since, or be asked for: then nothing is
        proven, and that is said. Whoever still needs it meets it when its rows are read."""
        if wanted.order_probe == UNPROBED:
            return
        try:
            probe = stream.probe(wanted.next_sample, known=self._taken.all_here(known))
        except DataError as error:
            if not lost_shard(error):
                raise
            logger.warning("the order before sample %d is not proven by its tokens: %s", wanted.next_sample, error)
            return
        if probe != wanted.order_probe:
            raise DataError(
                f"the samples before {wanted.next_sample} are not those that the run consumed",
                where="cursor",
                hint="the order or the tokens differ under equal names: resume from another checkpoint, or restore the data",
                got=probe,
                wanted=wanted.order_probe,
            )

    def _cursor(self, order: RunOrder, place: Place, probe: str, *, blocks: Sequence[Block]) -> Cursor:
        return cursor_at(place, order=order, probe=probe, blocks=blocks, manifest=self.manifest, identities=self._identities)

    def _refuse_too_little(self, order: RunOrder, place: Place) -> None:
        """Raises DataError when a source that may not be read again ends before the run does."""
        end = _end_of(order, place, num_steps=self._train.num_steps)
        if order.ends_at is not None and order.ends_at < end:
            steps = place.next_step + max(0, order.steps.step_at(order.ends_at) - order.steps.step_at(place.next_sample))
            raise DataError(
                f"{order.ended_by} used up at sample {order.ends_at}: the run of {self._train.num_steps} steps needs {end}",
                where="[[data.sources]]",
                hint=f"set train.num_steps = {steps}, add {end - order.ends_at} samples of text, or another exhaustion or max_epochs",
                got=order.ends_at,
                wanted=end,
            )


def _end_of(order: RunOrder, place: Place, *, num_steps: int) -> int:
    """The first global sample behind `num_steps` steps."""
    if place.next_step >= num_steps:
        return place.next_sample
    first, _ = order.steps.span(order.steps.step_at(place.next_sample) + num_steps - place.next_step - 1)
    return int(order.steps.samples(first)[-1]) + 1
