"""Warm-up and decay that a plan proposes, each number with its reason. Pure. Fields are those of `[schedule]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from surefoot.core.errors import ConfigError
from surefoot.plan.records import Reason

MAX_WARMUP_SHARE = 0.05
LONG_RUN_STEPS = 100_000

_COOLDOWNS = "Hägele et al., arXiv 2405.18392"


@dataclass(frozen=True, slots=True)
class Schedule:
    kind: Literal["wsd", "cosine"]
    warmup_steps: int
    decay_steps: int
    final_ratio: float
    decay_shape: Literal["linear", "1-sqrt"] = "1-sqrt"
    reasons: dict[str, Reason] = field(default_factory=dict)


def propose_schedule(
    num_steps: int, *, n: float, tokens_per_step: float, beta2: float = 0.95, kind: Literal["wsd", "cosine"] = "wsd"
) -> Schedule:
    """For a run of `num_steps`. `n` in parameters."""
    if num_steps < 1:
        raise ConfigError(f"{num_steps} steps", where="train.num_steps", hint="a run has at least one", got=num_steps)
    warmup, why_warmup = _warmup(num_steps, n=n, tokens_per_step=tokens_per_step, beta2=beta2)
    if kind == "cosine":
        why = Reason(
            "one period over the whole run: it can be neither cut short nor prolonged", "Hoffmann et al., arXiv 2203.15556, figure A1"
        )
        floor = Reason("a tenth of the peak", "Hoffmann et al., arXiv 2203.15556, appendix B")
        return Schedule("cosine", warmup, 0, 0.1, reasons={"warmup_steps": why_warmup, "kind": why, "final_ratio": floor})
    share, enough = (0.1, "a tenth is enough for a long run") if num_steps >= LONG_RUN_STEPS else (0.2, "a fifth is as good as cosine")
    reasons = {
        "warmup_steps": why_warmup,
        "kind": Reason("the stable phase can be prolonged and branched, and no length is decided in advance", _COOLDOWNS),
        "decay_steps": Reason(f"{enough}", _COOLDOWNS),
        "decay_shape": Reason("a little better than linear", _COOLDOWNS),
        "final_ratio": Reason("down to nothing", _COOLDOWNS),
    }
    decay = min(num_steps - warmup, max(1, round(share * num_steps))) if num_steps > warmup else 0
    return Schedule("wsd", warmup, decay, 0.0, reasons=reasons)


def _warmup(num_steps: int, *, n: float, tokens_per_step: float, beta2: float) -> tuple[int, Reason]:
    """As many tokens as parameters; at most a twentieth of the run; at least two memories of Adam's second moment."""
    by_size = math.ceil(n / tokens_per_step)
    least = math.ceil(2.0 / (1.0 - beta2)) if beta2 < 1.0 else 0
    most = math.ceil(MAX_WARMUP_SHARE * num_steps)
    if by_size >= most:
        steps, reason = (
            most,
            Reason("a twentieth of the run; as many tokens as parameters would be more", "Porian et al., arXiv 2406.19146"),
        )
    else:
        steps, reason = by_size, Reason("as many tokens as parameters: longer ones bias small models", "Porian et al., arXiv 2406.19146")
    if steps < least <= num_steps // 2:
        return least, Reason("2 / (1 - beta2): the second moment must have settled", "Ma and Yarats, arXiv 1910.04209")
    return steps, reason
