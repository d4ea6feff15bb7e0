"""Proxy runs: which ones to train for a budget's worth of evidence, what they cost, and what is trained once for several of them. Pure.

For each budget a few model sizes around the expected optimum, all with equal compute (isoFLOP, Hoffmann et al., arXiv 2203.15556). Under
WSD a size is trained once at a constant rate, up to its largest budget; each smaller budget is a short cooldown that branches off (Hägele
et al., arXiv 2405.18392). Under any other schedule each point is a run of its own: a cosine cut short is no run of that length.

Compute is counted exactly (causal attention and head included, arXiv 2406.19146); 6 N D stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from surefoot.core.errors import ConfigError
from surefoot.core.model_sizes import ModelSizes, resolve_sizes
from surefoot.core.sections import CheckpointSection, ModelSection, RunConfig
from surefoot.plan.sizing.laws import Law, counted
from surefoot.plan.sweeps.proxy_sizes import at_width, proxy

Varied = Literal["", "lr", "batch"]
RateRule = Literal["fixed", "1/width"]

DEFAULT_SPAN = 8.0
"""Largest over smallest size of a budget: up to 2.8 times off the expected optimum there is still a size beyond, and all stay inside the
window of 4 that the fit looks at."""

LEAST_STEPS = 50
"""Fewer, and rounding to whole steps moves a budget by more than 1%; neither Adam's second moment nor a cooldown has settled either."""

WARMUP_SHARE = 0.1
"""Of a size's shortest run at most. A warm-up made for long runs is most of a short one's life, which bends the law (arXiv 2406.19146)."""

SAVE_EVERY_S = 600.0

NEXT_BUDGET = 1.25
"""Budgets that are nearer than this factor may be one to the fit: it takes rows within 20% together, and whole steps are not exact."""

FIT_SIZES = 4
"""Of one budget at least, or the fit sees no minimum there: a parabola has three coefficients, and its error is wanted too."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One point of the sweep. With a `parent` it branches from that run at `branch_step`, else `config` is all there is to it.

    `trained_flops` is what this run adds to the bill, `flops` and `tokens` are those of the whole way from step 0.
    """

    name: str
    config: RunConfig
    budget_flops: float
    sizes: ModelSizes
    flops: float
    tokens: float
    trained_flops: float
    parent: str = ""
    branch_step: int = 0

    @property
    def overrides(self) -> tuple[str, ...]:
        """What a branch changes in its parent's config."""
        length = self.config.schedule.decay_steps
        return (f"train.num_steps={self.config.train.num_steps}", f"schedule.decay_steps={length}", "checkpoint.keep_steps=[]")

    @property
    def flops_6nd(self) -> float:
        return 6.0 * self.sizes.num_parameters * self.tokens


