"""From signals to the columns of a step's report that say how the model does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.core.records import RankSignals, Signals
from surefoot.monitor.windows import loss_figures

MOST_RANKS = 64
"""That every row has columns of by default: with as many groups a row has 8 kB then, of which half is there without them."""

_BY_PART = ("rank_losses", "rank_tokens", "rank_norms", "group_norms", "update_ratios")


def tells_parts(step: int, *, interval_steps: int, world_size: int, is_news: bool) -> bool:
    """Whether the row of this step has columns by rank and by group. `is_news`: it is no plain update, or something was found."""
    every = interval_steps or (1 if world_size <= MOST_RANKS else 10)
    return is_news or step % every == 0


def signal_columns(signals: Signals, *, losses: Sequence[float], times: Mapping[str, float], by_part: bool = True) -> dict[str, Any]:
    """The fields of StepReport that are signals. What was not measured is None, or empty, as those by rank and group are not `by_part`."""
    columns = {
        "lr_applied_ratio": None if math.isnan(signals.lr_applied_ratio) else signals.lr_applied_ratio,
        "num_nonfinite": signals.num_nonfinite,
        "loss_scale": None if math.isnan(signals.loss_scale) else signals.loss_scale,
        "memory_bytes": max(part.memory_bytes for part in signals.ranks) or None,
        "rank_losses": tuple(_loss_of(part) for part in signals.ranks),
        "rank_tokens": tuple(part.num_live_tokens for part in signals.ranks),
        "rank_norms": tuple(part.local_norm for part in signals.ranks),
        "group_norms": signals.group_norms,
        "update_ratios": signals.update_ratios,
        "probes": signals.probes,
        **loss_figures(losses),
        **{name: times.get(name) for name in ("forward_s", "backward_s", "reduce_s")},
    }
    return columns if by_part else {name: value for name, value in columns.items() if name not in _BY_PART}


def _loss_of(part: RankSignals) -> float:
    """Nats per live token; nan on a rank that counts none, as all but the last stage of a pipeline."""
    return part.loss_sum / part.num_live_tokens if part.num_live_tokens else math.nan
