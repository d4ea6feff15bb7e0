"""What the guard cannot do for this loop, said once at the start: a missing port is a line, not an error."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from surefoot.core.ports import DataPort, EvalPort, GaugePort, RecomputePort, SteerableData


def missing_capabilities(
    *,
    model: nn.Module,
    data: DataPort,
    evaluation: EvalPort | None,
    extra: Mapping[str, object],
    world_size: int,
    under_agent: bool,
    recompute: RecomputePort | None = None,
    gauges: GaugePort | None = None,
    repeats_bits: bool = True,
) -> list[str]:
    """One line per thing that this loop goes without, and why. Pure."""
    lines = []
    if evaluation is None:
        lines.append("no held-out loss: no evaluation was handed over")
    if not isinstance(data, SteerableData):
        absent = [name for name in ("block", "skip", "blocklist", "locate") if not hasattr(data, name)]
        lines.append(f"no document can be skipped, blocked or located: the data port has no {', '.join(absent)}")
    if gauges is None and world_size > 1:
        lines.append("no rank's own gradient is measured before others are added to it: hand over gauges")
    if recompute is None and world_size > 1:
        lines.append("a rank that computes wrongly is not found where nothing is replicated: hand over what computes an atom again")
    elif not repeats_bits and world_size > 1:
        lines.append(
            "a rank that computes wrongly is not found where nothing is replicated: kernels may give other bits each time "
            "(numerics.deterministic = false), so audits compare no gradient"
        )
    if not extra:
        lines.append("learning-rate schedules, scalers and averages are not saved: hand over what has a state_dict as extra={...}")
    if not under_agent:
        lines.append("nobody outside this process watches it: no restart, no culprit, no memory tier")
    if isinstance(model, DistributedDataParallel) and world_size > 2:
        lines.append(
            "a resume may differ in the last bits: DDP sorts its buckets anew after the first backward of a process; "
            "one backward on zeros before restore() settles them"
        )
    return lines
