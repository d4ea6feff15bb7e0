"""Blocks of a shard that stay wrong when they are fetched again: what is written down about one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from surefoot.core.errors import DataError

QUARANTINE_NAME: Final = "quarantine.jsonl"
DAMAGED_BLOCK: Final = "damaged-block"
_FIELDS: Final = ("source", "split", "shard", "block", "offset", "got", "wanted", "sample")


def is_damaged_block(error: BaseException) -> bool:
    """Whether `error` says that stored tokens differ from their checksum."""
    return isinstance(error, DataError) and error.values.get("kind") == DAMAGED_BLOCK


def quarantine_record(error: DataError, *, time_utc: str, rank: int, step: int | None = None) -> dict[str, Any]:
    """One line of `quarantine.jsonl`, and the fields of `shard.quarantined`, for a damaged block.

    `shard` is "source/shard" as `surefoot data block --shard` takes it, `offset` counts bytes of its `.tok`, `got` and `wanted` are the
    xxh3_64 of the block, `sample` is the global sample that needed it (None when it was read for something else).
    """
    if not is_damaged_block(error):
        raise ValueError(f"no damaged block: {error}")
    values: Mapping[str, Any] = error.values
    return {"time_utc": time_utc, "rank": rank, "step": step, "path": error.where, **{name: values[name] for name in _FIELDS}}
