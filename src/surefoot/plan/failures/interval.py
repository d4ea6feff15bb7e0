"""How often to save: Young's and Daly's formulas, on what a save costs here and how often this run was interrupted. Pure.

Only the time that a save *blocks* the loop is lost by saving; what is written in the background is not. But a save must be over before the
next one begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SECONDS_PER_DAY = 86_400.0


def young_s(stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 w M). J. Young, CACM 17(9), 1974."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """The higher-order estimate of J. Daly, FGCS 22(3), 2006; M itself where a save costs two failures' time or more."""
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    share = stall_s / (2.0 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - stall_s


def availability_s(stall_s: float, mtbf_s: float, *, restart_s: float) -> float:
    """From one save's begin to the next where the share of useful time is greatest, each failure costing `restart_s` and half of it.

    w + sqrt(w^2 + 2 w (M + R)). Saxena et al., arXiv 2410.18124. The work between two saves is w less: where R << M it is Young's.
    """
    return stall_s + math.sqrt(stall_s * stall_s + 2.0 * stall_s * (mtbf_s + restart_s))


def mtbf_s(failures_per_node_day: float, *, num_nodes: float) -> float:
    """Mean time between failures of a job that any of its nodes interrupts; half a node fails half as often."""
    return SECONDS_PER_DAY / (failures_per_node_day * num_nodes)


def kept_share(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float, lost_s: float | None = None) -> float:
    """Expected productive share of the time: Meta's first-order ETTR (arXiv 2410.21680). `lost_s` of work, by default half an interval, is
    lost with each failure."""
    lost = (restart_s + (interval_s / 2.0 if lost_s is None else lost_s)) / mtbf_s
    return max(0.0, 1.0 - lost) / (1.0 + stall_s / interval_s)


def exact_share(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """The same without first order: failures are a Poisson process on wall time, each costs its whole restart, one after the other.

    The job runs for 1 - R/M of the time (a queue that is served in R). While it runs, an interval with its save is finished with
    probability exp(-(tau + w)/M), so a failure finds tau / (exp((tau + w)/M) - 1) of work behind it that stays.
    """
    running = max(0.0, 1.0 - restart_s / mtbf_s)
    return running * interval_s / mtbf_s / math.expm1((interval_s + stall_s) / mtbf_s)


@dataclass(frozen=True, slots=True)
class Measurements:
    """`stall_s`: a save blocks the loop this long. `write_s`: from its begin to its commit. `observed_s` of training saw `num_failures`."""

    step_s: float
    stall_s: float
    write_s: float
    num_failures: int
    observed_s: float


@dataclass(frozen=True, slots=True)
class Interval:
    """What was chosen and why; `mtbf_s` is the estimate behind it."""

    num_steps: int
    seconds: float
    mtbf_s: float
    reason: str


def estimated_mtbf_s(num_failures: int, observed_s: float, *, prior_s: float) -> float:
    """Posterior mean with a prior of one failure in `prior_s`: without failures it grows slowly, with many the prior does not matter."""
    return (observed_s + prior_s) / (num_failures + 1)


def choose_interval(measured: Measurements, *, prior_mtbf_s: float, max_s: float) -> Interval:
    """Steps between saves. Not sooner than the last save took to be written, not later than `max_s`."""
    mean_s = estimated_mtbf_s(measured.num_failures, measured.observed_s, prior_s=prior_mtbf_s)
    best_s = daly_s(measured.stall_s, mean_s)
    if measured.write_s > min(best_s, max_s):
        seconds, reason = measured.write_s, f"a save takes {measured.write_s:.3g} s to be written, and the next must not begin before"
    elif best_s > max_s:
        seconds, reason = max_s, f"no more than {max_s:g} s of work are at stake"
    else:
        seconds, reason = best_s, f"a save blocks {measured.stall_s:.3g} s, and a failure is expected every {mean_s:.3g} s"
    num_steps = max(1, math.ceil(seconds / measured.step_s)) if measured.step_s > 0 else 1
    return Interval(num_steps, seconds, mean_s, reason)


def differs_enough(new: int, old: int) -> bool:
    """Whether a new interval is worth saying: by more than a tenth. The optimum is flat, and a measured time is never twice the same."""
    return abs(new - old) > 0.1 * old