@dataclass(frozen=True, slots=True)
class Design:
    """What is wanted of a sweep. `values` of `varied` multiply the runs; `rate_rule`: from the base's learning rate to a size's.

    With `widths` the sizes are those d_model at the base's depth, each trained for the base's steps, and budgets follow from them.
    """

    budgets: tuple[float, ...]
    law: Law
    num_sizes: int = 5
    span: float = DEFAULT_SPAN
    varied: Varied = ""
    values: tuple[float, ...] = ()
    rate_rule: RateRule = "fixed"
    widths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    design: Design
    runs: tuple[SweepRun, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def trained_flops(self) -> float:
        return sum(run.trained_flops for run in self.runs)

    @property
    def flops_alone(self) -> float:
        """What the points would cost without shared stable phases."""
        return sum(run.flops for run in self.runs)

    @property
    def most_tokens(self) -> float:
        return max(run.tokens for run in self.runs)


def design_sweep(base: RunConfig, vocab_size: int, design: Design) -> Sweep:
    """Raises ConfigError for a design that is none."""
    _check(base, design)
    by_size, notes = _of_widths(base, vocab_size, design) if design.widths else _around_the_optimum(base, vocab_size, design)
    settings = [replace(base, model=section, optimizer=replace(base.optimizer, lr=_rate(base, section, design))) for section in by_size]
    tried = [(config, value) for config in settings for value in design.values or (None,)]
    runs = [run for config, value in tried for run in _runs_of_size(_with_value(config, value, design), by_size[config.model], vocab_size)]
    short = [run for run in runs if run.config.train.num_steps < LEAST_STEPS]
    if short:
        steps = min(run.config.train.num_steps for run in short)
        shortest = "the shortest a single one, which no schedule fits into" if steps == 1 else f"the shortest {steps}"
        notes.append(f"{len(short)} runs have fewer than {LEAST_STEPS} steps, {shortest}: take larger budgets or a smaller batch")
    names = [run.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"more than one run would be {twice[0]}", where="--over, --widths", hint="give every value once")
    return Sweep(design, tuple(sorted(runs, key=lambda run: (bool(run.parent), -run.trained_flops))), (*notes, *_unfit(design)))


def _unfit(design: Design) -> list[str]:
    """What keeps `sweep fit` from finding a law; a sweep may be meant for something else."""
    if design.varied or design.widths:
        return []
    notes = []
    if design.num_sizes < FIT_SIZES:
        notes.append(f"--sizes {design.num_sizes}: a fit needs at least {FIT_SIZES} sizes for each budget, or it finds no minimum there")
    if len(design.budgets) == 1:
        notes.append("one budget: a fit needs at least 2 of them, and 4 to tell how well its law holds")
    return notes


def _check(base: RunConfig, design: Design) -> None:
    where = "--budgets"
    if design.widths and design.budgets:
        raise ConfigError("both budgets and widths", where="--widths", hint="widths are trained for the steps of BASE: leave --budgets out")
    if not (design.budgets or design.widths) or any(not math.isfinite(budget) or budget <= 0 for budget in design.budgets):
        raise ConfigError(f"budgets are numbers of FLOPs above 0, got {list(design.budgets)}", where=where, hint="such as 1e18,2e18,4e18")
    for low, high in pairwise(sorted(design.budgets)):
        if high < low * NEXT_BUDGET:
            what = f"{low:.4g} and {high:.4g} are one budget to a fit"
            raise ConfigError(what, where=where, hint="take budgets a factor 1.5 or more apart")
    if design.num_sizes < 1 or not 1.0 <= design.span < math.inf:
        what = f"{design.num_sizes} sizes over a factor of {design.span:g}"
        raise ConfigError(what, where="--sizes, --span", hint="at least 1 size, and a finite factor of 1 or more, such as 8")
    if base.model.factory:
        raise ConfigError(
            "how a model of model.factory is made smaller is not known", where="[model] factory", hint="sweep our own decoder"
        )
    if base.train.batch_ramp:
        raise ConfigError("a batch ramp would be another share of each run", where="[train] batch_ramp", hint="leave it out of the sweep")
    for value in design.values:
        if not 0 < value < math.inf or (design.varied == "batch" and value != int(value)):
            raise ConfigError(f"{value:g} is no {design.varied}", where="--over", hint="--over lr=1e-3,2e-3 or --over batch=8,16,32")


def _of_widths(base: RunConfig, vocab_size: int, design: Design) -> tuple[dict[ModelSection, list[float]], list[str]]:
    """Equal steps, so equal tokens: what is compared is the width alone."""
    head_dim = base.model.d_model // base.model.num_heads
    by_size: dict[ModelSection, list[float]] = {}
    for width in design.widths:
        if width < head_dim or width % head_dim:
            hint = "a wider model has more heads, not wider ones"
            raise ConfigError(f"{width} is no multiple of the {head_dim} dimensions of a head", where="--widths", hint=hint)
        section = at_width(base.model, vocab_size, num_heads=width // head_dim)
        flops_per_sequence = resolve_sizes(section, vocab_size).flops_per_sequence(base.data.seq_len)
        by_size[section] = [float(base.train.num_steps * base.train.global_batch_size * flops_per_sequence)]
    return by_size, []


def _around_the_optimum(base: RunConfig, vocab_size: int, design: Design) -> tuple[dict[ModelSection, list[float]], list[str]]:
    budgets = sorted(design.budgets)
    by_size: dict[ModelSection, list[float]] = {}
    notes: list[str] = []
    for budget, sections in zip(budgets, _sizes(base, vocab_size, budgets, design), strict=True):
        if len(sections) < design.num_sizes:
            notes.append(f"{budget:.3g} FLOPs: {len(sections)} sizes, for whole heads and layers make no {design.num_sizes} different ones")
        for section in sections:
            by_size.setdefault(section, []).append(budget)
    return by_size, notes


def _sizes(base: RunConfig, vocab_size: int, budgets: Sequence[float], design: Design) -> list[list[ModelSection]]:
    """Of each budget, on one grid for all: where budgets overlap they share sizes, and with them stable phases."""
    law, num = design.law, design.num_sizes
    step = math.log(design.span) / (num - 1) if num > 1 else 1.0
    origin = math.log(law.best_n(budgets[0]))
    found = []
    for budget in budgets:
        centre = (math.log(law.best_n(budget)) - origin) / step
        centre = round(centre) if num > 1 else centre  # a single size shares nothing: it is the expected one itself
        grid = [math.exp(origin + (centre + place - (num - 1) / 2) * step) for place in range(num)]
        sections = (
            proxy(base.model, vocab_size, n=n, count=lambda sizes: counted(sizes, law.counts, seq_len=base.data.seq_len)) for n in grid
        )
        found.append(list(dict.fromkeys(sections)))
    return found


def _rate(base: RunConfig, section: ModelSection, design: Design) -> float:
    narrower = base.model.d_model / section.d_model if design.rate_rule == "1/width" else 1.0
    return base.optimizer.lr * narrower


def _with_value(config: RunConfig, value: float | None, design: Design) -> tuple[RunConfig, str]:
    """The config under one value of what is varied, and what the names of its runs end with. Adam's rate follows the root of the batch
    (Malladi et al., arXiv 2205.10287), so that a batch is not judged by a rate that was another's."""
    if value is None:
        return config, ""
    if design.varied == "lr":
        short = f"{value:.3g}"
        return replace(config, optimizer=replace(config.optimizer, lr=value)), f"-lr{short if float(short) == value else repr(value)}"
    batch = int(value)
    scaled = config.optimizer.lr * math.sqrt(batch / config.train.global_batch_size)
    train = replace(config.train, global_batch_size=batch, micro_batch_size=math.gcd(batch, config.train.micro_batch_size))
    return replace(config, train=train, optimizer=replace(config.optimizer, lr=scaled)), f"-b{batch}"


def _runs_of_size(tried: tuple[RunConfig, str], budgets: Sequence[float], vocab_size: int) -> list[SweepRun]:
    """One size at its budgets, rising: the largest one's run first, and the cooldowns that branch from it."""
    config, ending = tried
    sizes = resolve_sizes(config.model, vocab_size)
    samples, seq_len = config.train.global_batch_size, config.data.seq_len
    flops_per_step = samples * sizes.flops_per_sequence(seq_len)
    if flops_per_step > 2 * budgets[0]:
        one = f"a step of {samples:.4g} samples, {sizes.flops_per_sequence(seq_len):.3g} FLOPs each at d_model {sizes.d_model},"
        hint = "take a smaller batch (train.global_batch_size, --over batch=...) or larger budgets"
        raise ConfigError(f"{one} is more than all of {budgets[0]:.3g} FLOPs", where="--budgets, --over", hint=hint)
    num_steps = [max(1, round(budget / flops_per_step)) for budget in budgets]
    shares = config.schedule.kind == "wsd"
    cooldowns = [_cooldown(config, steps) for steps in num_steps] if shares else [0] * len(budgets)
    starts = tuple(steps - length for steps, length in zip(num_steps, cooldowns, strict=True))
    warmup = min(config.schedule.warmup_steps, math.ceil(WARMUP_SHARE * num_steps[0]), starts[0])
    names = [f"d{sizes.d_model}x{sizes.num_layers}-c{budget:.3g}{ending}".replace("+", "") for budget in budgets]
    last = len(budgets) - 1
    runs = []
    for index in range(last, -1, -1):
        branches = shares and index < last and starts[index] > 0
        schedule = replace(config.schedule, warmup_steps=warmup)
        if shares:
            schedule = replace(schedule, decay_steps=cooldowns[index])
        own = replace(
            config,
            run=replace(config.run, name=names[index], dir=""),
            train=replace(config.train, num_steps=num_steps[index], eval_interval_steps=0),
            schedule=schedule,
            checkpoint=_saves(config.checkpoint, keep_steps=starts[:last] if shares and index == last else ()),
        )
        runs.append(
            SweepRun(
                name=names[index],
                config=own,
                budget_flops=budgets[index],
                sizes=sizes,
                flops=float(num_steps[index] * flops_per_step),
                tokens=float(num_steps[index] * samples * seq_len),
                trained_flops=float((cooldowns[index] if branches else num_steps[index]) * flops_per_step),
                parent=names[last] if branches else "",
                branch_step=starts[index] if branches else 0,
            )
        )
    return runs


def _saves(section: CheckpointSection, *, keep_steps: tuple[int, ...]) -> CheckpointSection:
    """Where branches begin, and against an interruption every ten minutes."""
    interval_s = section.interval_s or SAVE_EVERY_S
    kept = replace(section, interval_steps=0, interval_s=interval_s, milestone_steps=0, keep_last=1)
    return replace(kept, keep_steps=tuple(sorted({step for step in keep_steps if step > 0})), prove=False)


def _cooldown(config: RunConfig, num_steps: int) -> int:
    """Its length: the share of the base's own run that decays, a fifth unless it says otherwise. At least one step."""
    schedule = config.schedule
    share = schedule.decay_steps / config.train.num_steps if schedule.decay_steps >= 0 else 0.2
    return max(1, min(num_steps - 1, round(share * num_steps)))
