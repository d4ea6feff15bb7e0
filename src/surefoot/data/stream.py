"""Which samples come when, and their tokens: an order over a store, without state."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from surefoot.core.errors import DataError
from surefoot.core.hashing import key64
from surefoot.data.cursor import PROBE_SAMPLES, order_probe
from surefoot.data.order import FeistelPermutation, SampleOrder
from surefoot.data.packing import num_samples_in
from surefoot.data.shards import TokenStore


class SampleStream:
    """Training samples of one source: global sample g -> its tokens. Raises DataError when the source is too short for one sample."""

    def __init__(self, store: TokenStore, *, seq_len: int, seed: int, source: str, first_sample: int = 0, restart: int = 0) -> None:
        num_samples = num_samples_in(store.num_tokens, seq_len=seq_len)
        if num_samples < 1:
            raise DataError(
                f"{store.num_tokens} tokens hold no sample of {seq_len + 1}",
                where=f"source {source!r}",
                hint="lower [data] seq_len, or replace the prepared data by more text with `surefoot data prepare ... --force`",
                got=store.num_tokens,
                wanted=seq_len + 1,
            )
        self.store = store
        self.seq_len = seq_len
        self.order = SampleOrder(num_samples, seed=seed, source=source, first_sample=first_sample, restart=restart)

    def read(self, global_samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """(sample ids (B,), tokens (B, seq_len + 1) in stored dtype). An id is the sample's index in its source."""
        _, indices = self.order.sample_at(global_samples)
        return indices, self._tokens(indices)

    def probe(self, next_sample: int) -> str:
        """The order probe of the samples before `next_sample`, at most 64 and none from before this order began."""
        first = max(self.order.first_sample, next_sample - PROBE_SAMPLES)
        epochs, indices = self.order.sample_at(np.arange(first, next_sample, dtype=np.int64))
        crcs = [zlib.crc32(tokens.astype("<u4").tobytes()) for tokens in self._tokens(indices)]
        return order_probe(epochs=epochs, indices=indices, token_crcs=np.array(crcs, dtype=np.uint32))

    def _tokens(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        out = np.empty((len(indices), self.seq_len + 1), dtype=self.store.manifest.token_dtype)
        for row, index in enumerate(indices.tolist()):
            out[row] = self.store.read(index * self.seq_len, self.seq_len + 1, sample=index)
        return out


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
