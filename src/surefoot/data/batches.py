"""Rows as tensors: what a step and an evaluation hand to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from surefoot.data.atoms import Atom, slots_of
from surefoot.data.manifest import TOKENIZER_NAME, Manifest
from surefoot.data.packing import PHANTOM_SAMPLE, Rows, pack_rows, phantom_rows
from surefoot.data.shards import TokenStore
from surefoot.data.storage import Storage
from surefoot.data.stream import HeldoutStream
from surefoot.data.tokenizer import Tokenizer
from surefoot.tensors.batch import IGNORED_LABEL, Batch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's part of a step: one atom per micro-step, as many on every rank.

    `first_sample` is the first global sample of the step and `num_samples` how many the whole step has. `num_live_tokens` and `data_wait_s`
    are this rank's own.
    """

    micro_batches: tuple[Batch, ...]
    first_sample: int
    num_samples: int
    num_live_tokens: int
    data_wait_s: float


@dataclass(frozen=True, slots=True)
class HeldoutBatches:
    """One rank's part of the held-out samples. Sum over ranks the loss, live tokens and `num_bytes` (of text the labels stand for).

    Bits per byte = summed loss in nats / (summed bytes * ln 2). `num_samples` is that of all ranks. `sources` are all that there are;
    `source_of_row` has for each micro-batch and row the index of its own, -1 for a phantom.
    """

    micro_batches: tuple[Batch, ...]
    num_bytes: int
    num_samples: int
    sources: tuple[str, ...]
    source_of_row: tuple[tuple[int, ...], ...]
    live_tokens_of_source: tuple[int, ...]

    @property
    def num_live_tokens(self) -> int:
        return sum(self.live_tokens_of_source)


def step_batches(atoms: Sequence[Atom], *, ids: npt.NDArray[np.int64], rows: Rows, micro_batch_size: int) -> tuple[Batch, ...]:
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
                num_live_tokens=int(mine.num_live_B.sum()),
                atom=atom.index,
            )
        )
        first = end
    return tuple(batches)


def heldout_batches(
    path: str | Path,
    *,
    manifest: Manifest,
    storage: Storage,
    seq_len: int,
    num_samples: int,
    behind: int = 0,
    micro_batch_size: int,
    deal: Callable[[int], list[Atom]],
) -> HeldoutBatches:
    """What `deal` gives a rank of the held-out samples of all sources, one source behind the other; the same ones every time.

    Those `behind` so many others, which are shared out in the same way; a source that has too few for both gives its last ones.
    """
    streams = _heldout_streams(path, manifest=manifest, storage=storage, seq_len=seq_len)
    held = [stream.num_samples for stream in streams]
    counts = _shared_out(num_samples, held)
    starts = [min(others, total - count) for others, total, count in zip(_shared_out(behind, held), held, counts, strict=True)]
    atoms = deal(sum(counts))
    slots = slots_of(atoms)
    source_of_slot = np.repeat(np.arange(len(counts)), counts)
    ids = np.empty(slots.size, dtype=np.int64)
    stream_BT: npt.NDArray[Any] = np.empty((slots.size, seq_len + 1), dtype=manifest.token_dtype)
    first = 0
    for stream, count, start in zip(streams, counts, starts, strict=True):
        mine = (slots >= first) & (slots < first + count)
        if mine.any():
            ids[mine], stream_BT[mine] = stream.read(slots[mine] - first + start)
        first += count
    rows = pack_rows(stream_BT, eos_id=manifest.tokenizer.eos_id)
    is_live_BS = rows.labels_BS != IGNORED_LABEL
    live = rows.labels_BS[is_live_BS]
    num_bytes = int(Tokenizer(storage.read(TOKENIZER_NAME), where=f"{path}/{TOKENIZER_NAME}").token_num_bytes[live].sum())
    micro_batches = step_batches(atoms, ids=ids, rows=rows, micro_batch_size=micro_batch_size)
    own = source_of_slot[slots]
    return HeldoutBatches(
        micro_batches=micro_batches,
        num_bytes=num_bytes,
        num_samples=sum(counts),
        sources=tuple(manifest.sources),
        source_of_row=_by_atom(own, atoms, micro_batch_size=micro_batch_size),
        live_tokens_of_source=tuple(int(is_live_BS[own == source].sum()) for source in range(len(counts))),
    )


def _by_atom(values: npt.NDArray[np.int64], atoms: Sequence[Atom], *, micro_batch_size: int) -> tuple[tuple[int, ...], ...]:
    """`values` of the rows of all atoms, as one row of `micro_batch_size` for each atom, filled up with -1."""
    ends = np.cumsum([atom.num_rows for atom in atoms])
    parts = np.split(values, ends[:-1]) if len(atoms) else []
    return tuple((*part.tolist(), *(-1,) * (micro_batch_size - part.size)) for part in parts)


def _heldout_streams(path: str | Path, *, manifest: Manifest, storage: Storage, seq_len: int) -> list[HeldoutStream]:
    stores = [TokenStore(path, source=name, split="heldout", manifest=manifest, storage=storage) for name in manifest.sources]
    return [HeldoutStream(store, seq_len=seq_len, source=store.source) for store in stores]


def _shared_out(wanted: int, held: Sequence[int]) -> list[int]:
    """`wanted` samples over sources in proportion to what they hold out, by largest remainders; never more than there are."""
    total = sum(held)
    wanted = min(wanted, total)
    counts = [wanted * count // total if total else 0 for count in held]
    by_remainder = sorted(range(len(held)), key=lambda index: -(wanted * held[index] % total if total else 0))
    for index in by_remainder[: wanted - sum(counts)]:
        counts[index] += 1
    return counts
