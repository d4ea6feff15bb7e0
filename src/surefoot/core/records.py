"""The frozen records that flow between rooms.

RunConfig -> Plan -> TrainState -> Signals -> Verdict -> Action -> StepReport -> LedgerEntry. RunConfig is in `core.sections`. TrainState is
the only mutable one; it holds tensors, so it lives in `guard`. `step` means training steps finished, skipped updates included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Literal


class Phase(IntEnum):
    """What a rank says it is doing. Values travel in shared memory and in the gathered vector, so they never change meaning."""

    START = 0
    DATA = 1
    STEP = 2
    EVALUATE = 3
    SAVE = 4
    RESTORE = 5
    STOPPED = 6

    @property
    def label(self) -> str:
        return self.name.lower()


class Rung(StrEnum):
    """How far a checkpoint is trusted."""

    WRITTEN = "written"
    COMMITTED = "committed"
    LOADABLE = "loadable"
    PROVEN = "proven"


@dataclass(frozen=True, slots=True)
class RankSignals:
    """One rank's own part of the gathered vector. Times are of the current step up to the exchange; `cpu_s` is the process's so far.
    `waited_s` is the part of `forward_backward_s` that only waited for other ranks, as far as it is known.

    `local_norm` is of the gradient that this rank contributes, before any reduction, summed over its live tokens; nan where the loop does
    not measure it.
    """

    rank: int
    loss_sum: float
    num_live_tokens: int
    data_wait_s: float
    forward_backward_s: float
    step_clock_s: float
    cpu_s: float
    local_norm: float = math.nan
    memory_bytes: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known before the update, identical on all ranks. This is what gets judged.

    `save_point` numbers the oldest save whose outcome is not agreed on yet, 0 when there is none; `save_outcome` is "committed", "failed",
    or empty while it is on its way. `lr` is what the loop says it will update with; `lr_applied_ratio` what the optimizer had at the
    update before over what the loop had said then. `group_norms` (before clipping) and `update_ratios` (rms of the update over rms of the
    weights, of the step before) are per group of parameters; `probes` are there at the cadence of `monitor.probe_interval_steps` alone.
    `loss_scale` is what the loss was multiplied by before the backward, nan where it was not.
    """

    step: int
    attempt: int
    generation: int
    loss: float
    num_live_tokens: int
    grad_norm: float
    num_nonfinite: int
    leave_requested: bool
    save_requested: bool
    save_clock_s: float
    save_stall_s: float
    save_slot_free: bool
    block_requested: bool
    ranks: tuple[RankSignals, ...]
    save_point: int = 0
    save_outcome: Literal["", "committed", "failed"] = ""
    lr: float = math.nan
    lr_applied_ratio: float = math.nan
    group_norms: Mapping[str, float] = field(default_factory=dict)
    update_ratios: Mapping[str, float] = field(default_factory=dict)
    probes: Mapping[str, float] = field(default_factory=dict)
    order_requested: bool = False
    loss_scale: float = math.nan
    loss_scale_at_minimum: bool = False

    @property
    def overflowed(self) -> bool:
        """Whether the loss scale was too large for fp16: the gradient is not finite, and the loss that it is of is."""
        is_finite = self.num_nonfinite == 0 and math.isfinite(self.grad_norm)
        return not math.isnan(self.loss_scale) and math.isfinite(self.loss) and not is_finite


@dataclass(frozen=True, slots=True)
class GradientBound:
    """What all ranks agreed on about the gradients of this step, where sums are exact: the largest absolute element (inf when one is not
    finite), the number of elements of the whole model, and of tensors with a non-finite one."""

    largest: float
    num_elements: int
    num_nonfinite: int


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    BAD = "bad"


class Asks(StrEnum):
    """What a finding asks for, mildest first. Whether it gets that is for the policy to say."""

    RECORD = "record"
    ALERT = "alert"
    SKIP = "skip"
    ROLL_BACK = "rollback"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one detector says about one step. `onset_step` is the first step that it holds against the run: at most the present one.

    `evidence` is JSON. A rule that names ranks has them under "ranks".
    """

    rule: str
    asks: Asks
    reason: str
    onset_step: int
    evidence: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`findings` are all that were made, the gravest first; `rule`, `reason` and `evidence` are those of the first."""

    health: Health
    rule: str = ""
    reason: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


