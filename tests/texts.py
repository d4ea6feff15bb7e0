"""Prepared text for runs in tests: small, and the same each time."""

from __future__ import annotations

from pathlib import Path

from surefoot.core.sections import SourceSection
from surefoot.data.prepare import prepare
from surefoot.data.shard_writer import SHARD_BYTES


def prepare_documents(
    folder: Path, *, sentence: str = "the quick brown fox jumps over the lazy dog. ", shard_bytes: int = SHARD_BYTES
) -> Path:
    """60 documents of one to seven times the sentence, as bytes; the folder of the prepared data, below `folder`."""
    for index in range(60):
        (folder / f"{index:02d}.txt").write_text(f"document {index}: " + sentence * (index % 7 + 1))
    out = folder / "prepared"
    prepare([SourceSection(name="text", files=(str(folder),))], out=out, tokenizer="bytes", heldout_fraction=0.1, shard_bytes=shard_bytes)
    return out
