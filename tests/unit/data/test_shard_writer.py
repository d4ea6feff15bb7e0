"""A shard that is gone on with, and one with more rows than a read gives: the same bytes, in little memory."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from surefoot.data.manifest import SplitEntry, stored_dtype
from surefoot.data.shard_writer import SplitState, SplitWriter
from surefoot.data.stored_rows import ROW

DTYPE = stored_dtype("u16")
NUM_DOCS, DOC_TOKENS = 2000, 3000


def write(folder: Path, *, first: int = 0, end: int = NUM_DOCS, state: SplitState | None = None) -> SplitWriter:
    """Documents [first, end) of a made-up shard of 12 MB."""
    writer = SplitWriter(folder / "data", work=folder / "work", dtype=DTYPE, files=["a.txt"], state=state)
    for number in range(first, end, 500):
        rows = np.zeros(500, dtype=ROW)
        rows["tokens"], rows["record"] = DOC_TOKENS, np.arange(number, number + 500) + 1
        rows["hash"][:, :2] = np.arange(number, number + 500).astype("<u2").view("u1").reshape(-1, 2)
        writer.extend(np.arange(500 * DOC_TOKENS).astype(DTYPE) + DTYPE.type(number), rows)
    return writer


def test_a_shard_that_is_gone_on_with_is_read_again_in_pieces(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole").finish()
    writer = write(tmp_path / "torn", end=1500)
    state = writer.sync()
    writer.abandon()
    tracemalloc.start()
    try:
        writer = write(tmp_path / "torn", first=NUM_DOCS, state=state)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writer.abandon()
    assert state.tokens
    assert state.tokens.bytes > 8 << 20
    assert peak_bytes < 4 << 20
    assert write(tmp_path / "torn", first=1500, state=state).finish() == whole


def test_rows_beyond_what_one_read_gives_all_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives at most 2 GiB at a time: here, a thousandth of the rows."""
    wanted: SplitEntry = write(tmp_path / "whole").finish()
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 250), offset))
    assert write(tmp_path / "short").finish() == wanted