# --- Actions: what all ranks do at the same step. Alerts ride on any of them. ---


@dataclass(frozen=True, slots=True)
class Proceed:
    """Clip by `clip_scale` (it divides by the live-token count too) and update."""

    clip_scale: float
    proceeds = True


@dataclass(frozen=True, slots=True)
class SkipUpdate:
    """No tensor, buffer or average changes by one bit; the step counts and the learning-rate schedule moves on."""

    rule: str
    reason: str
    proceeds = False


@dataclass(frozen=True, slots=True)
class Redo:
    """The same batch with the same keys once more, before any update. Never returned to a foreign loop.

    `grid_overflow`: gradients did not suit their exact grid. `recheck`: the step looks ill; `rotation` says by how many ranks its atoms
    move on for this repetition.
    """

    reason: str
    rule: str = "grid_overflow"
    rotation: int = 0
    proceeds = False


@dataclass(frozen=True, slots=True)
class RollBack:
    """To the newest clean checkpoint of at most `to_step`; `onset_step` is the first step that is held against the run.

    `skip_steps` are left out from the onset on.
    """

    to_step: int
    mode: Literal["diagnose", "skip"]
    rule: str
    reason: str
    onset_step: int
    skip_steps: int = 0
    proceeds = False


@dataclass(frozen=True, slots=True)
class Pause:
    """What was saved since `onset_step`, where one is known, is suspect."""

    rule: str
    reason: str
    onset_step: int | None = None
    proceeds = False


@dataclass(frozen=True, slots=True)
class Halt:
    rule: str
    reason: str
    proceeds = False


@dataclass(frozen=True, slots=True)
class Isolate:
    node: str
    rule: str
    reason: str
    proceeds = False


@dataclass(frozen=True, slots=True)
class Leave:
    """The loop ends here. Falsy, so that `while guard.begin():` reads as it should; `exit_code` is what the process ends with."""

    exit_code: int
    reason: str
    proceeds = False

    def __bool__(self) -> bool:
        return False


Action = Proceed | SkipUpdate | Redo | RollBack | Pause | Halt | Isolate | Leave


