"""FLOPs from devices and days, and back: peak x devices x seconds x MFU x goodput. What tokens cost exactly, beside 6 N D. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from surefoot.core.errors import ConfigError, PlanInfeasible
from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.failures.interval import SECONDS_PER_DAY
from surefoot.plan.hardware import Accelerator
from surefoot.plan.records import Reason

USUAL_MFU = 0.40
"""Where nobody has measured. Dense models on hundreds of H100: 0.36 to 0.46 in the tables of llm-foundry, 0.41 to 0.49 in Megatron-LM's."""


@dataclass(frozen=True, slots=True)
class Budget:
    """`flops` is what training gets: model FLOPs, so MFU counts neither recomputation nor what is lost to failures (`goodput`)."""

    accelerator: Accelerator
    dtype: str
    flops: float
    num_devices: int
    days: float
    mfu: float
    goodput: float
    reasons: dict[str, Reason] = field(default_factory=dict)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one device, dense."""
        return self.accelerator.peak_flops(self.dtype)

    @property
    def seconds(self) -> float:
        return self.days * SECONDS_PER_DAY

    @property
    def device_hours(self) -> float:
        return self.num_devices * self.days * 24.0

    def cost(self, price_per_device_hour: float) -> float:
        return self.device_hours * price_per_device_hour


def budget(
    accelerator: Accelerator,
    *,
    num_devices: int | None = None,
    days: float | None = None,
    flops: float | None = None,
    mfu: float | None = None,
    goodput: float = 1.0,
    dtype: str = "bf16",
) -> Budget:
    """Solves for what is not given, of devices, days and FLOPs; with all three, for the MFU. Without an MFU the usual one is assumed.

    Raises ConfigError for what is no number of its kind or leaves more than one unknown, PlanInfeasible where more than the peak is asked.
    """
    _check(num_devices=num_devices, days=days, flops=flops, mfu=mfu, goodput=goodput)
    peak = accelerator.peak_flops(dtype)
    reasons = {"budget.peak_flops": Reason(f"dense {dtype} of one {accelerator.name}", accelerator.source)}
    if num_devices and days and flops:
        mfu = _implied_mfu(accelerator, peak, mfu or 1.0, num_devices=num_devices, days=days, flops=flops, goodput=goodput)
        reasons["budget.mfu"] = Reason(f"what {flops:.3g} FLOPs in {days:g} days on {num_devices} devices take", "arithmetic")
    elif mfu is None:
        mfu = USUAL_MFU
        why = "assumed: nothing was measured; probe the layout for ten minutes and give --mfu"
        reasons["budget.mfu"] = Reason(why, "benchmark tables of llm-foundry and Megatron-LM (H100, bf16): 0.36 to 0.49")
    else:
        reasons["budget.mfu"] = Reason("given", "--mfu")
    useful = peak * mfu * goodput * SECONDS_PER_DAY
    formula = f"{peak:.4g} FLOP/s x devices x seconds x MFU {mfu:.3g} x goodput {goodput:.3g}"
    if flops is None and num_devices and days:
        flops = num_devices * days * useful
        reasons["budget.flops"] = Reason(formula, "arithmetic")
    elif days is None and num_devices and flops:
        days = flops / (num_devices * useful)
        reasons["budget.days"] = Reason(f"FLOPs over {formula}", "arithmetic")
    elif num_devices is None and days and flops:
        num_devices = max(1, math.ceil(flops / (days * useful) * (1.0 - 1e-12)))
        reasons["budget.num_devices"] = Reason(f"FLOPs over {formula}, rounded up", "arithmetic")
    if not (num_devices and days and flops):
        hint = "give two of --gpus, --days and --flops"
        raise ConfigError("more than one of devices, days and FLOPs is not given", where="plan", hint=hint)
    return Budget(accelerator, dtype, flops, num_devices, days, mfu, goodput, reasons)


def _implied_mfu(
    accelerator: Accelerator, peak: float, reachable: float, *, num_devices: int, days: float, flops: float, goodput: float
) -> float:
    """What all three together ask of the devices; at most `reachable`."""
    mfu = flops / (peak * num_devices * days * SECONDS_PER_DAY * goodput)
    if mfu <= reachable * (1.0 + 1e-9):
        return mfu
    likely = min(reachable, USUAL_MFU)
    short = mfu / likely
    beyond = "their dense peak" if reachable == 1.0 else f"what an MFU of {reachable:.0%} gives, for it takes {mfu:.0%} of their dense peak"
    raise PlanInfeasible(
        f"{flops:.4g} FLOPs in {days:g} days on {num_devices} {accelerator.name} ask for {mfu / reachable:.0%} of {beyond}",
        where="budget",
        hint=f"at an MFU of {likely:.0%} that takes {math.ceil(num_devices * short)} devices, or {days * short:.3g} days, "
        f"or a budget of {flops / short:.3g} FLOPs",
        got=mfu,
        limit=reachable,
    )


def _check(**told: float | None) -> None:
    options = {"num_devices": "--gpus", "days": "--days", "flops": "--flops", "mfu": "--mfu", "goodput": "--goodput"}
    for name, value in told.items():
        if value is None:
            continue
        if not 0 < value < math.inf:
            raise ConfigError(f"{options[name]} is {value:g}", where=options[name], hint="give a number above 0", got=value)
        if name in ("mfu", "goodput") and value > 1.0:
            hint = "a share of the dense peak or of the time is at most 1: write 40% as 0.4; sparse peaks are twice the dense ones"
            raise ConfigError(f"{options[name]} is {value:g}, above 100%", where=options[name], hint=hint, got=value, limit=1.0)


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """FLOPs of training a model. `exact` has causal attention, window, head and active experts; `six_nd` is 6 x active parameters x
    tokens, embedding included, as laws count it. `attention` and `head` are parts of `exact`."""

    exact: float
    six_nd: float
    attention: float
    head: float

    @property
    def ratio(self) -> float:
        return self.exact / self.six_nd


def training_cost(sizes: ModelSizes, *, tokens: float, seq_len: int) -> TrainingCost:
    """Of `tokens` in sequences of `seq_len`."""
    exact = sizes.flops_per_token(seq_len) * tokens
    head = 6.0 * sizes.num_embedding_parameters * tokens
    matrices = sizes.num_active_parameters - sizes.num_embedding_parameters - sizes.num_head_parameters
    norms = sizes.num_layers * (2 * sizes.d_model + (2 * sizes.head_dim if sizes.qk_norm else 0)) + sizes.d_model
    attention = exact - head - 6.0 * (matrices - norms) * tokens
    return TrainingCost(exact, 6.0 * sizes.num_active_parameters * tokens, attention, head)


def tokens_for(sizes: ModelSizes, *, flops: float, seq_len: int) -> float:
    """How many tokens `flops` really train, counted exactly."""
    return flops / sizes.flops_per_token(seq_len)
