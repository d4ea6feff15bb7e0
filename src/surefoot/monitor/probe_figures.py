"""The probes by name, and how the values that ranks send make them. Pure, without torch.

A name is `what:where`. Values that are added over ranks, or of which the largest counts, have names of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

ACTIVATION_SUMS = ("act_n", "act_square", "act_fourth", "act_subnormal", "act_zero", "act_large", "act_nonfinite")
GRADIENT_SUMS = ("grad_n", "grad_subnormal", "grad_zero", "grad_large")
MOMENT_SUMS = ("moment1_square", "moment2_square")
LOG_Z_SUMS = ("log_z_n:head", "log_z_sum:head")

PLACELESS = ("log_z",)
PROBE_KINDS = (
    *("act_rms", "act_max", "act_kurtosis", "act_nonfinite", "act_subnormal", "act_zero", "act_large"),
    *(*GRADIENT_SUMS[1:], "attn_logit_max", "moment1", "moment2", *PLACELESS),
)
"""What stands before the first colon of a probe's name."""

MAX_HEAD_GROUPS = 8
"""Key heads of a block that are told apart, each with the query heads that share it; more are joined with their neighbours."""


def head_group_names(block: str, num_key_heads: int) -> list[str]:
    return [f"attn_logit_max:{block}.heads.{index}" for index in range(min(num_key_heads, MAX_HEAD_GROUPS))]


def head_group(head: int, num_key_heads: int) -> int:
    return head * min(num_key_heads, MAX_HEAD_GROUPS) // num_key_heads


def probe_figures(values: Mapping[str, float]) -> dict[str, float]:
    """From folded values to probes; one that nothing was measured for is left out."""
    figures: dict[str, float] = {}
    for name, num in values.items():
        what, _, where = name.partition(":")
        if what == "act_n" and num:
            figures |= _activations(values, where, num)
        elif what == "grad_n" and num:
            for kind in GRADIENT_SUMS[1:]:
                figures[f"{kind}:{where}"] = values[f"{kind}:{where}"] / num
        elif what in MOMENT_SUMS and num:
            figures[f"{what.removesuffix('_square')}:{where}"] = math.sqrt(num) if num >= 0 else math.nan
        elif name == "log_z_n:head" and num:
            figures["log_z"] = values["log_z_sum:head"] / num
        elif what in ("act_max", "attn_logit_max") and num != -math.inf:
            figures[name] = num
    for name, largest in list(figures.items()):
        if name.startswith("attn_logit_max:"):
            block = name.partition(".heads.")[0]
            figures[block] = _larger(figures.get(block, -math.inf), largest)
    return figures


def _activations(values: Mapping[str, float], where: str, num: float) -> dict[str, float]:
    """Kurtosis is the mean fourth power over the squared mean square: 3 for a normal distribution around 0."""
    mean_square = values[f"act_square:{where}"] / num
    shares = {f"{kind}:{where}": values[f"{kind}:{where}"] / num for kind in ("act_subnormal", "act_zero", "act_large")}
    return {
        f"act_rms:{where}": math.sqrt(mean_square) if mean_square >= 0 else math.nan,
        f"act_kurtosis:{where}": values[f"act_fourth:{where}"] / num / mean_square**2 if mean_square else math.nan,
        f"act_nonfinite:{where}": values[f"act_nonfinite:{where}"],
        **shares,
    }


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
