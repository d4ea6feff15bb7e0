"""DCP storage reader over a checkpoint whose manifest, file list and metadata were verified already."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from surefoot.core.errors import Corrupt, Incompatible


class Reader(FileSystemReader):
    """Hands out `metadata` instead of unpickling it, and names tensor, file and offset of whatever cannot be read."""

    def __init__(self, path: Path, *, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:  # without **kwargs DCP does not look for per-rank metadata either
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                raise Incompatible("a pickled object, not a tensor: not read", where=key)
            info = self.storage_data[item.storage_index]
            try:
                super().read_data(LoadPlan([item]), planner).wait()
            except Exception as error:  # foreign bytes: whatever they make torch raise is the finding
                raise Corrupt(
                    f"{key} is unreadable at byte {info.offset}: {type(error).__name__}: {error}",
                    where=info.relative_path,
                    tensor=key,
                    file=info.relative_path,
                ) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future
