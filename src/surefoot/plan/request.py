"""What is asked of a plan: devices, time or FLOPs, what the model is for, what is known of the cluster. Checked first of all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.core.errors import ConfigError
from surefoot.plan.hardware import Accelerator

GPU_USD_PER_HOUR, CORE_USD_PER_HOUR = 3.0, 0.05
"""What clouds ask for an H100 on a long contract, and for a core; --price replaces it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines and what they are known to do. None means: by a rule, and the plan says which.

    `failures_per_node_day` are unplanned interruptions; `stall_s` is how long a save blocks the loop, `restart_s` the time from a failure
    to the next step, `detection_s` how late the slowest detector convicts a checkpoint. `num_devices` can follow from FLOPs and days;
    the batch is made even on every number of data ranks from what `min_devices` hold up to them.
    """

    accelerator: Accelerator
    num_devices: int | None = None
    min_devices: int | None = None
    dtype: str = "bf16"
    price_per_hour: float | None = None
    failures_per_node_day: float | None = None
    stall_s: float | None = None
    restart_s: float = 900.0
    detection_s: float = 6 * 3600.0

    @property
    def usd_per_hour(self) -> float:
        """Of a device; an order of magnitude where it was not given."""
        if self.price_per_hour is not None:
            return self.price_per_hour
        return CORE_USD_PER_HOUR if self.accelerator.name == "cpu" else GPU_USD_PER_HOUR


@dataclass(frozen=True, slots=True)
class Aim:
    """What to train. `flops` are 6 N D, as laws count them; of `days`, `flops`, and `n` with `tokens`, one is enough.

    `served_tokens` over the model's whole life, `serving_cost` of a FLOP of serving in FLOPs of training.
    """

    days: float | None = None
    flops: float | None = None
    mfu: float | None = None
    n: float | None = None
    tokens: float | None = None
    served_tokens: float | None = None
    serving_cost: float = 1.0
    unique_tokens: float | None = None
    seq_len: int | None = None
    vocab_size: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    global_batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    cluster: Cluster
    aim: Aim
    layout: str = ""
    max_bubble: float = 0.15


def check_request(request: Request) -> None:
    """Raises ConfigError for the first number that no plan can be made of."""
    cluster, aim = request.cluster, request.aim
    above_zero = {
        "--gpus": cluster.num_devices,
        "--min-gpus": cluster.min_devices,
        "--days": aim.days,
        "--flops": aim.flops,
        "--mfu": aim.mfu,
        "--params": aim.n,
        "--tokens": aim.tokens,
        "--serve-tokens": aim.served_tokens,
        "--serve-cost": aim.serving_cost,
        "--unique-tokens": aim.unique_tokens,
        "--seq-len": aim.seq_len,
        "--vocab-size": aim.vocab_size,
        "--batch": aim.global_batch_size,
        "--failures-per-node-day": cluster.failures_per_node_day,
        "--stall-s": cluster.stall_s,
    }
    for option, value in above_zero.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{option} is {value:g}", where=option, hint="give a number above 0", got=value)
    for option, value in {
        "--price": cluster.usd_per_hour,
        "--restart-s": cluster.restart_s,
        "--detection-s": cluster.detection_s,
    }.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{option} is {value:g}", where=option, hint="give 0 or more", got=value)
    if aim.mfu is not None and aim.mfu > 1:
        hint = "MFU is a share of the dense peak, between 0 and 1: write 40% as 0.4"
        raise ConfigError(f"an MFU of {aim.mfu:.4g} is {aim.mfu:.0%} of the peak", where="--mfu", hint=hint, got=aim.mfu, limit=1.0)
    if not 0 < request.max_bubble < 1:
        hint = "an idle share of a step, between 0 and 1: write 15% as 0.15"
        raise ConfigError(f"--max-bubble is {request.max_bubble:g}", where="--max-bubble", hint=hint, got=request.max_bubble)
    _check_amount(cluster, aim)
    _check_experts(aim)


def _check_amount(cluster: Cluster, aim: Aim) -> None:
    ways = [aim.days is not None, aim.flops is not None, aim.n is not None and aim.tokens is not None]
    if not any(ways):
        hint = "give --days, or --flops, or both --params and --tokens"
        raise ConfigError("nothing says how much is trained", where="plan", hint=hint)
    if aim.flops is not None and aim.n is not None and aim.tokens is not None:
        hint = "leave one of them out"
        raise ConfigError("--flops, --params and --tokens say the same thing twice", where="plan", hint=hint)

    if cluster.num_devices and aim.days and aim.mfu and any(ways[1:]):
        hint = "leave one of --gpus, --days, --mfu and the FLOPs out: it follows from the others"
        raise ConfigError("the FLOPs are given, and devices, days and MFU give them too", where="plan", hint=hint)


def _check_experts(aim: Aim) -> None:
    if aim.experts_per_token and not aim.num_experts:
        raise ConfigError("--experts-per-token without --experts", where="--experts-per-token", hint="say how many experts a layer has")
    if aim.num_experts and not 1 <= aim.experts_per_token <= aim.num_experts:
        raise ConfigError(
            f"{aim.experts_per_token} of {aim.num_experts} experts for each token",
            where="--experts",
            hint="write --experts 64 --experts-per-token 8",
            got=aim.experts_per_token,
            limit=aim.num_experts,
        )
