"""How a model is trained: batch, ramp, learning rate, schedule, each from published laws and made legal for the layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from surefoot.core.model_sizes import ModelSizes
from surefoot.plan.records import Reason
from surefoot.plan.surface_record import Surface
from surefoot.plan.tuning.batch import (
    RAMP_REASON,
    REACH,
    LegalBatch,
    Ramp,
    above_critical,
    batch_ramp,
    critical_in_run,
    legal_batches,
    num_steps,
)
from surefoot.plan.tuning.laws import Run, SideBySide, batches, learning_rates, lr_for_batch
from surefoot.plan.tuning.schedules import Schedule, propose_schedule

MUCH_OVER_CRITICAL = 2.0
"""At the critical batch twice the tokens of a small one are spent for half the steps (arXiv 1812.06162); laws of it are as far apart."""


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """`lr` is the peak. `over_critical`: how many times the batch exceeds the critical one at the end; 1 or less is well."""

    batch: LegalBatch
    ramp: Ramp
    num_steps: int
    lr: float
    schedule: Schedule
    batch_laws: SideBySide
    lr_laws: SideBySide
    over_critical: float
    doubts: tuple[str, ...]
    reasons: dict[str, Reason]

    @property
    def warnings(self) -> tuple[str, ...]:
        told = list(self.doubts)
        if self.batch.worst_waste > 0:
            told.append(self.batch.why)
        if not self.doubts and self.over_critical > MUCH_OVER_CRITICAL:
            told.append(
                f"the batch is {self.over_critical:.2g} times the critical one of Kaplan's law at the end of the run: tokens are wasted"
            )
        return tuple(told)


def wished_batch(sizes: ModelSizes, *, tokens: float, loss: float, seq_len: int, num_devices: int) -> int:
    """In sequences, before any layout is known: near what the laws say, and a multiple or a divisor of the devices, so that most layouts
    share it evenly."""
    near = max(1, round(batches(_run(sizes, tokens, loss)).chosen.value / seq_len))
    multiple = max(1, round(near / num_devices)) * num_devices
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0] if near < num_devices else []
    even = min((multiple, *divisors), key=lambda size: abs(math.log(size / near)))
    return even if abs(even / near - 1.0) <= REACH else near


def choose_training(
    sizes: ModelSizes,
    *,
    tokens: float,
    loss: float,
    seq_len: int,
    surface: Surface,
    data_ranks: Iterable[int],
    micro_batch_size: int,
    wished: int,
    least_micro_batches: int = 1,
    given_batch: int | None = None,
) -> TrainingChoice:
    """For a layout of so many data ranks, or of each of several that the run may come to have.

    `least_micro_batches`: of a data rank and step, so that a pipeline is not idle for most of a smaller batch of the ramp.
    """
    run = _run(sizes, tokens, loss)
    ranks = tuple(data_ranks)
    laws = batches(run)
    near = given_batch or wished
    legal = legal_batches(near, data_ranks=ranks, micro_batch_size=micro_batch_size, given=given_batch is not None)
    num_samples = max(1, round(tokens / seq_len))
    critical = critical_in_run(surface, float(sizes.num_active_parameters))
    doubts = _doubts(loss, sizes.vocab_size)
    ramp = (
        ()
        if doubts
        else batch_ramp(
            legal.batch,
            seq_len=seq_len,
            num_samples=num_samples,
            critical=critical,
            data_ranks=tuple(count * least_micro_batches for count in ranks),
            micro_batch_size=micro_batch_size,
        )
    )
    steps = num_steps(num_samples, global_batch=legal.batch, ramp=ramp)
    rates = learning_rates(run)
    lr = lr_for_batch(rates.chosen.value, batch=laws.chosen.value, to_batch=legal.batch * seq_len)
    schedule = propose_schedule(steps, n=run.n, tokens_per_step=legal.batch * seq_len)
    return TrainingChoice(
        batch=legal,
        ramp=ramp,
        num_steps=steps,
        lr=float(f"{lr:.3g}"),
        schedule=schedule,
        batch_laws=laws,
        lr_laws=rates,
        over_critical=above_critical(legal.batch, seq_len=seq_len, num_samples=num_samples, critical=critical),
        doubts=doubts,
        reasons=_reasons(legal, laws, rates, schedule, given_batch),
    )


def is_a_loss(loss: float, *, vocab_size: int) -> bool:
    """Guessing costs ln V: a surface that says more has been left far behind."""
    return loss < math.log(vocab_size)


def _run(sizes: ModelSizes, tokens: float, loss: float) -> Run:
    """The tuning laws count neither embedding nor head."""
    known = loss if is_a_loss(loss, vocab_size=sizes.vocab_size) else None
    return Run(n=float(sizes.num_active_parameters - sizes.num_embedding_parameters - sizes.num_head_parameters), tokens=tokens, loss=known)


def _doubts(loss: float, vocab_size: int) -> tuple[str, ...]:
    if is_a_loss(loss, vocab_size=vocab_size):
        return ()
    guess = math.log(vocab_size)
    return (f"a loss of {loss:.3g} is more than guessing costs ({guess:.3g} nats): the law does not reach this far",)


def _reasons(legal: LegalBatch, laws: SideBySide, rates: SideBySide, schedule: Schedule, given_batch: int | None) -> dict[str, Reason]:
    said = f"{laws.reason.why}; they are {laws.disagreement:.2g} times apart" if given_batch is None else "as given"
    reasons = {
        "training.global_batch_size": Reason(f"{said}; {legal.why}", laws.reason.source if given_batch is None else "--batch"),
        "training.lr": Reason(
            f"{rates.reason.why}; they are {rates.disagreement:.2g} times apart; a smaller batch takes it down by its root",
            rates.reason.source,
        ),
        "training.batch_ramp": RAMP_REASON,
    }
    return reasons | {f"training.{name}": reason for name, reason in schedule.reasons.items()}
