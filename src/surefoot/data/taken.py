"""The entries of the blocklist that a run has taken, as they lie in the data that it has now."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from surefoot.core.blocking import Block, TokenSpan, next_head
from surefoot.core.errors import DataError
from surefoot.core.hashing import ZERO_HASH
from surefoot.data.manifest import Manifest
from surefoot.data.provenance import UNKNOWN_NAME, Provenance
from surefoot.data.storage import Storage

logger = logging.getLogger(__name__)


class TakenBlocks:
    """A log that only grows. `all` are its entries as they were taken, `head` is that of their chain."""

    def __init__(self, path: str | Path, *, manifest: Manifest, storage: Storage) -> None:
        self._path, self._manifest, self._storage = path, manifest, storage
        self.all: tuple[Block, ...] = ()
        self.head = ZERO_HASH
        self._here: dict[Block, Block] = {}

    def add(self, block: Block) -> None:
        """Raises DataError, and changes nothing, for spans that this data does not have."""
        self.here(block)
        self.all, self.head = (*self.all, block), next_head(self.head, block)

    def all_here(self, blocks: Sequence[Block] | None = None) -> list[Block]:
        """`blocks` (all that were taken) with their spans in this data."""
        return [self.here(block) for block in (self.all if blocks is None else blocks)]

    def here(self, block: Block) -> Block:
        """`block` with its spans in this data: looked up by name, once, when the entry was made over other data; none when it is gone.

        Raises DataError when the lookup itself fails: a rank that left out less than the others would train on other samples.
        """
        if block not in self._here:
            is_foreign = block.samples is None and block.manifest_sha256 not in ("", self._manifest.sha256)
            found = replace(block, spans=self._look_up(block), manifest_sha256=self._manifest.sha256) if is_foreign else block
            self._refuse_unknown(found)
            self._here[block] = found
        return self._here[block]

    def _look_up(self, block: Block) -> tuple[TokenSpan, ...]:
        with Provenance(self._path, manifest=self._manifest, storage=self._storage) as provenance:
            try:
                if block.kind == "document":
                    return tuple(document.span for document in provenance.find(block.name))
                if block.kind == "file":
                    return tuple(provenance.spans_of_file(block.name))
                return (provenance.span_of_shard(block.name),)
            except DataError as error:
                if error.values.get("kind") != UNKNOWN_NAME:
                    raise
                logger.warning("blocked %s %s is not in this data any more: %s", block.kind, block.name, error)
                return ()

    def _refuse_unknown(self, block: Block) -> None:
        for span in block.spans:
            sources = self._manifest.sources
            num_tokens = sources[span.source].splits["train"].tokens if span.source in sources else 0
            if not 0 <= span.start < span.end <= num_tokens:
                what = f"tokens {span.start}:{span.end} of source {span.source!r}, which has {num_tokens}"
                raise DataError(what, where=f"block of {block.kind} {block.name}", hint="block it by name: `surefoot data block`")
