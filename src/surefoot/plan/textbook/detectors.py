"""Classic detectors of spikes and corruption, each run over a made series of its own: what the rule does, and what it cannot see.

The series are noise of one size around one level, since what is shown follows from the rule and not from the noise.
"""

from __future__ import annotations

import math
from collections import deque
from random import Random
from statistics import fmean, stdev

from surefoot.plan.textbook.row import Row

_WINDOW, _SIGMAS = 128, 6.0
_NOISE = 0.035
"""Nats: of the loss of public runs at half a million tokens a step."""


def rows() -> tuple[Row, ...]:
    return (_permanent_jump(), _one_nan(), _own_window(), _first_hundred(), _norm_of_two_ranks(), _biased_rank())


def rejected_steps(jump: float, *, seed: int = 0) -> int:
    """How many losses `mean + 6 sigma of the last 128`, outliers included, rejects after the loss rose by `jump` for good."""
    random = Random(seed)
    window = deque((random.gauss(0.0, _NOISE) for _ in range(_WINDOW)), maxlen=_WINDOW)
    num_rejected = 0
    for _ in range(_WINDOW):
        loss = jump + random.gauss(0.0, _NOISE)
        num_rejected += loss > fmean(window) + _SIGMAS * stdev(window)
        window.append(loss)
    return num_rejected


def blind_steps() -> int:
    """How many steps after one nan have no finite mean to be compared with: the nan must leave the window."""
    window = deque([0.0] * (_WINDOW - 1) + [math.nan], maxlen=_WINDOW)
    steps = 0
    while not math.isfinite(sum(window)):
        window.append(0.0)
        steps += 1
    return steps


def _permanent_jump() -> Row:
    small, large = rejected_steps(0.5), rejected_steps(1000.0)
    return Row(
        "skip-while-over-six-sigma",
        "Skip the update while the loss is over 6 sigma from its last 128, and a bad stretch does no harm",
        f"a loss that jumps by 0.5 nats for good is rejected {small} times, one that jumps by 1,000 is rejected {large} times; then it is "
        "what is normal",
        "wrong",
        "the outliers widen the sigma that they are held against: j of them in 128 by about the jump times sqrt(j / 128). They must be "
        "kept out of their own baseline, or cut, and what stays up needs a rule for levels",
        "the rule of OLMo-core and Levanter, run over made losses",
        {"small": small, "large": large},
    )


def _one_nan() -> Row:
    blind = blind_steps()
    return Row(
        "statistics-with-a-nan",
        "A step that is not finite is skipped, and training goes on under guard",
        f"where its loss enters the window, {blind} steps have no mean to be compared with: all pass unseen or all are skipped, as the "
        "comparison is written; running sums never recover",
        "wrong",
        "nan in a sum stays. What is not finite must enter no statistic; a public run trained 16,256 steps on nan behind such a guard",
        "OLMo-core pull request 424; llm.c's outlier detector and a log of it",
        {"blind": blind},
    )


def _own_window() -> Row:
    most = (_WINDOW - 1) / math.sqrt(_WINDOW)
    return Row(
        "z-score-with-itself",
        "A z-score over the last 128 values, the new one among them, tells how far out it is",
        f"it cannot exceed 127 / sqrt(128) = {most:.1f}, whether the loss rose by 1 or by 10,000",
        "imprecise",
        "the value is in the mean and in the sigma; with 5 values the same bound is 1.8, below the 2 that are asked for",
        "llm.c's outlier detector; arithmetic",
        {"most": most},
    )


def _first_hundred() -> Row:
    initial = math.log(50_257)
    return Row(
        "ten-times-the-first-hundred",
        "A spike is a loss of ten times the largest of the first 100 steps",
        f"the first loss of a model from scratch is ln(50,257) = {initial:.1f} nats, so the threshold is {10 * initial:.0f}: ten times "
        "what knowing nothing costs",
        "wrong",
        "no diverged run reaches it; the start of a run is no measure for the rest",
        "Megatron-LM's rerun state machine; a vocabulary of GPT-2",
        {"initial": initial, "threshold": 10 * initial},
    )


def _norm_of_two_ranks() -> Row:
    contributions = [1.0, 1.0, 1.0, 1e6]
    reduced = [math.fsum(contributions)] * len(contributions)
    difference = max(reduced) - min(reduced)
    local = max(contributions) / sorted(contributions)[len(contributions) // 2]
    return Row(
        "global-norm-on-two-ranks",
        "Compare the global gradient norm on two ranks: where they differ, one of them computes wrongly",
        f"a rank that contributes a million times too much leaves a difference of {difference:g}: all receive the same wrong sum. Its own "
        f"norm before the reduction is {local:.0e} times the others'",
        "wrong",
        "what is compared must not have been reduced: local norms, or the same micro-batch computed by two ranks. After the reduction only "
        "what arrives differently can differ",
        "arithmetic of an all-reduce",
        {"difference": difference, "local": local},
    )


def _biased_rank() -> Row:
    bias, num_ranks, noise = 1e-3, 8, 0.08
    shift = math.log1p(bias / num_ranks)
    steps = (1.0 / (shift / noise)) ** 2
    return Row(
        "loss-and-norm-tell-corruption",
        "Silent corruption shows in the loss and the gradient norm",
        f"a rank of {num_ranks} whose contribution is {bias:.1%} too large moves the norm by {shift:.1e}, {shift / noise:.4f} of its "
        f"noise: a mean over {steps:.0e} steps would be needed to see one sigma",
        "wrong",
        "only comparing bits tells it: replicated tensors across ranks, a neighbour's micro-batch computed again",
        "noise of the log norm of public runs, 0.06 to 0.11; arithmetic",
        {"shift": shift, "steps": steps},
    )
