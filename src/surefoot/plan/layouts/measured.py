"""Tables of measured throughput, as CSV: which model, in which layout, on how many devices, how fast. Further columns may be there.

Columns: `gpu, n_gpus, seq`, a speed (`tokens_per_s_per_gpu`, `tflops_per_gpu` or `mfu_pct`), and `params`, or `hidden` and `layers`.
What is absent or blank has its usual value: an axis 1, `dp` the rest of the devices, `mbs` all that a rank has of a step (in a
pipeline 1), `gbs_seq` what dp, mbs and `grad_accum` come to.
`program` says whose collectives they are: surefoot, megatron or nanotron.
`tflops_per_gpu` and `mfu_pct` count all pairs of queries and keys, as published figures do (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.core.errors import ConfigError, DataError
from surefoot.plan.hardware import GIB, Accelerator, accelerator
from surefoot.plan.layouts.calibration import DEFAULT, Calibration
from surefoot.plan.layouts.measured_sizes import guess_sizes
from surefoot.plan.layouts.throughput import StepModel, StepTime
from surefoot.plan.memory.implementations import IMPLEMENTATIONS, MEGATRON, NANOTRON, Implementation
from surefoot.plan.records import BF16_MASTERS, Layout, Recompute, Workload

NEEDED = ("gpu", "n_gpus", "seq")
SPEEDS = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")

LEAST_PER_CENT = 1.5

ZeroStage = Literal[1, 2, 3]

_STAGES: Mapping[str, ZeroStage] = {
    "zero-1": 1,
    "dist-opt": 1,
    "zero-2": 2,
    "shard_grad_op": 2,
    "zero-3": 3,
    "full_shard": 3,
    "fsdp": 3,
    "hsdp": 3,
    "hybrid_shard": 3,
}
_WHOLE_COPIES = ("", "zero-0", "ddp", "no_shard", "none")
_TENSOR_BY_TENSOR = ("zero-0", "zero-1")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One row. `step_s` is what its speed comes to; `memory_bytes` the peak that torch's allocator reserved on rank 0, where it is told."""

    name: str
    workload: Workload
    layout: Layout
    hardware: Accelerator
    implementation: Implementation
    dtype: str
    step_s: float
    memory_bytes: float | None = None

    def predict(self, calibration: Calibration = DEFAULT) -> StepTime:
        return self.model(calibration).step(self.layout)

    def model(self, calibration: Calibration) -> StepModel:
        return StepModel(self.workload, self.hardware, calibration, self.implementation, self.dtype)

    def mfu(self, step_s: float) -> float:
        """Of the published kind."""
        peak = self.hardware.peak_flops(self.dtype) * self.layout.num_devices
        return published_flops(self.workload) / (step_s * peak)


def published_flops(workload: Workload) -> float:
    """Of one step, all pairs of queries and keys counted."""
    sizes, seq_len = workload.sizes, workload.seq_len
    pairs = 12.0 * sizes.num_layers * sizes.num_heads * sizes.head_dim * seq_len
    causal = 3 * 2 * 2 * sizes.num_layers * sizes.num_heads * sizes.head_dim * (seq_len + 1) / 2
    window_free = replace(sizes, window=0)
    return workload.tokens_per_step * (window_free.flops_per_token(seq_len) - causal + pairs)


