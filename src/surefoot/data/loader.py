"""The data port of our own training loop: the rows of one rank, found by arithmetic. The only file of this room that knows torch.

There is no prefetch thread: a step's rows are read in well under a millisecond from the page cache, and each step says how long it took.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import DataError
from surefoot.core.sections import DataSection, TrainSection
from surefoot.data.atoms import Atom, BatchPlan, deal
from surefoot.data.cursor import (
    UNPROBED,
    Cursor,
    OnDataChange,
    SourceCursor,
    cursor_from_json,
    recipe_sha256,
    reconcile,
    refuse_changed_data,
    refuse_other_recipe,
)
from surefoot.data.manifest import TOKENIZER_NAME, Manifest, load_manifest
from surefoot.data.packing import PHANTOM_SAMPLE, Rows, pack_rows, phantom_rows
from surefoot.data.shards import TokenStore
from surefoot.data.stream import HeldoutStream, SampleStream
from surefoot.data.tokenizer import load_tokenizer
from surefoot.tensors.batch import IGNORED_LABEL, Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's part of a step: one atom per micro-step, as many on every rank. `num_samples` is of the whole step.

    `num_live_tokens` and `data_wait_s` are this rank's own.
    """

    micro_batches: tuple[Batch, ...]
    first_sample: int
    num_samples: int
    num_live_tokens: int
    data_wait_s: float


@dataclass(frozen=True, slots=True)
class HeldoutBatches:
    """One rank's part of the held-out samples. Sum over ranks the loss, `num_live_tokens` and `num_bytes` (of text the labels stand for).

    Bits per byte = summed loss in nats / (summed bytes * ln 2).
    """

    micro_batches: tuple[Batch, ...]
    num_live_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Place:
    """What of a cursor moves."""

    next_sample: int = 0
    next_step: int = 0
    consumed_tokens: int = 0
    source: SourceCursor = field(default_factory=SourceCursor)