@dataclass(frozen=True, slots=True)
class Go:
    """The loop goes on with the step after `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `restore` found. `checkpoint` is None on a fresh start. `attempt` grew by one if this is a resume."""

    step: int
    attempt: int
    generation: int
    checkpoint: str | None
    state_digest: str | None
    message: str


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Loss in nats per token over the held-out samples, in all and per source; bits per byte of the text they decode to."""

    loss: float
    bits_per_byte: float
    num_tokens: int
    per_source: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The n-th training step, finished: what was known before its update and what is known only after it.

    None, or empty, is what was not measured. `lr_applied_ratio` and `update_ratios` are of the step before; times are rank 0's, of which
    `forward_s`, `backward_s` and `reduce_s` (reductions that nothing hid) are parts of `forward_backward_s`. `memory_bytes` is of the
    fullest rank, `mfu` a share of the peak, `loss_mean_128` and so on of the newest losses. `rank_losses` are per token of each rank.
    `val_losses` are those that `val_loss` is made of, by source.
    """

    step: int
    attempt: int
    generation: int
    loss: float
    num_live_tokens: int
    tokens: int
    grad_norm: float
    clip_scale: float
    lr: float
    action: str
    next_sample: int
    step_s: float
    data_wait_s: float
    forward_backward_s: float
    exchange_s: float
    update_s: float
    save_s: float
    evaluate_s: float
    tokens_per_s: float
    cpu_s: float
    val_loss: float | None = None
    bits_per_byte: float | None = None
    saved: str | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    reduce_s: float | None = None
    device_tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    num_nonfinite: int = 0
    loss_scale: float | None = None
    lr_applied_ratio: float | None = None
    loss_mean_128: float | None = None
    loss_std_128: float | None = None
    loss_p10_128: float | None = None
    loss_p50_128: float | None = None
    loss_p90_128: float | None = None
    loss_mean_500: float | None = None
    loss_std_500: float | None = None
    loss_p10_500: float | None = None
    loss_p50_500: float | None = None
    loss_p90_500: float | None = None
    rank_losses: tuple[float, ...] = ()
    rank_tokens: tuple[int, ...] = ()
    rank_norms: tuple[float, ...] = ()
    group_norms: Mapping[str, float] = field(default_factory=dict)
    update_ratios: Mapping[str, float] = field(default_factory=dict)
    probes: Mapping[str, float] = field(default_factory=dict)
    canary_loss: float | None = None
    val_losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Seen, decided, done, when, by whom, by which rule. Never rewritten. `prev` and `hash` chain it to the line before."""

    seq: int
    time_utc: str
    generation: int
    attempt: int
    step: int
    event: str
    by: str
    rule: str
    reason: str
    fields: Mapping[str, object]
    prev: str
    hash: str


# --- Checkpoints ---


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint by id (`s<step>-a<attempt>[-r<retry>]`) and where it stands on the lineage.

    `read_back`: all its bytes were read from storage after the commit and are those that were written. `damaged`: the last look at it found
    that they are not. A look that finds it well again takes `damaged` back.
    """

    id: str
    step: int
    attempt: int
    parent: str | None
    state_digest: str
    num_bytes: int
    rung: Rung = Rung.COMMITTED
    suspect: bool = False
    abandoned: bool = False
    read_back: bool = False
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of a checkpoint. `rank` and `host` say who wrote it: -1 and "" for what is written once per job, and in format 1."""

    name: str
    num_bytes: int
    xxh3_128: str
    rank: int = -1
    host: str = ""


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor of the state: global shape, torch dtype name, and its sharding-free digest as 16 hex digits."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit record of a checkpoint: written last, hashed over itself, enough to verify a bare copy."""

    format_version: int
    id: str
    run: str
    step: int
    attempt: int
    generation: int
    parent: str | None
    time_utc: str
    loss: float | None
    tokens: int
    state_digest: str
    config_hashes: Mapping[str, str]
    data_hash: str
    code_version: str
    topology: Mapping[str, int]
    environment: Mapping[str, object]
    ledger_seq: int
    ledger_hash: str
    cursor: Mapping[str, object]
    files: tuple[ManifestFile, ...]
    tensors: tuple[ManifestTensor, ...]
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that verification found. `kind` is one of: missing-file, extra-file, wrong-size, wrong-checksum, bad-manifest,
    missing-tensor, extra-tensor, wrong-dtype, wrong-shape, hole, wrong-digest, wrong-loss, unreadable."""

    kind: str
    file: str = ""
    tensor: str = ""
    detail: str = ""


# --- Faults and membership (coordinate) ---


class Grade(StrEnum):
    PROCESS = "process"
    NODE = "node"
    LARGE_SCALE = "large-scale"
    DETERMINISTIC = "deterministic"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Fault:
    """A process that ended, seen from outside: `exit_code` if it left by itself, `signal` if it was killed, neither if we ended it.

    `reason` says it in words, as whoever saw it knows it: "rank 1 was killed by SIGKILL". `fingerprint` is what a repetition is known by,
    empty where one would say nothing; `step_known` is False where no rank told how far it was. `nodes` are those that went away, of
    `num_nodes`. `committed_step` is that of the newest checkpoint on the line, -1 for none; `utc_s` the time that windows are counted in.
    """

    what: Literal["rank", "nursery", "init-deadline", "node"]
    reason: str
    rank: int | None
    exit_code: int | None
    signal: int | None
    step: int
    detected_mono_s: float
    cause: str = ""
    fingerprint: str = ""
    step_known: bool = True
    nodes: tuple[str, ...] = ()
    num_nodes: int = 1
    committed_step: int = -1
    utc_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    kind: Literal["joined", "left", "lapsed"]
    node: str
    mono_s: float


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the supervisor does next, with the reason. `wait_s` before a restart; `exit_code` for a stop."""

    kind: Literal["restart", "stop"]
    reason: str
    grade: Grade
    exit_code: int = 0
    wait_s: float = 0.0