def read_measured(path: Path) -> tuple[MeasuredRun, ...]:
    """All rows that have a speed. Raises DataError that names the file, the line and the column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=str(path), hint="a header line, then one measured run per line") from error
    missing = [name for name in NEEDED if not rows or name not in rows[0]]
    if missing or not any(name in rows[0] for name in SPEEDS):
        what = f"no column {missing[0]!r}" if missing else "no speed"
        raise DataError(what, where=f"{path}:1", hint=f"it needs {', '.join(NEEDED)} and one of {', '.join(SPEEDS)}")
    runs = tuple(_runs(path, rows))
    if not runs:
        raise DataError("no row has a speed", where=str(path), hint=f"fill in one of {', '.join(SPEEDS)}")
    return runs


def _runs(path: Path, rows: list[dict[str, Any]]) -> Iterator[MeasuredRun]:
    for number, row in enumerate(rows, start=2):
        cells = _Row(f"{path}:{number}", {name: (text or "").strip() for name, text in row.items() if isinstance(text, str | None)})
        if any(cells.has(name) for name in SPEEDS):
            yield _run(cells)


@dataclass(frozen=True, slots=True)
class _Row:
    where: str
    cells: Mapping[str, str]

    def has(self, name: str) -> bool:
        return bool(self.cells.get(name))

    def text(self, name: str) -> str:
        return self.cells.get(name, "").lower()

    def number(self, name: str, default: float) -> float:
        """Above 0."""
        told = self.cells.get(name, "")
        try:
            value = float(told) if told else default
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise DataError(f"{name} is {told!r}", where=self.where, hint="a number above 0", got=told)
        return value

    def count(self, name: str, default: int) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise DataError(f"{name} is {value:g}", where=self.where, hint="a whole number", got=value)
        return int(value)


def _run(row: _Row) -> MeasuredRun:
    layout = _layout(row)
    hardware = _hardware(row)
    sizes = guess_sizes(
        params=row.number("params", 0.0) if row.has("params") else None,
        d_model=row.count("hidden", 0) if row.has("hidden") else None,
        num_layers=row.count("layers", 0) if row.has("layers") else None,
        num_heads=row.count("heads", 0) if row.has("heads") else None,
        num_kv_heads=row.count("kv_heads", 0) if row.has("kv_heads") else None,
        vocab_size=row.count("vocab", 0) if row.has("vocab") else None,
        notes=row.text("notes"),
        where=row.where,
    )
    accumulated = row.count("grad_accum", 1) * layout.micro_batch_size * layout.data_ranks
    sharded = layout.zero_stage > 1 and layout.dp_shard > 1
    dtypes = replace(BF16_MASTERS, reduce=2) if sharded else BF16_MASTERS  # FSDP's mixed precision reduces in bf16 (llm-foundry, PURE)
    workload = Workload(sizes, row.count("seq", 1), row.count("gbs_seq", accumulated), dtypes)
    named = row.cells.get("model") or f"{sizes.num_parameters / 1e9:.3g}B"
    implementation = _implementation(row)
    dtype = next((name for name in ("fp8", "bf16", "fp16") if name in row.text("precision")), "bf16")
    peak = row.number("mem_gib", 0.0) * GIB if row.has("mem_gib") else None
    run = MeasuredRun(f"{named} on {layout.num_devices}", workload, layout, hardware, implementation, dtype, 1.0, peak)
    return replace(run, step_s=_step_s(row, run))


def _implementation(row: _Row) -> Implementation:
    """As the column `program` says; else the one whose shorthand the sharding is in."""
    if row.has("program"):
        if row.text("program") not in IMPLEMENTATIONS:
            raise DataError(f"program is {row.text('program')!r}", where=row.where, hint=f"one of {', '.join(IMPLEMENTATIONS)}")
        return IMPLEMENTATIONS[row.text("program")]
    return NANOTRON if row.text("zero_or_fsdp") in _TENSOR_BY_TENSOR else MEGATRON


def _hardware(row: _Row) -> Accelerator:
    try:
        return accelerator(row.text("gpu"))
    except ConfigError as error:
        raise DataError(error.what, where=row.where, hint=error.hint, got=row.text("gpu")) from error


def _layout(row: _Row) -> Layout:
    num_devices = row.count("n_gpus", 1)
    axes = {axis: row.count(axis, 1) for axis in ("tp", "pp", "cp", "ep")}
    inner = axes["tp"] * axes["pp"] * axes["cp"]
    data_ranks = row.count("dp", max(1, num_devices // inner))
    if inner * data_ranks != num_devices:
        what = f"tp * pp * cp * dp = {inner * data_ranks}, n_gpus is {num_devices}"
        raise DataError(what, where=row.where, hint="ep divides dp and is no factor", got=inner * data_ranks, want=num_devices)
    zero, chunks = row.text("zero_or_fsdp"), row.count("vp", 1)
    stage = _STAGES.get(zero)
    if stage is None and zero not in _WHOLE_COPIES:
        raise DataError(f"zero_or_fsdp is {zero!r}", where=row.where, hint=f"one of {', '.join([*_STAGES, *_WHOLE_COPIES[1:]])}", got=zero)
    accumulated, batch = row.count("grad_accum", 1), row.count("gbs_seq", data_ranks)
    usual = 1 if axes["pp"] > 1 and not row.has("grad_accum") else max(1, batch // (data_ranks * accumulated))
    micro_batch_size = row.count("mbs", usual)
    recompute: Recompute = "full" if row.text("act_recompute") == "full" else "none"
    return Layout(
        **axes,
        dp_shard=data_ranks if stage else 1,
        dp_replicate=1 if stage else data_ranks,
        zero_stage=stage or 3,
        pp_schedule="interleaved" if chunks > 1 else "1f1b",
        pp_chunks=chunks,
        recompute=recompute,
        micro_batch_size=micro_batch_size,
    )


def _step_s(row: _Row, run: MeasuredRun) -> float:
    if row.has("tokens_per_s_per_gpu"):
        return run.workload.tokens_per_step / (row.number("tokens_per_s_per_gpu", 1.0) * run.layout.num_devices)
    flops_per_s = row.number("tflops_per_gpu", 1.0) * 1e12 if row.has("tflops_per_gpu") else _mfu(row) * run.hardware.peak_flops(run.dtype)
    return published_flops(run.workload) / (flops_per_s * run.layout.num_devices)


def _mfu(row: _Row) -> float:
    """A share. No run that is worth a row is below `LEAST_PER_CENT`: that is a share already."""
    told = row.number("mfu_pct", 1.0)
    if told <= LEAST_PER_CENT:
        raise DataError(f"mfu_pct is {told:g}", where=row.where, hint="in per cent: write 45 for 45%", got=told)
    return told / 100.0
