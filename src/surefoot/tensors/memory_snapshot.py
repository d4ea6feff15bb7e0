"""What filled a device when it was full: the allocator's own account, left beside the logs of the rank."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from surefoot.core import strict_json
from surefoot.core.durable import write_atomic

logger = logging.getLogger(__name__)

_MAX_SEGMENTS = 2000  # the largest; the rest is in the sums


def leave_memory_snapshot(path: Path) -> Path | None:
    """Local. The statistics and the largest segments of the current device as JSON; None where there is no such allocator (on CPU)."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        return None
    try:
        told = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # nor for this
        segments = sorted(told, key=lambda segment: -int(segment["total_size"]))
        names = ("address", "total_size", "allocated_size", "active_size", "segment_type", "stream")
        record = {
            "statistics": dict(torch.cuda.memory_stats()),
            "num_segments": len(segments),
            "segments": [{name: segment.get(name) for name in names} for segment in segments[:_MAX_SEGMENTS]],
        }
        write_atomic(path, strict_json.dumps(record, indent=1), durable=False)
    except Exception as problem:  # a sink of evidence: it must not take the place of the error that it is about
        logger.warning("the account of the device's memory could not be written: %s", problem)
        return None
    return path
