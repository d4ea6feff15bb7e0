"""DCP storage reader over a checkpoint whose manifest, file list and metadata were verified already."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from surefoot.checkpoint.metadata import part_at, tensor_metadata
from surefoot.checkpoint.parts import Part, PartReader
from surefoot.checkpoint.sources import FileSource, FolderSource, ProvenParts, in_threads
from surefoot.checkpoint.state import dtype_name
from surefoot.core.errors import CheckpointError, Corrupt, Incompatible
from surefoot.core.records import ManifestFile
from surefoot.tensors.digest import BoxDigest, as_hex


class Reader(FileSystemReader):
    """Hands out `metadata` instead of unpickling it, and names tensor, file and offset of whatever cannot be read.

    Each file comes from its source in `sources`, without one from the folder `path`; `num_threads` parts are read at once. Parts that are
    read whole into memory are looked at on the way: `digests` has the digest of what was loaded, by key and offsets. Where the source knows
    the checksum of the part in the run and the loaded bytes have it, that is the digest from before the save, at a fifth of the cost.
    """

    def __init__(
        self,
        path: Path,
        *,
        metadata: Metadata,
        files: Mapping[str, ManifestFile] | None = None,
        sources: Mapping[str, FileSource] | None = None,
        num_threads: int = 1,
    ) -> None:
        super().__init__(path)
        self._folder = FolderSource(path)
        self._metadata = metadata
        self._files = files if files is not None else listed(path, metadata)
        self._sources: Mapping[str, FileSource] = sources if sources is not None else dict.fromkeys(self._files, self._folder)
        self._num_threads = num_threads
        self._proven = {name: source for name, source in self._sources.items() if isinstance(source, ProvenParts)}
        self.digests: dict[tuple[str, tuple[int, ...]], str] = {}

    def read_metadata(self) -> Metadata:  # without **kwargs DCP does not look for per-rank metadata either
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts = PartReader(self._files, self._sources)
        largest_first = sorted(plan.items, key=lambda item: -math.prod(item.lengths))  # else one thread ends with it alone
        try:
            in_threads(lambda item: self._read_item(item, planner, parts), largest_first, num_threads=self._num_threads)
        finally:
            self._folder.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_item(self, item: ReadItem, planner: LoadPlanner, parts: PartReader) -> None:
        key = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            raise Incompatible("a pickled object, not a tensor: not read", where=key)
        info: _StorageInfo = self.storage_data[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        try:
            part = parts.part(info)
            self._check(part, item)
            self._fill(part, target, item, parts)
        except (CheckpointError, OSError, RuntimeError, ValueError) as error:
            what = error.what if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise Corrupt(
                f"{key} is unreadable at byte {info.offset}: {what}", where=info.relative_path, tensor=key, file=info.relative_path
            ) from error
        planner.commit_tensor(item, target)

    def _fill(self, part: Part, target: torch.Tensor, item: ReadItem, parts: PartReader) -> None:
        if target.shape != part.layout.shape:
            parts.read_box(part, target, offsets=item.storage_offsets)
            return
        key, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        source = self._proven.get(part.file.name)
        known = source.part(part.file, key=key, offsets=offsets) if source is not None else None
        if known is not None:
            checksum = xxhash.xxh3_128()
            if parts.read_box(part, target, offsets=item.storage_offsets, look=checksum.update) and checksum.hexdigest() == known[0]:
                self.digests[key, offsets] = known[1]
            return
        shape = tensor_metadata(self._metadata, key).size
        digest = BoxDigest(target.shape, dtype=target.dtype, global_shape=shape, offsets=offsets)
        if parts.read_box(part, target, offsets=item.storage_offsets, look=digest.update):
            self.digests[key, offsets] = as_hex(digest.value)

    def _check(self, part: Part, item: ReadItem) -> None:
        """The part must be what `.metadata` says it is."""
        entry = tensor_metadata(self._metadata, item.storage_index.fqn)
        chunk = part_at(entry, item.storage_index)
        layout = part.layout
        if layout.dtype != entry.properties.dtype or layout.shape != tuple(chunk.sizes):
            wanted = f"{dtype_name(entry.properties.dtype)} {tuple(chunk.sizes)}"
            raise Corrupt(f"the stored part is {dtype_name(layout.dtype)} {layout.shape}, .metadata says {wanted}")


def listed(path: Path, metadata: Metadata) -> dict[str, ManifestFile]:
    """The files that `.metadata` names, as they lie in the folder; their checksums are nobody's claim."""
    names = {info.relative_path for info in metadata.storage_data.values()}
    present = {name: path / name for name in names if (path / name).is_file()}
    return {name: ManifestFile(name=name, num_bytes=file.stat().st_size, xxh3_128="") for name, file in present.items()}
