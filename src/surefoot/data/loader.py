"""The data port of our own training loop: the rows of one rank, found by arithmetic and read ahead of time. Of this room only this file
and what it hands out (`batches`) know torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from surefoot.core.blocking import Block
from surefoot.core.clock import Clock, SystemClock
from surefoot.core.errors import DataError
from surefoot.core.sections import DataSection, TrainSection
from surefoot.core.stages import Stage
from surefoot.data.atoms import Atom, deal, slots_of
from surefoot.data.batches import HeldoutBatches, StepBatch, heldout_batches, step_batches
from surefoot.data.course import Course
from surefoot.data.cursor import OnDataChange
from surefoot.data.manifest import Manifest
from surefoot.data.read_ahead import ReadAhead
from surefoot.tensors.batch import Batch

logger = logging.getLogger(__name__)

_MANY_EPOCHS: Final = 4  # repeated text teaches almost as well as new up to here: Muennighoff et al., arXiv 2305.16264

_Key = tuple[int, int, int]
"""(first sample of the step, rotation, how often the order has changed)"""


class ShardedLoader:
    """Batches of a prepared data folder for one data rank. The order is the same for every number of ranks and every micro-batch size.

    `rank` and `num_ranks` are of the data-parallel group. `stages` come from `core.stages.stages_of`; without them the run has the one that
    `data` describes. `on_data_change` says what `seek` does with a cursor over other data; what it did is then in `data_change`. The next
    `data.prefetch_steps` steps are read by a thread, which begins with the first `next`.
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
        stages: Sequence[Stage] = (),
        rotation: int = 0,
        on_data_change: OnDataChange = "refuse",
        clock: Clock | None = None,
    ) -> None:
        self.path = path
        self._rotation = rotation
        self._data, self._train = data, train
        self._rank, self._num_ranks = rank, num_ranks
        self._clock = clock or SystemClock()
        self.course = Course(path, data=data, train=train, stages=stages or (_only_stage(data),), seed=seed, on_data_change=on_data_change)
        self._is_checked = False
        self._last: tuple[int, int] | None = None  # (first sample, rotation) of the step that was handed out last
        self._changes = 0
        self._ahead: ReadAhead[_Key, tuple[Batch, ...]] = ReadAhead(self._fetch, depth=data.prefetch_steps)
        if rank == 0:
            self._warn_of_repetition()

    @property
    def manifest(self) -> Manifest:
        return self.course.manifest

    @property
    def next_sample(self) -> int:
        """Global index of the first sample that has not been handed out."""
        return self.course.next_sample

    @property
    def consumed_tokens(self) -> int:
        """Tokens of all samples handed out on all ranks."""
        return self.course.order.tokens_before(self.next_sample)

    @property
    def data_hash(self) -> str:
        """The identity of the prepared data, by content."""
        return self.manifest.sha256

    @property
    def data_change(self) -> str | None:
        return self.course.data_change

    @property
    def vocab_size(self) -> int:
        return self.manifest.tokenizer.vocab_size

    @property
    def num_samples(self) -> int:
        """Samples of one epoch over every source once, in units of the longest sequence."""
        return sum(source.num_regular for source in self.course.order.sources)

    @property
    def rotation(self) -> int:
        """By how many ranks every atom is moved on. What was read ahead under another one is forgotten."""
        return self._rotation

    @rotation.setter
    def rotation(self, rotation: int) -> None:
        self._rotation = rotation
        self._forget()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """The next step's atoms. Local. Raises DataError when a block on disk is not what was written, and where the data ends."""
        began_s = self._clock.monotonic_s()
        if not self._is_checked:
            self._check_files()
            self.course.check_enough()
        first = self.next_sample
        samples = self.course.next_samples()
        micro_batches = self._ahead.take((first, self.rotation, self._changes))
        self.course.advance(samples)
        self._last = first, self.rotation
        self._announce()
        return self._step(first, micro_batches, began_s=began_s)

    def again(self, *, rotation: int) -> StepBatch:
        """The step that was handed out last, with all atoms moved on by `rotation` more ranks. Local; reads it, moves nothing."""
        began_s = self._clock.monotonic_s()
        first, rotation_then = self._handed_out()
        return self._step(first, self._read(first, rotation=rotation_then + rotation), began_s=began_s)

    def first_atom(self, *, shift: int) -> Batch:
        """Of the step that was handed out last, the first atom of the rank `shift` ranks after this one. Local; reads it, moves nothing."""
        first, rotation = self._handed_out()
        return self._read(first, rotation=rotation - shift, num_micro_steps=1)[0]

    def cursor(self) -> dict[str, Any]:
        """The state of the whole job's data, the same on all ranks. Local; reads up to 64 samples for the order probe."""
        return self.course.cursor()

    def cursor_after(self, num_steps: int) -> dict[str, Any]:
        """The cursor of a run that has made `num_steps` steps under this config, without an order probe. Local."""
        return self.course.cursor_after(num_steps)

    def seek(self, cursor: Mapping[str, Any]) -> None:
        """Go on from `cursor`, wherever it is, by reading at most 64 samples. Local.

        Raises DataError, and changes nothing, when the data, the recipe, the blocklist or the order is not that of the cursor.
        """
        self.course.seek(cursor)  # files are looked at before the first batch: what is asked for now is taken between the two
        self._forget()
        if self.data_change and self._rank == 0:
            logger.warning("%s", self.data_change)

    def block(self, block: Block) -> None:
        """Silence or replace the spans of `block` from its effective sample on. Local. DataError: nothing changed."""
        self.course.take(block)
        self._forget()

    def skip(self, block: Block) -> None:
        """Leave out the global samples of `block`: the run goes on behind them. Local. DataError: nothing changed."""
        self.course.take(block)
        self._forget()

    @property
    def blocklist(self) -> tuple[int, str]:
        """(number of entries taken, head of their chain)."""
        return self.course.blocklist

    def locate(self, *, sample: int) -> list[dict[str, Any]]:
        """The documents of a global sample, and where they came from. Local; reads the files beside the shards."""
        return self.course.locate(sample)

    def first_touched(self, block: Block, *, first: int, until: int) -> int | None:
        """The first global sample in [first, until) that `block` masks or replaces. Local; the same on all ranks."""
        return self.course.first_touched(block, first=first, until=until)

    def heldout_batches(self, num_samples: int | None = None, *, behind: int = 0) -> HeldoutBatches:
        """This rank's part of the held-out samples: the same ones in every run over this data, dealt in atoms. Local.

        `num_samples` defaults to `eval_num_samples`, shared out over the sources by what they hold out; fewer are used where there are no
        more. `behind` so many others, as far as there are. Empty without a held-out split.
        """
        wanted = num_samples if num_samples is not None else self._train.eval_num_samples
        return heldout_batches(
            self.path,
            manifest=self.manifest,
            storage=self.course.storage,
            seq_len=self._data.seq_len,
            num_samples=wanted,
            behind=behind,
            micro_batch_size=self._train.micro_batch_size,
            deal=self._deal,
        )

    def close(self) -> None:
        self._ahead.close()
        self.course.close()

    def _check_files(self) -> None:
        """Once, when it is known which shards are left out: one that is gone must not stop the run that does without it."""
        self._is_checked = True
        blocked = {block.name for block in self.course.blocks if block.kind == "shard"}
        for name, store in self.course.stores.items():
            store.check_files(leave_out={shard.name for shard in store.entry.shards if f"{name}/{shard.name}" in blocked})

    def _announce(self) -> None:
        """Steps to come, for as long as their samples are known: behind the last of the run nothing is read."""
        keys, first = [], self.next_sample
        end = self.course.last_sample
        for _ in range(self._data.prefetch_steps):
            if first >= end:
                break
            keys.append((first, self.rotation, self._changes))
            first = int(self.course.order.steps.samples(first)[-1]) + 1
        self._ahead.announce(keys)

    def _forget(self) -> None:
        self._changes += 1
        self._ahead.drop()

    def _fetch(self, key: _Key) -> tuple[Batch, ...]:
        """The atoms of a step. Runs in a thread, and for whoever waits: it hangs on its key and the present order alone."""
        first, rotation, _ = key
        return self._read(first, rotation=rotation)

    def _handed_out(self) -> tuple[int, int]:
        if self._last is None:
            raise DataError("no step was handed out yet", where="ShardedLoader", hint="ask for it after the first `next`")
        return self._last

    def _step(self, first: int, micro_batches: tuple[Batch, ...], *, began_s: float) -> StepBatch:
        samples = self.course.order.steps.samples(first)
        return StepBatch(
            micro_batches=micro_batches,
            first_sample=int(samples[0]),
            num_samples=samples.size,
            num_live_tokens=sum(batch.num_live_tokens for batch in micro_batches),
            data_wait_s=self._clock.monotonic_s() - began_s,
        )

    def _read(self, first: int, *, rotation: int, num_micro_steps: int | None = None) -> tuple[Batch, ...]:
        stream = self.course.stream
        samples = stream.order.steps.samples(first)
        atoms = self._deal(samples.size, rotation=rotation)[:num_micro_steps]
        ids, rows = stream.rows(samples[slots_of(atoms)], seq_len=stream.order.seq_len_at(int(samples[0])))
        return step_batches(atoms, ids=ids, rows=rows, micro_batch_size=self._train.micro_batch_size)

    def _deal(self, num_samples: int, *, rotation: int | None = None) -> list[Atom]:
        return deal(
            num_samples,
            micro_batch_size=self._train.micro_batch_size,
            num_ranks=self._num_ranks,
            rank=self._rank,
            rotation=self.rotation if rotation is None else rotation,
        )

    def _warn_of_repetition(self) -> None:
        order, last = self.course.order, self.course.last_sample
        for name, epochs in order.epochs_by(min(last, order.ends_at or last)).items():
            if epochs > _MANY_EPOCHS:
                logger.warning("source %r will be read %.1f times: beyond %d repeated text teaches less", name, epochs, _MANY_EPOCHS)


def _only_stage(data: DataSection) -> Stage:
    weights = tuple((source.name, source.weight) for source in data.sources)
    return Stage(first_sample=0, weights=weights, seq_len=data.seq_len, rope_base=0.0, lr=0.0)
