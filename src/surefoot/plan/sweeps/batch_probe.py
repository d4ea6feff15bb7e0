"""The critical batch by branched runs: from one checkpoint the same tokens again under larger batches. Pure.

Merrill et al. (arXiv 2505.23971): branch, multiply the batch by k and Adam's rate by its root, and see up to which k the loss at equal
tokens stays where it was. It asks the run itself, so it needs neither a law nor the gradient noise scale, and it is done again later in the
run, for the answer grows with the tokens seen (arXiv 2410.21676).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.core.errors import ConfigError, DataError

TOLERANCE = 0.01
"""Nats per token. Below what a parabola of a sweep resolves, above what another order of the data changes after some hundred steps."""

FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Probe:
    """One branch: `factor` times the run's batch for `num_steps` steps, at `lr`."""

    factor: int
    batch: int
    num_steps: int
    lr: float


@dataclass(frozen=True, slots=True)
class ProbedLoss:
    batch_tokens: float
    loss: float


@dataclass(frozen=True, slots=True)
class CriticalBatch:
    """Between `within_tokens`, the largest batch that cost nothing, and `beyond_tokens`, the next one tried; None where none was beyond."""

    within_tokens: float
    beyond_tokens: float | None
    tolerance: float
    excess: tuple[tuple[float, float], ...]
    """(batch in tokens, loss above that of the smallest batch), the smallest batch first."""


def probes(*, batch: int, lr: float, seq_len: int, tokens: float, factors: Sequence[int] = FACTORS) -> tuple[Probe, ...]:
    """All branches train the same number of tokens: so many as fill whole steps of the largest batch, at least one."""
    wanted = sorted(set(factors))
    if len(wanted) < 2 or wanted[0] != 1:
        raise ConfigError(f"factors {list(factors)}", where="--factors", hint="1 and at least one more: 1,2,4,8")
    largest = batch * math.lcm(*wanted)
    num_largest = max(1, round(tokens / (largest * seq_len)))
    return tuple(Probe(k, batch * k, num_largest * largest // (batch * k), lr * math.sqrt(k)) for k in wanted)


def judge(losses: Sequence[ProbedLoss], *, tolerance: float = TOLERANCE) -> CriticalBatch:
    """The first batch beyond the tolerance ends it: one within again is chance. Raises DataError with nothing to compare."""
    ordered = sorted(losses, key=lambda one: one.batch_tokens)
    if len(ordered) < 2:
        raise DataError(f"{len(ordered)} finished branches", where="batch probe", hint="train the others: surefoot sweep run DIR")
    excess = tuple((one.batch_tokens, one.loss - ordered[0].loss) for one in ordered)
    beyond = next((place for place, (_, above) in enumerate(excess) if above > tolerance), None)
    within = excess[-1 if beyond is None else beyond - 1][0]
    return CriticalBatch(within, None if beyond is None else excess[beyond][0], tolerance, excess)
