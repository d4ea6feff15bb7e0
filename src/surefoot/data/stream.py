"""The rows of global samples: an order over stores, with what is blocked silenced. No state; several threads may read at once."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.core.blocking import Block
from surefoot.core.errors import DataError
from surefoot.core.hashing import key64
from surefoot.data.blocked import BlockedSpans, silenced
from surefoot.data.cursor import PROBE_SAMPLES, order_probe
from surefoot.data.order import FeistelPermutation
from surefoot.data.packing import Rows, join_rows, pack_rows
from surefoot.data.run_order import RunOrder, Sample
from surefoot.data.shards import TokenStore

I64Array = npt.NDArray[np.int64]


class SampleStream:
    """Training samples of a run: global sample g -> its row. `stores` are the train splits by source."""

    def __init__(self, order: RunOrder, *, stores: Mapping[str, TokenStore], eos_id: int, blocks: Sequence[Block] = ()) -> None:
        self.order = order
        self._stores = [stores[name] for name in order.names]
        self._eos_id = eos_id
        self._vocab_size = self._stores[0].manifest.tokenizer.vocab_size
        blocked = silenced(blocks)
        self._blocked = [blocked.get(name, BlockedSpans()) for name in order.names]

    def rows(self, samples: I64Array, *, seq_len: int) -> tuple[I64Array, Rows]:
        """(numbers of the samples within their sources (B,), rows) of `samples`, all of the length `seq_len`."""
        where = self.order.rows(samples)
        stream_BT = np.zeros((samples.size, seq_len + 1), dtype=self._stores[0].manifest.token_dtype)
        blocked_BT = self._read(where.sources, where.starts, samples, stream_BT)
        self._refuse_unknown_ids(stream_BT, where.sources, samples)
        rows = pack_rows(stream_BT, eos_id=self._eos_id, blocked_BT=blocked_BT)
        firsts = where.starts.copy()
        for row in np.flatnonzero(where.starts < 0).tolist():
            firsts[row], joined = self._joined(int(where.sources[row]), int(samples[row]), seq_len)
            for column, part in zip(rows, joined, strict=True):
                column[row] = part[0]
        return firsts // seq_len, rows

    def probe(self, next_sample: int, *, known: Sequence[Block] = ()) -> str:
        """The order probe of the samples before `next_sample`: at most 64, and none from before a source was started anew.

        Samples with a token that `known` leaves out stay out of it, from whichever sample on it does: their text may be gone.
        """
        probed = self._probed(next_sample, known)
        return order_probe(
            sources=np.array([self._number(sample) for sample in probed], dtype=np.int64) if len(self._stores) > 1 else None,
            epochs=np.array([sample.epoch for sample in probed], dtype=np.int64),
            indices=np.array([sample.index for sample in probed], dtype=np.int64),
            token_crcs=self._crcs(probed),
        )

    def _probed(self, next_sample: int, known: Sequence[Block]) -> list[Sample]:
        first = max(self.order.known_from(), next_sample - PROBE_SAMPLES)
        samples = self.order.at(self.order.steps.without_skipped(np.arange(first, next_sample, dtype=np.int64)))
        gone = silenced(known)
        return [
            sample
            for sample in samples
            if not any(gone.get(sample.source, BlockedSpans()).within(start, count + 1, sample=None) for start, count in sample.spans)
        ]

    def _number(self, sample: Sample) -> int:
        return self.order.names.index(sample.source)

    def _crcs(self, probed: Sequence[Sample]) -> npt.NDArray[np.uint32]:
        """CRC-32 of the tokens of each sample, and of the one behind each of its spans; one read per source."""
        crcs = [0] * len(probed)
        for number, store in enumerate(self._stores):
            here = [(row, sample) for row, sample in enumerate(probed) if self._number(sample) == number]
            rows = [row for row, sample in here for _ in sample.spans]
            starts = np.array([start for _, sample in here for start, _ in sample.spans], dtype=np.int64)
            counts = np.array([count + 1 for _, sample in here for _, count in sample.spans], dtype=np.int64)
            samples = np.array([probed[row].sample for row in rows], dtype=np.int64)
            ends = np.cumsum(counts).tolist()
            tokens = store.read_spans(starts, counts, samples=samples)
            for row, count, end in zip(rows, counts.tolist(), ends, strict=True):
                crcs[row] = zlib.crc32(tokens[end - count : end].astype("<u4").tobytes(), crcs[row])
        return np.array(crcs, dtype=np.uint32)

    def _read(self, sources: I64Array, starts: I64Array, samples: I64Array, out_BT: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        """Fill the rows that lie in one piece; returns which tokens are blocked, None for none. What is blocked is never read: it may be
        blocked because storage does not give it back as it was written."""
        row_tokens = out_BT.shape[1]
        blocked_BT: npt.NDArray[np.bool_] | None = None
        for source, store in enumerate(self._stores):
            mine = np.flatnonzero((sources == source) & (starts >= 0))
            if not mine.size:
                continue
            touched = self._blocked[source].touch(starts[mine], row_tokens, samples=samples[mine])
            whole = mine[~touched]
            out_BT[whole] = store.read_rows(starts[whole], row_tokens, samples=samples[whole])
            for row in mine[touched].tolist():
                blocked_BT = np.zeros(out_BT.shape, dtype=np.bool_) if blocked_BT is None else blocked_BT
                out_BT[row], blocked_BT[row] = self._silenced(source, int(starts[row]), row_tokens, sample=int(samples[row]))
        return blocked_BT

    def _silenced(self, source: int, start: int, count: int, *, sample: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """(tokens, which of them are blocked) of [start, start + count) of a source; the blocked ones are EOS."""
        is_blocked = np.zeros(count, dtype=np.bool_)
        for first, end in self._blocked[source].within(start, count, sample=sample):
            is_blocked[first:end] = True
        store = self._stores[source]
        tokens = np.full(count, self._eos_id, dtype=store.manifest.token_dtype)
        edges = np.flatnonzero(np.diff(np.concatenate(([True], is_blocked, [True]))))
        begins, ends = edges[::2], edges[1::2]
        if begins.size:
            live = store.read_spans(start + begins, ends - begins, samples=np.full(begins.size, sample, dtype=np.int64))
            tokens[~is_blocked] = live
        return tokens, is_blocked

    def _refuse_unknown_ids(self, stream_BT: npt.NDArray[Any], sources: I64Array, samples: I64Array) -> None:
        """A checksum proves that ids are those that were written, not that the model has a row for each."""
        if stream_BT.size and int(stream_BT.max()) >= self._vocab_size:
            row, place = (int(index[0]) for index in np.nonzero(stream_BT >= self._vocab_size))
            raise DataError(
                f"id {stream_BT[row, place]} at position {place} of sample {samples[row]}, the tokenizer has {self._vocab_size} ids",
                where=f"source {self.order.names[int(sources[row])]!r}",
                hint="its shards were made with another tokenizer: prepare it again",
                got=int(stream_BT[row, place]),
                wanted=self._vocab_size,
                sample=int(samples[row]),
            )

    def _joined(self, source: int, sample: int, seq_len: int) -> tuple[int, Rows]:
        """(first token, the one row) of a sample that is put together from several spans."""
        spans = self.order.spans_at(sample)
        parts = []
        for start, count in spans:
            tokens, is_blocked = self._silenced(source, start, count + 1, sample=sample)
            stream_BT, blocked_BT = tokens[None, :], is_blocked[None, :]
            parts.append(pack_rows(stream_BT, eos_id=self._eos_id, blocked_BT=blocked_BT))
        return spans[0][0], join_rows(parts, seq_len=seq_len, eos_id=self._eos_id)


class HeldoutStream:
    """Held-out samples of one source, in a fixed order that spreads over the whole split and hangs on the source's name alone.

    Nothing is wasted: the last sample may be short and is filled up with EOS, which has no label.
    """

    def __init__(self, store: TokenStore, *, seq_len: int, source: str) -> None:
        self.num_samples = -(-(store.num_tokens - 1) // seq_len) if store.num_tokens > 1 else 0
        self._store = store
        self._seq_len = seq_len
        self._order = FeistelPermutation(max(1, self.num_samples), key=key64(source, "heldout"))

    def read(self, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """(sample ids (B,), tokens (B, seq_len + 1) in stored dtype) of the samples at `slots` of the fixed order."""
        ids = self._order.forward(slots).astype(np.int64)
        manifest = self._store.manifest
        out = np.full((len(ids), self._seq_len + 1), manifest.tokenizer.eos_id, dtype=manifest.token_dtype)
        for row, sample in enumerate(ids.tolist()):
            start = sample * self._seq_len
            count = min(self._seq_len + 1, self._store.num_tokens - start)
            out[row, :count] = self._store.read(start, count, sample=sample)
        return ids, out
