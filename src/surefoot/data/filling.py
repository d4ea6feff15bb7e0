"""Documents into a shard whose length is given: what is too much is cut, what is missing is EOS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from surefoot.data.encoder import Stored
from surefoot.data.manifest import dtype_for, stored_dtype
from surefoot.data.stored_rows import ROW
from surefoot.data.tokenizer import Tokenizer

PADDING_FILE: Final = "(padding)"
"""What provenance names as the file of the EOS tokens that fill a shard up: one document, of record 0."""


@dataclass
class Filling:
    """Exactly `num_tokens`, from documents in order."""

    num_tokens: int
    codec: Tokenizer
    padded_tokens: int = 0
    cut_documents: int = 0

    def fill(self, parts: Iterator[Stored]) -> Stored:
        tokens: list[npt.NDArray[Any]] = []
        rows: list[npt.NDArray[Any]] = []
        left = self.num_tokens
        for part in parts:
            ends = np.cumsum(part.rows["tokens"], dtype=np.int64)
            num_whole = int(np.searchsorted(ends, left, side="right"))
            end = int(ends[num_whole - 1]) if num_whole else 0
            tokens.append(part.tokens[:end])
            rows.append(part.rows[:num_whole])
            left -= end
            if num_whole < len(part.rows):
                self.cut_documents += len(part.rows) - num_whole
                if left > 1:
                    tokens.append(np.append(part.tokens[end : end + left - 1], part.tokens.dtype.type(self.codec.eos_id)))
                    rows.append(_shortened(part.rows[num_whole : num_whole + 1], num_tokens=left))
                    left = 0
        if left:
            self.padded_tokens = left
            tokens.append(np.full(left, self.codec.eos_id, dtype=stored_dtype(dtype_for(self.codec.vocab_size))))
            rows.append(_padding(left))
        return Stored(np.concatenate(tokens), np.concatenate(rows))


def _shortened(row: npt.NDArray[Any], *, num_tokens: int) -> npt.NDArray[Any]:
    """Of a document that is cut: its hash and its signature still name the whole one."""
    short = row.copy()
    short["tokens"] = num_tokens
    return short


def _padding(num_tokens: int) -> npt.NDArray[Any]:
    """All of the padding as one document without text, of no file."""
    row = np.zeros(1, dtype=ROW)
    row["tokens"] = num_tokens
    row["file"] = np.iinfo(np.uint32).max
    return row
