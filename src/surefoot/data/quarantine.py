"""Shards that storage does not give back as they were written: what is said about one, and that a run can do without it."""

from __future__ import annotations

from pathlib import PurePosixPath

from surefoot.core.errors import SHARD_LOSSES, DataError


def shard_error(what: str, *, kind: str, file: str, where: str, **values: object) -> DataError:
    """The error to raise for a shard of which `file`, SOURCE/SPLIT/SHARD.ENDING, is damaged, cut short or gone; `kind` is one of
    `SHARD_LOSSES`. Its value `shard` is SOURCE/SHARD, as `surefoot data block --shard` takes it."""
    source, split = PurePosixPath(file).parts[:2]
    shard = f"{source}/{PurePosixPath(file).stem}"
    way_on = f", or leave it out with `surefoot data block RUN --shard {shard}`" if split == "train" else ""
    hint = f"restore the shard from a copy{way_on}"
    return DataError(what, where=where, hint=hint, **{**values, "kind": kind, "source": source, "split": split, "shard": shard})


def with_shard(error: DataError) -> DataError:
    """`error` as `shard_error` says it where a storage tells of a file of a shard; others as they are."""
    values = dict(error.values)
    kind, file = values.pop("kind", None), values.pop("file", None)
    if kind not in SHARD_LOSSES or not isinstance(file, str) or "shard" in values:
        return error
    return shard_error(error.what, kind=str(kind), file=file, where=error.where, **values)
