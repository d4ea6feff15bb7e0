"""Whether a run can start, from what its first steps and its machine showed. Pure; and the page that says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.core.sections import RunConfig
from surefoot.core.units import show_bytes, show_duration


@dataclass(frozen=True, slots=True)
class Found:
    """`problem` is why the steps could not be done; then most else is None. `peaks` are host bytes by rank, `device_bytes` those of the
    fullest accelerator, `refused` what the file system said to the room that the run will need."""

    config: RunConfig
    problem: str = ""
    prepared: bool = True
    took_s: float = 0.0
    peaks: Mapping[int, int] = field(default_factory=dict)
    step_s: float | None = None
    first_step_s: float | None = None
    exchange_s: float | None = None
    device_bytes: int | None = None
    checkpoint_bytes: int | None = None
    write_bytes_per_s: float | None = None
    free_bytes: int | None = None
    refused: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    limits: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    name: str
    ok: bool
    found: str
    hint: str = ""


def checks_of(found: Found) -> list[Checked]:
    """Every check, those that pass too; a run can start when all do."""
    return [_steps(found), *([_ranks(found), _room(found)] if not found.problem else []), _writing(found)]


def kept_checkpoints(config: RunConfig) -> int:
    """How many checkpoints of the run lie on the disk at once: the newest, the one being written, and those that are kept for good."""
    kept = config.checkpoint
    milestones = config.train.num_steps // kept.milestone_steps if kept.milestone_steps else 0
    return kept.keep_last + 1 + milestones + len(kept.keep_steps)


def kept_bytes(config: RunConfig, checkpoint_bytes: int) -> int:
    return kept_checkpoints(config) * checkpoint_bytes


def as_json(found: Found, checks: Sequence[Checked]) -> dict[str, Any]:
    needed = kept_bytes(found.config, found.checkpoint_bytes) if found.checkpoint_bytes is not None else None
    return {
        "reasons": [f"{one.name}: {one.found}" for one in checks if not one.ok],
        "checks": [asdict(one) if not one.ok else {**asdict(one), "hint": ""} for one in checks],
        "num_ranks": found.config.parallel.num_ranks,
        "peak_host_bytes": {str(rank): num_bytes for rank, num_bytes in sorted(found.peaks.items())},
        "peak_device_bytes": found.device_bytes,
        "step_s": found.step_s,
        "first_step_s": found.first_step_s,
        "exchange_s": found.exchange_s,
        "storage": {
            "write_bytes_per_s": found.write_bytes_per_s,
            "free_bytes": found.free_bytes,
            "checkpoint_bytes": found.checkpoint_bytes,
            "kept_checkpoints": kept_checkpoints(found.config),
            "needed_bytes": needed,
        },
        "versions": dict(found.versions),
        "limits": found.limits,
        "took_s": round(found.took_s, 3),
    }


def lines_of(found: Found, checks: Sequence[Checked]) -> list[str]:
    lines = []
    for one in checks:
        lines.append(f"{'ok' if one.ok else 'NO':<4}{one.name:<10} {one.found}")
        if one.hint and not one.ok:
            lines.append(f"{'':<15}{one.hint}")
    lines += (
        [f"    {'versions':<10} {', '.join(f'{name} {version}' for name, version in found.versions.items())}"] if found.versions else []
    )
    lines += [f"    {'limits':<10} {found.limits}"] if found.limits else []
    return lines


def _steps(found: Found) -> Checked:
    if found.problem:
        return Checked("steps", False, found.problem, "mend that, and check again")
    data = "" if found.prepared else "; data were prepared for the check alone, the run prepares them again"
    times = (
        f"{_seconds(found.step_s)} a step, the first {_seconds(found.first_step_s)}, {_seconds(found.exchange_s)} of the last to exchange"
    )
    return Checked("steps", True, f"{times}{data}")


def _ranks(found: Found) -> Checked:
    """They met on a port of this machine, agreed on a step, and said what they hold."""
    wanted = found.config.parallel.num_ranks
    peaks = ", ".join(f"rank {rank} {show_bytes(num_bytes)}" for rank, num_bytes in sorted(found.peaks.items())[:8])
    device = f"; {show_bytes(found.device_bytes)} of an accelerator" if found.device_bytes else ""
    words = f"{len(found.peaks)} of {wanted} met over loopback and agreed on a step; peaks of host memory: {peaks}{device}"
    return Checked("ranks", len(found.peaks) == wanted, words, "the others were never seen")


def _room(found: Found) -> Checked:
    if found.checkpoint_bytes is None or found.free_bytes is None:
        return Checked("room", False, "no checkpoint was committed, so nobody knows its size", "see `surefoot doctor`")
    number, needed = kept_checkpoints(found.config), kept_bytes(found.config, found.checkpoint_bytes)
    words = (
        f"{number} checkpoints of {show_bytes(found.checkpoint_bytes)} are {show_bytes(needed)}; {show_bytes(found.free_bytes)} are free"
    )
    if found.refused:
        return Checked("room", False, f"{words}, but they cannot be had: {found.refused}", "ask for a larger quota, or another [run] dir")
    hint = "free some, lower checkpoint.keep_last, or choose another [run] dir"
    return Checked("room", needed <= found.free_bytes, words, hint)


def _writing(found: Found) -> Checked:
    rate = found.write_bytes_per_s
    if rate is None:
        return Checked("writing", False, "a file of 64 MiB could not be written and made durable", "is the disk full, slow or read-only?")
    took = ""
    if found.checkpoint_bytes is not None:
        took_s = found.checkpoint_bytes / rate
        took = f": a checkpoint takes {show_duration(took_s)}"
        if took_s > found.config.checkpoint.upload_limit_s:
            limit = show_duration(found.config.checkpoint.upload_limit_s)
            return Checked("writing", False, f"{show_bytes(int(rate))}/s{took}, the limit is {limit}", "raise checkpoint.upload_limit_s")
    return Checked("writing", True, f"{show_bytes(int(rate))}/s{took}")


def _seconds(value: float | None) -> str:
    return f"{value:.3g} s" if value is not None else "unknown"