class ShardedLoader:
    """Batches of a prepared data folder for one data rank. The order is the same for every number of ranks and every micro-batch size.

    `rank` and `num_ranks` are of the data-parallel group. An epoch follows another without end. `on_data_change` says what `seek` does
    with a cursor over other data; what it did is then in `data_change`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        data: DataSection,
        train: TrainSection,
        seed: int,
        rank: int,
        num_ranks: int,
        rotation: int = 0,
        on_data_change: OnDataChange = "refuse",
        clock: Clock | None = None,
    ) -> None:
        self.path = Path(path)
        self.manifest = load_manifest(path)
        self.plan = BatchPlan(train.batch_ramp, global_batch_size=train.global_batch_size)
        self.data_change: str | None = None
        self.rotation = rotation
        self._source = _source_name(self.manifest, data=data)
        self._data, self._train, self._seed = data, train, seed
        self._rank, self._num_ranks = rank, num_ranks
        self._on_data_change = on_data_change
        self._clock = clock or SystemClock()
        self._store = TokenStore(path, source=self._source, split="train", manifest=self.manifest)
        self._store.check_files()
        self._place = _Place()
        self._stream = self._stream_at(self._place.source)

    @property
    def next_sample(self) -> int:
        """Global index of the first sample that has not been handed out."""
        return self._place.next_sample

    @property
    def consumed_tokens(self) -> int:
        """Tokens of all samples handed out on all ranks."""
        return self._place.consumed_tokens

    @property
    def data_hash(self) -> str:
        """The identity of the prepared data, by content."""
        return self.manifest.sha256

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self._stream.order.num_samples

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """The next step's atoms. Local. Raises DataError when a block on disk is not what was written."""
        began_s = self._clock.monotonic_s()
        first = self._place.next_sample
        num_samples = self.plan.batch_at(first)
        atoms = self._deal(num_samples)
        ids, rows = self._read(atoms, first_sample=first)
        micro_batches = _batches(atoms, ids=ids, rows=rows, micro_batch_size=self._train.micro_batch_size)
        self._place = replace(
            self._place,
            next_sample=first + num_samples,
            next_step=self._place.next_step + 1,
            consumed_tokens=self._place.consumed_tokens + num_samples * self._data.seq_len,
        )
        return StepBatch(
            micro_batches=micro_batches,
            first_sample=first,
            num_samples=num_samples,
            num_live_tokens=sum(batch.num_live_tokens for batch in micro_batches),
            data_wait_s=self._clock.monotonic_s() - began_s,
        )

    def cursor(self) -> dict[str, Any]:
        """The state of the whole job's data, the same on all ranks. Local; reads up to 64 samples for the order probe."""
        return self._cursor(order_probe=self._stream.probe(self.next_sample)).as_json()

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Go on from `cursor`, wherever it is, by reading at most 64 samples. Local.

        Raises DataError, and changes nothing, when the data, the recipe or the order is not that of the cursor.
        """
        wanted = cursor_from_json(cursor)
        refuse_other_recipe(wanted, here=self._cursor(order_probe=UNPROBED))
        change = None
        if self._on_data_change != "refuse" and wanted.manifest_sha256 != self.manifest.sha256:
            wanted, change = reconcile(wanted, manifest=self.manifest, choice=self._on_data_change)
        refuse_changed_data(wanted, manifest=self.manifest)
        source = wanted.per_source[self._source]
        stream = self._stream_at(source)
        if wanted.order_probe != UNPROBED:
            probe = stream.probe(wanted.next_sample)
            if probe != wanted.order_probe:
                raise DataError(
                    f"the samples before {wanted.next_sample} are not those that the run consumed",
                    where="cursor",
                    hint="the order or the tokens differ under equal names: resume from another checkpoint, or restore the data",
                    got=probe,
                    wanted=wanted.order_probe,
                )
        if change and self._rank == 0:
            logger.warning("%s", change)
        self._stream, self.data_change = stream, change
        self._place = _Place(wanted.next_sample, wanted.next_step, wanted.consumed_tokens, source)

    def heldout_batches(self, num_samples: int | None = None) -> HeldoutBatches:
        """This rank's part of the held-out samples: the same ones in every run over this data, dealt in atoms. Local.

        `num_samples` defaults to `eval_num_samples`; fewer are used where the held-out split has no more. Empty without a held-out split.
        """
        store = TokenStore(self.path, source=self._source, split="heldout", manifest=self.manifest)
        try:
            held = HeldoutStream(store, seq_len=self._data.seq_len, source=self._source)
            wanted = num_samples if num_samples is not None else self._train.eval_num_samples
            atoms = self._deal(min(wanted, held.num_samples))
            ids, stream_BT = held.read(_slots(atoms))
        finally:
            store.close()
        rows = pack_rows(stream_BT, eos_id=self.manifest.tokenizer.eos_id)
        micro_batches = _batches(atoms, ids=ids, rows=rows, micro_batch_size=self._train.micro_batch_size)
        live = rows.labels_BS[rows.labels_BS != IGNORED_LABEL]
        num_bytes = int(load_tokenizer(self.path / TOKENIZER_NAME).token_num_bytes[live].sum())
        return HeldoutBatches(micro_batches=micro_batches, num_live_tokens=live.size, num_bytes=num_bytes)

    def close(self) -> None:
        self._store.close()

    def _deal(self, num_samples: int) -> list[Atom]:
        return deal(
            num_samples,
            micro_batch_size=self._train.micro_batch_size,
            num_ranks=self._num_ranks,
            rank=self._rank,
            rotation=self.rotation,
        )

    def _read(self, atoms: Sequence[Atom], *, first_sample: int) -> tuple[npt.NDArray[np.int64], Rows]:
        ids, stream_BT = self._stream.read(first_sample + _slots(atoms))
        return ids, pack_rows(stream_BT, eos_id=self.manifest.tokenizer.eos_id)

    def _stream_at(self, source: SourceCursor) -> SampleStream:
        return SampleStream(
            self._store,
            seq_len=self._data.seq_len,
            seed=self._seed,
            source=self._source,
            first_sample=source.first_sample,
            restart=source.restart,
        )

    def _cursor(self, *, order_probe: str) -> Cursor:
        place = self._place
        epoch, position = divmod(place.next_sample - place.source.first_sample, self.num_samples)
        return Cursor(
            next_sample=place.next_sample,
            next_step=place.next_step,
            consumed_tokens=place.consumed_tokens,
            manifest_sha256=self.manifest.sha256,
            recipe_sha256=recipe_sha256(seed=self._seed, seq_len=self._data.seq_len, weights={self._source: 1.0}),
            tokenizer_sha256=self.manifest.tokenizer.sha256,
            seq_len=self._data.seq_len,
            seed=self._seed,
            per_source={self._source: replace(place.source, epoch=epoch, position=position)},
            order_probe=order_probe,
        )


def _source_name(manifest: Manifest, *, data: DataSection) -> str:
    """The one source of this release. Raises DataError for a mixture, and when config and prepared data name different ones."""
    names = [source.name for source in data.sources]
    if len(names) > 1 or len(manifest.sources) > 1:
        many = names if len(names) > 1 else list(manifest.sources)
        hint = "put all files under one [[data.sources]]"
        raise DataError(f"{len(many)} sources ({', '.join(many)}): mixtures are not in this release", where="[[data.sources]]", hint=hint)
    if names and names[0] not in manifest.sources:
        hint = "name it as when it was prepared, or prepare it again"
        what = f"the config names source {names[0]!r}, the prepared data holds {', '.join(manifest.sources)}"
        raise DataError(what, where="[[data.sources]] name", hint=hint)
    return next(iter(manifest.sources))


def _slots(atoms: Sequence[Atom]) -> npt.NDArray[np.int64]:
    """The slots of the step that these atoms fill, in order."""
    spans = [np.arange(atom.first_slot, atom.first_slot + atom.num_rows, dtype=np.int64) for atom in atoms]
    return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)


def _batches(atoms: Sequence[Atom], *, ids: npt.NDArray[np.int64], rows: Rows, micro_batch_size: int) -> tuple[Batch, ...]:
    """Cut the rows of all atoms into one batch each, filled up with phantom rows to the one shape."""
    seq_len = rows.tokens_BS.shape[1]
    batches, first = [], 0
    for atom in atoms:
        end = first + atom.num_rows
        mine, sample_ids = Rows(*(part[first:end] for part in rows)), ids[first:end]
        missing = micro_batch_size - atom.num_rows
        if missing:
            filler = phantom_rows(missing, seq_len=seq_len)
            mine = Rows(*(np.concatenate(pair) for pair in zip(mine, filler, strict=True)))
            sample_ids = np.concatenate([sample_ids, np.full(missing, PHANTOM_SAMPLE, dtype=np.int64)])
        batches.append(
            Batch(
                tokens_BS=torch.from_numpy(mine.tokens_BS),
                labels_BS=torch.from_numpy(mine.labels_BS),
                positions_BS=torch.from_numpy(mine.positions_BS),
                doc_ids_BS=torch.from_numpy(mine.doc_ids_BS),
                sample_ids_B=torch.from_numpy(sample_ids),
                num_live_tokens=int((mine.labels_BS != IGNORED_LABEL).sum()),
                atom=atom.index,
            )
        )
        first = end
    return tuple(batches)
