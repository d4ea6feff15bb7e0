"""What a checkpoint weighs and how long it takes to be taken and written: whole, per rank, per node. Pure.

A rank's copy crosses its own link to the host; the disk of a node is shared by all its ranks. Times are those of the hardware alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.plan.hardware import Accelerator
from surefoot.plan.records import Dtypes


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """`stage_s`: device to pinned host memory. `flush_s`: a node's share to its disk. `shared_s`: all of it to a shared store, if any."""

    stage_s: float
    flush_s: float
    shared_s: float | None

    @property
    def write_s(self) -> float:
        """From the begin of a save until its slowest copy is there."""
        return self.stage_s + max(self.flush_s, self.shared_s or 0.0)


@dataclass(frozen=True, slots=True)
class CheckpointBytes:
    """`rolling` are those that retention keeps for a while, `milestones` for good, `in_flight` is the one being written. `peak` is all of
    them: nothing goes before the new one is known to be readable."""

    total: float
    per_rank: float
    per_node: float
    num_kept: int
    rolling: float
    milestones: float
    in_flight: float
    peak: float


def saved_bytes_per_parameter(dtypes: Dtypes, *, keep_weights: bool = True) -> int:
    """Masters, moments, and the weights beside them. Without `keep_weights` those are rounded again from the masters when loaded.

    Gradients are never saved: a checkpoint is taken between two updates.
    """
    weights = dtypes.weight if keep_weights or not dtypes.master else 0
    return weights + dtypes.master + dtypes.moments


def saved_bytes(num_parameters: float, dtypes: Dtypes, *, keep_weights: bool = True) -> float:
    return num_parameters * saved_bytes_per_parameter(dtypes, keep_weights=keep_weights)


def save_times(
    total_bytes: float, *, num_ranks: int, hardware: Accelerator, host_link: float | None = None, shared_bytes_per_s: float | None = None
) -> SaveTimes:
    """With the state shared out evenly over `num_ranks`. `host_link` replaces that of the data sheet, as for memory that is not pinned."""
    per_rank = total_bytes / num_ranks
    per_node = per_rank * min(hardware.devices_per_node, num_ranks)
    return SaveTimes(
        stage_s=per_rank / (host_link or hardware.host_link),
        flush_s=per_node / hardware.disk,
        shared_s=total_bytes / shared_bytes_per_s if shared_bytes_per_s else None,
    )


def checkpoint_bytes(
    total_bytes: float, *, num_ranks: int, devices_per_node: int, num_rolling: int, num_milestones: int
) -> CheckpointBytes:
    """What stands on disk late in a run, at most."""
    num_kept = num_rolling + num_milestones
    per_rank = total_bytes / num_ranks
    return CheckpointBytes(
        total=total_bytes,
        per_rank=per_rank,
        per_node=per_rank * min(devices_per_node, num_ranks),
        num_kept=num_kept,
        rolling=total_bytes * num_rolling,
        milestones=total_bytes * num_milestones,
        in_flight=total_bytes,
        peak=total_bytes * (num_kept + 1),
    )
